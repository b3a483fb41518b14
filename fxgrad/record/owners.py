"""Whose sites a recorder observes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fxgrad.torch_support.private import acts_after_accumulation

if TYPE_CHECKING:
    from fxgrad.record.recorder import Part


class Owner(Protocol):
    """Whose sites are observed: a forward record, or the parameters.

    ``task`` and ``part`` are the recorder's: the backward pass that is running through the owner, and its part.
    ``escalated`` are the sites to be measured at ``full``.  ``invalidate`` is called in a backward pass that is
    differentiated itself.  ``freed``: whether an earlier pass has let go of what the forward saved; ``changed``: names
    of parameters that were changed in place between the forward and a pass that raised.  ``settled``: what was measured
    has been sorted by the sites that there are, which therefore have to stay.
    """

    number: int
    freed: bool
    changed: tuple[str, ...]
    task: int | None
    part: Any
    expected: int
    escalated: Any
    differentiated: bool
    settled: bool

    def reached(self) -> None:
        """A backward pass comes here: nothing of it has been recorded yet."""
        ...

    def invalidate(self) -> None:
        """A backward pass is being differentiated."""
        ...

    def raising(self) -> None:
        """A backward pass that has come here is raising, right now."""
        ...

    def passed(self, *, freed: bool) -> None:
        """A backward pass that has come here is over; ``freed``: torch let go of what the forward had saved."""
        ...


class Parameters:
    """The owner of the parameters' sites; ``tensors`` are the parameters themselves by number."""

    def __init__(self) -> None:
        self.number = -1
        self.freed = False
        self.changed: tuple[str, ...] = ()
        self.task: int | None = None
        self.part: Part | None = None
        self.expected = 0
        self.escalated: set[int] = set()
        self.differentiated = False
        self.settled = False
        self.lost: Callable[[], list[int]] = list  # which C++ hooks torch has cleared since
        self.slots = None  # the native recorder's are the parameters' numbers
        self.sizes: Any = None
        self.tensors: dict[int, Tensor] = {}
        self.reduced: set[int] = set()  # whose gradients are added up over the ranks behind autograd's back
        self.carried: set[int] = set()  # those of them that had a gradient when the running pass began

    def begins(self) -> None:
        """A backward pass begins."""
        self.carried = {number for number in self.reduced if self.tensors[number].grad is not None}

    def nbytes(self, device: torch.device) -> int:
        """Of the parameters on ``device``."""
        return sum(p.nbytes for p in list(self.tensors.values()) if p.device == device and not is_lazy(p))

    def acts(self, index: int) -> bool:
        """Whether somebody acts on a parameter's gradient once it is there, perhaps in ways torch does not count."""
        parameter = self.tensors.get(index)
        return parameter is not None and acts_after_accumulation(parameter)

    def reached(self) -> None:
        """Nothing to look at."""

    def invalidate(self) -> None:
        """What a parameter gets is what arrives, however it comes about."""
        self.differentiated = True

    def raising(self) -> None:
        """What became of the parameters is known by their forward calls."""

    def passed(self, *, freed: bool) -> None:
        """Parameters save nothing."""
