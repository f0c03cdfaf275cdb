"""Small architectures, each true to its kind, that every pass has to cope with.

An architecture is a module of this package with an `ENTRY`; a new one also joins the list below. All have at
most 50,000 parameters, so that a step takes milliseconds and a test can take twenty of them.
"""

from __future__ import annotations

from tests.zoo import (
    bert,
    clip,
    diffusion,
    dlrm,
    gnn,
    gpt,
    lstm_lm,
    mobilenet,
    moe,
    resnet,
    t5,
    tcn,
    unet,
    vae,
    vit,
)
from tests.zoo.entry import Batch, Entry, trained

_MODULES = (
    bert,
    clip,
    diffusion,
    dlrm,
    gnn,
    gpt,
    lstm_lm,
    mobilenet,
    moe,
    resnet,
    t5,
    tcn,
    unet,
    vae,
    vit,
)

ZOO: dict[str, Entry] = {module.ENTRY.name: module.ENTRY for module in _MODULES}

__all__ = ["ZOO", "Batch", "Entry", "trained"]
