"""Parameters that a forward uses and that belong to no registered module: where they are held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.captured import Call, Opaque
from fxgrad.capture.modules import ModuleMap

_DEPTH = 3  # containers inside of containers that are searched
_REGISTRIES = frozenset({"_modules", "_parameters", "_buffers"})


class Strays:
    """Those that one forward call meets.  Holds them until the call ends."""

    def __init__(self, modules: ModuleMap) -> None:
        self._modules = modules
        self._met: list[tuple[Tensor, Opaque]] = []

    def unnamed(self, tensor: Tensor) -> Opaque:
        """How a call graph writes a tensor that is no known value and not registered in the model.

        It says where a parameter is held that gets a gradient and that no optimizer built of the model can know.
        """
        stray = isinstance(tensor, nn.Parameter) and tensor.requires_grad and torch.is_grad_enabled()
        if not stray or self._registered(tensor):
            return Opaque("tensor")
        holder = self._holder(tensor)
        return self._noted(tensor, f"a parameter of shape {tuple(tensor.shape)}" if holder is None else holder)

    def referenced_leaf(self, tensor: Tensor) -> tuple[Opaque, ...]:
        """The same of a tensor that is no ``nn.Parameter``, where a module of the model holds it; else nothing."""
        if not tensor.is_leaf or not tensor.requires_grad or not torch.is_grad_enabled():
            return ()
        holder = self._holder(tensor)
        return (self._noted(tensor, holder),) if holder else ()

    def close(self, calls: Sequence[Call]) -> None:
        """At the end of the forward: what has been registered since it was met is none."""
        registered = {id(note) for tensor, note in self._met if self._registered(tensor)}
        for call in calls if registered else ():
            call.args = _without(call.args, registered)
            call.kwargs = _without(call.kwargs, registered)
        self._met = []

    def _noted(self, tensor: Tensor, holder: str) -> Opaque:
        note = Opaque("tensor", holder)
        self._met.append((tensor, note))
        return note

    def _registered(self, tensor: Tensor) -> bool:
        """Whether it is registered now: modules come in forward, and wrappers swap parameters around it."""
        return any(one is tensor for one in nn.Module.parameters(self._modules.root))

    def _holder(self, tensor: Tensor) -> str | None:
        """Where an attribute holds a tensor, such as ``encoder.layers[1].weight``; None where none does.

        Empty where it belongs to a model of which this one is a part.
        """
        for place in self._modules.places.values():
            for name, value in vars(place.module).items():
                if name in _REGISTRIES:
                    continue
                where = f"{place.path}.{name}" if place.path else name
                found = next(self._within(value, tensor, where, _DEPTH), None)
                if found is not None:
                    return found
        return None

    def _within(self, value: Any, tensor: Tensor, where: str, depth: int) -> Iterator[str]:
        if value is tensor:
            yield where
        elif isinstance(value, nn.Module):
            around = any(one is self._modules.root for one in nn.Module.modules(value))
            for name, one in nn.Module.named_parameters(value):
                if one is tensor:
                    yield "" if around else f"{where}.{name}"
        elif depth and isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield from self._within(item, tensor, f"{where}[{number}]", depth - 1)
        elif depth and isinstance(value, dict):
            for key, item in dict.items(value):
                yield from self._within(item, tensor, f"{where}[{key!r}]", depth - 1)


def _without(value: Any, registered: set[int]) -> Any:
    """An argument in which these notes say nothing any more."""
    if isinstance(value, Opaque):
        return Opaque(value.text) if id(value) in registered else value
    if type(value) in {list, tuple}:
        return type(value)(_without(item, registered) for item in value)
    if isinstance(value, dict):
        return {key: _without(item, registered) for key, item in value.items()}
    return value
