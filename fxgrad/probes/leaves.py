"""What the hook on a leaf tensor does when a model is observed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.torch_support.private import current_backward

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord


class Entry:
    """A site at a leaf; the number is negative for none.

    It may be set later; ``find`` tells it until then, for a backward pass inside of the forward.
    """

    __slots__ = ("find", "index")

    def __init__(self, index: int, find: Callable[[], int] | None = None) -> None:
        self.index = index
        self.find = find

    def site(self) -> int:
        """The number, as far as it is known now."""
        return self.index if self.find is None else self.find()


class LeafHook:
    """Hands the gradient of a leaf to the forward calls that the running backward pass goes through.

    A leaf's gradient comes after those of the values that were computed from it, so that by then each of these calls
    has seen one, except a call that computed nothing.
    """

    __slots__ = ("calls",)
    __torch_unserializable__ = True

    def __init__(self) -> None:
        self.calls: list[tuple[weakref.ref[Any], Entry]] = []

    def add(self, forward_record: ForwardRecord, index: int, find: Callable[[], int] | None = None) -> Entry:
        """One more forward call takes the leaf."""
        entry = Entry(index, find)
        self.calls = [(ref, known) for ref, known in self.calls if ref() is not None]
        self.calls.append((weakref.ref(forward_record), entry))
        return entry

    def __call__(self, gradient: Tensor) -> None:
        """Observe ``gradient``."""
        task = current_backward()
        for number, (ref, entry) in enumerate(self.calls, 1):
            forward_record = ref()
            if forward_record is None or (site := entry.site()) < 0:
                continue
            if forward_record.task == task or (not forward_record.computed and number == len(self.calls)):
                forward_record.sink.observe(forward_record, site, gradient)
