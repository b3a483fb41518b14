"""Hooks on leaf tensors, which outlive the autograd graph: one for each tensor, whatever forward calls take it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class LeafHooks:
    """One hook for each leaf tensor, made by ``make`` when the tensor is first seen; gone with the tensor.

    ``then`` is called when a tensor has got its hook: torch clears those from C++ at the first from Python.
    """

    def __init__(self, make: Callable[[], Any], then: Callable[[Tensor], None] = lambda _: None) -> None:
        self._make = make
        self.then = then
        self._on: dict[int, tuple[weakref.ref[Tensor], RemovableHandle, Any]] = {}

    def of(self, value: Tensor) -> Any:
        """The hook on ``value``."""
        key, on = id(value), self._on
        known = on.get(key)
        if known is None or known[0]() is not value:
            hook = self._make()
            handle: RemovableHandle = value.register_hook(hook)  # type: ignore[no-untyped-call]
            known = on[key] = (weakref.ref(value, lambda _: on.pop(key, None)), handle, hook)
            self.then(value)
        return known[2]

    def remove(self) -> None:
        """Take all of them off."""
        for _, handle, _ in self._on.values():
            handle.remove()
        self._on.clear()
