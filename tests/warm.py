"""Imported by the process that ranks are forked from: what each process finds out before its first compilation
takes seconds, and is the same in all of them. Which vector instructions there are (by running programs that use
them), Inductor's patterns, a digest of Triton's files, Dynamo's tables.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401  (tests, which ranks import, do)
import torch
from torch import nn

import fxpasses.backend  # noqa: F401
from fxpasses import registry


def _compile_something() -> None:
    """On one thread, and none beside it that compile: others would be missing in what is forked."""
    torch.set_num_threads(1)
    # On a hit of AOTAutograd's cache most of it would be left out.
    cacheless = torch._functorch.config.patch(enable_autograd_cache=False)
    threadless = torch._inductor.config.patch(compile_threads=1)
    # A torch that knows of devices starts autograd's threads for them, and these are missing in what is forked.
    trains = torch.enable_grad if not torch.backends.cuda.is_built() else torch.no_grad
    with torch.random.fork_rng(devices=[]), cacheless, threadless, trains():
        loss = torch.compile(nn.Linear(32, 32))(torch.ones(2, 32)).sum()
        if loss.requires_grad:
            loss.backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


registry.passes()
_compile_something()
gc.collect()
gc.freeze()  # the collector of each rank would copy all pages
