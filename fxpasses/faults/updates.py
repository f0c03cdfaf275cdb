"""Updates that no optimizer announces, by hand-written code: faults of phase `update` can't strike these.

backward ─▶ digests of parameters ─▶ … ─▶ next forward: others now, and no step has ended in between?
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.guards.replicas import digest


class Unannounced:
    """Watches parameters from a backward to the next forward."""

    def __init__(self) -> None:
        self._digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Called behind a backward."""
        for parameter in parameters.values():
            self._digests[parameter] = digest(parameter).tolist()

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Called in front of a forward.

        Raises:
            ValueError: for a parameter that has changed.
        """
        for name, parameter in parameters.items():
            known = self._digests.get(parameter)
            if known is not None and known != digest(parameter).tolist():
                raise ValueError(
                    f"option 'faults': where=update strikes inside of an update, and {name!r} was changed by "
                    "code that is no optimizer; give an optimizer to fxpasses.optimizer, or compile forward, "
                    "backward and update as one function"
                )
