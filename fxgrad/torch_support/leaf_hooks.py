"""Hooks in front of the user's; and on leaf tensors, which outlive the graph: one for each, whatever calls take it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def hook_in_front(value: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Register ``hook`` on ``value`` so that it sees the gradient as it arrives, before hooks of the user's act."""
    handle: RemovableHandle = value.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: dict[int, Any] = handle.hooks_dict_ref() or {}
    for number in list(hooks)[:-1]:  # torch goes by the order of insertion; move_to_end would not change that
        hooks[number] = hooks.pop(number)
    return handle


class LeafHooks:
    """One hook for each leaf tensor, made by ``make`` when the tensor is first seen; gone with the tensor.

    ``register``: how it is put on.  ``then`` is called when a tensor has got its hook: torch clears those from C++ at
    the first from Python.
    """

    def __init__(
        self, make: Callable[[], Any], register: Callable[[Tensor, Any], RemovableHandle],
        then: Callable[[Tensor], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._make = make
        self._register = register
        self.then = then
        self._on: dict[int, tuple[weakref.ref[Tensor], RemovableHandle, Any]] = {}

    def of(self, value: Tensor) -> Any:
        """The hook on ``value``."""
        key, on = id(value), self._on
        known = on.get(key)
        if known is None or known[0]() is not value:
            hook = self._make()
            handle = self._register(value, hook)
            known = on[key] = (weakref.ref(value, lambda _: on.pop(key, None)), handle, hook)
            self.then(value)
        return known[2]

    def remove(self) -> None:
        """Take all of them off."""
        for _, handle, _ in self._on.values():
            handle.remove()
        self._on.clear()
