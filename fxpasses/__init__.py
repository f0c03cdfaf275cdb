"""fxpasses: the `hardened` backend for torch.compile.

Importing this package is cheap: nothing of torch is loaded until a name below is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Hardening": "fxpasses.config",
    "Pass": "fxpasses.passes.base",
    "Report": "fxpasses.passes.base",
    "GradScaler": "fxpasses.grad_scaler",
    "LossScaleError": "fxpasses.scaler",
    "Role": "fxpasses.graph",
    "TrainingGraph": "fxpasses.graph",
    "explain_nonfinite": "fxpasses.nonfinite",
    "join": "fxpasses.distributed.join",
    "optimizer": "fxpasses.atomic_update",
    "register_pass": "fxpasses.registry",
    "runtime": "fxpasses.owners",
    "splice": "fxpasses.rewrite",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from fxpasses.atomic_update import optimizer as optimizer
    from fxpasses.config import Hardening as Hardening
    from fxpasses.distributed.join import join as join
    from fxpasses.grad_scaler import GradScaler as GradScaler
    from fxpasses.graph import Role as Role
    from fxpasses.graph import TrainingGraph as TrainingGraph
    from fxpasses.nonfinite import explain_nonfinite as explain_nonfinite
    from fxpasses.owners import runtime as runtime
    from fxpasses.passes.base import Pass as Pass
    from fxpasses.passes.base import Report as Report
    from fxpasses.registry import register_pass as register_pass
    from fxpasses.rewrite import splice as splice


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxpasses' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
