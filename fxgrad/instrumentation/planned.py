"""One forward call under a probe plan: sites without a hook, and what makes them get one after all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.instrumentation.plan import ProbePlan, Step
from fxgrad.torch_private import held_by_python, version_of

NO_PLAN = ProbePlan({}, {}, frozenset(), ())


class _Left(NamedTuple):
    """A value that got no hook, as it was then."""

    tensor: weakref.ref[Tensor]
    version: int
    shape: torch.Size
    dtype: torch.dtype


def _holds(step: Step, left: _Left, result: Tensor) -> bool:
    if left.dtype != result.dtype or (step.same_object and left.tensor() is not result):
        return False
    return left.shape == result.shape or (not step.same_shape and left.shape.numel() == result.numel())


class Planned:
    """The steps that hold in one forward call.

    A step is given up as soon as the call turns out different from the one that was planned for: the value gets its
    hook while it is alive, and is named where that is too late.

    Attributes:
        steps: of this call; those that were given up are missing.
        left: values without a hook, by site.
        dropped: sites that should have had a hook, with the reason in words.
        active: whether further values may be left without a hook.
    """

    __slots__ = ("_behind", "_put", "active", "dropped", "left", "plan", "steps")

    def __init__(self, plan: ProbePlan, put: Callable[[Tensor, int], Any]) -> None:
        self.plan = plan
        self.steps: Mapping[int, Step] = plan.steps
        self.left: dict[int, _Left] = {}
        self.dropped: dict[int, str] = {}
        self.active = bool(plan.steps)
        self._put = put
        self._behind: dict[int, weakref.ref[Tensor]] = {}

    def leave_out(self, site: int, value: Tensor) -> None:
        """Note a value that gets no hook."""
        self.left[site] = _Left(weakref.ref(value), version_of(value), value.shape, value.dtype)

    def returned(self, site: int, value: Tensor) -> None:
        """The result of a step is there: the values before it are looked at once more."""
        sites = self.plan.before.get(site)
        if sites is None:
            return
        self._behind[site] = weakref.ref(value)
        for before in sites:
            left = self.left.get(before)
            if left is not None and not _holds(self.steps[before], left, value):
                self._give_up(before, "the call behind it returned something else than planned")

    def differs(self, first: int) -> None:
        """The call goes another way from site ``first`` on; what was used up before was used as planned."""
        for site in list(self.left):
            self._give_up(site, None if self.steps[site].site < first else "the forward call changed its course")
        self._stop()

    def distrust(self, why: str) -> None:
        """Something happened that may lie between any two sites."""
        for site in list(self.left):
            self._give_up(site, why)
        self._stop()

    def _stop(self) -> None:
        """From here on every value gets a hook."""
        self.active = False
        self.steps = {site: step for site, step in self.steps.items() if site in self.left}

    def settle(self) -> list[int]:
        """When the forward call has returned: sites whose value, or the result behind it, is still held by somebody.

        Whoever holds a value may change its gradient or use it again, so such a site gets its hook.
        """
        found = [
            site for site, left in self.left.items()
            if held_by_python(left.tensor) or self._held(self.steps[site].site)
        ]  # fmt: skip
        for site in found:
            self._give_up(site, "a value next to it outlived the forward call")
        return found

    def _held(self, behind: int) -> bool:
        result = self._behind.get(behind)
        return result is None or held_by_python(result)

    def retire(self, plan: ProbePlan, shapes: Mapping[int, tuple[torch.Size, torch.dtype]]) -> None:
        """After a call that was not planned: its sites with a step are read from the site behind."""
        self.plan, self.steps = plan, plan.steps
        nowhere: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
        self.left = {site: _Left(nowhere, 0, *shapes[site]) for site in plan.steps}

    def _give_up(self, site: int, why: str | None) -> None:
        left = self.left[site]
        tensor = left.tensor()
        if tensor is not None and tensor.requires_grad and version_of(tensor) == left.version:
            self._put(tensor, site)
        elif why is None and tensor is None:
            return
        else:
            self.dropped[site] = f"it was given no probe of its own, and then {why or 'was changed in place'}"
        del self.left[site]
        self.steps = {number: step for number, step in self.steps.items() if number != site}
