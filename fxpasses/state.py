"""Named tensors that live across steps, held by the identity of the parameter they belong to.

One compiled graph can serve many modules, so state is looked up at call time and passed in; it is never
baked into compiled code. A name is `kind/qualified.parameter.name`, never a bucket's number: re-bucketing,
recompiling and resuming keep it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.graph import StateSpec


class StateStore:
    """Tensors by (parameter, kind). An entry goes when its parameter goes."""

    def __init__(self) -> None:
        self._tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, parameter: torch.Tensor, spec: StateSpec) -> torch.Tensor:
        """The tensor for `spec`, made on first use: shape, dtype, device and fill as the spec says.

        Raises:
            ValueError: when a tensor of that kind is there in another shape or dtype (a checkpoint of
                another model or of another pass).
        """
        kinds = self._tensors.setdefault(parameter, {})
        if spec.kind not in kinds:
            kinds[spec.kind] = torch.full(
                spec.shape, spec.fill, dtype=spec.dtype, device=spec.device
            )
        tensor = kinds[spec.kind]
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"state {spec.name!r} is {tensor.dtype}{list(tensor.shape)}, but the compiled graph needs "
                f"{spec.dtype}{list(spec.shape)}; load a state dict of this model and these options"
            )
        if tensor.device != spec.device:
            tensor = kinds[spec.kind] = tensor.to(spec.device)
        return tensor

    def get_for(self, spec: StateSpec, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The tensor for `spec`, of one parameter or of several.

        Args:
            tensor_of: finds a parameter by name.
        """
        if not spec.parts:
            return self.get(tensor_of(spec.parameter), spec)
        return self._flat([tensor_of(name) for name, _ in spec.parts], spec)

    def put(self, parameter: torch.Tensor, kind: str, tensor: torch.Tensor) -> None:
        """Set a tensor to these values, in place where one of that form exists."""
        old = self._tensors.setdefault(parameter, {}).get(kind)
        if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            old.copy_(tensor)
        else:
            self._tensors[parameter][kind] = tensor.detach().clone()

    def of(self, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, tensor) of one parameter."""
        yield from self._tensors.get(parameter, {}).items()

    def _flat(self, parameters: list[torch.Tensor], spec: StateSpec) -> torch.Tensor:
        """One tensor that each parameter's is a view of. Where it is not so yet (at first, after another
        bucketing or loading), they move together.
        """
        own = [
            dataclasses.replace(spec, parameter=name, shape=(numel,), parts=())
            for name, numel in spec.parts
        ]
        tensors = [self.get(p, s) for p, s in zip(parameters, own, strict=True)]
        flat = tensors[0]._base
        if flat is None or flat.numel() != spec.numel() or not _are_parts_of(flat, tensors):
            flat = torch.cat(tensors)
            views = flat.split([numel for _, numel in spec.parts])
            for parameter, view in zip(parameters, views, strict=True):
                self._tensors[parameter][spec.kind] = view
        return flat


def _are_parts_of(flat: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether they are views of it, one behind the other."""
    offset = 0
    for tensor in tensors:
        if tensor._base is not flat or tensor.storage_offset() != offset:
            return False
        offset += tensor.numel()
    return True


STORE = StateStore()
