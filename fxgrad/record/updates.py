"""What an optimizer's steps do to the parameters: norms on the device, taken between torch's public step hooks."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxgrad.record.changes import Layout, Measured, Settings, joint_norm
from fxgrad.record.recorder import HISTORY
from fxgrad.schema import StepFacts, Update
from fxgrad.torch_support.private import without_dispatch_modes, without_torch_function

_ASKED = 4  # parameters that are asked whether their gradient is still in the same memory


@dataclass(slots=True, eq=False)
class Step:
    """One step of one optimizer behind observed backward passes; numbers stay on the device until they are read.

    Attributes:
        optimizer, place: class name, and number among the optimizers of the watch.
        number: of the step, as the host counts them from 0; without those that a fused kernel skipped, see ``skips``.
        first, end: it used the backward events from ``first`` on and before ``end``.
        layout: which parameters it moved.
        measured: what ``Layout.changes`` gave.
        settings: by parameter group.
        gradient: l2 norm of what ``.grad`` of the moved parameters held; None where there was none.
        carried: l2 norms of what ``.grad`` of all its parameters held when these events began; None where unknown.
        found: above 0 where a fused optimizer was told of Inf or NaN, so that its kernel changed nothing; else None.
        skips: how many steps were skipped so up to this one; None where none can have been.
    """

    optimizer: str
    place: int
    number: int
    first: int
    end: int
    layout: Layout
    measured: Measured
    settings: list[Settings]
    gradient: Tensor | None = None
    carried: list[Tensor | float | None] = field(default_factory=list)
    found: Tensor | None = None
    skips: Tensor | None = None
    _read: tuple[StepFacts, dict[int, Update]] | None = field(default=None)

    def read(self) -> tuple[StepFacts, dict[int, Update]]:
        """What is known of the step, and the updates by id of the parameter.  Copies to the host at the first call."""
        if self._read is None:
            self._read = self._on_host()
        return self._read

    def _on_host(self) -> tuple[StepFacts, dict[int, Update]]:
        kept = self.found is None or float(self.found) <= 0
        number = self.number - (0 if self.skips is None else int(self.skips))
        rates = tuple(_number(one.rate) for one in self.settings)
        moved = len(self.layout.parameters)
        gradient = 0.0 if not moved else _number(self.gradient)
        facts = StepFacts(self.optimizer, self.place, number if kept else None, moved, gradient, self._kept(), rates)
        return facts, self._updates() if kept else {}

    def _kept(self) -> float | None:
        """What was carried into the events: 0.0 where it was cleared before one of them, else that of the first."""
        norms = [_number(norm) for norm in self.carried]
        if 0.0 in norms:
            return 0.0
        return norms[0] if norms else None

    def _updates(self) -> dict[int, Update]:
        numbers = [(_number(one.rate), _number(one.epsilon), _number(one.decay)) for one in self.settings]
        found: dict[int, Update] = {}
        for rows, buffer in self.measured:
            for row, (before, change, left, lost, active) in zip(rows, buffer.tolist(), strict=True):
                group = self.layout.groups[row]
                if row in self.layout.silent:
                    continue
                decays = self.settings[group].decays and not self.layout.parameters[row].is_complex()
                found[id(self.layout.parameters[row])] = Update(
                    change, before, *numbers[group],
                    _cosine(before, change, left) if decays else None,
                    lost / active if active else None,
                )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class _Carried:
    """What ``.grad`` held when a backward event began, and where in memory, for a few of the parameters."""

    event: int
    norm: Tensor | float | None
    places: list[tuple[Tensor, int]]

    def now(self) -> Tensor | float | None:
        """The norm, where ``.grad`` is that memory still: a backward pass adds to it, an assignment replaces it."""
        moved = [parameter.grad is not None and _place(parameter.grad) != place for parameter, place in self.places]
        return 0.0 if moved and all(moved) else self.norm


def _place(gradient: Tensor) -> int:
    """Where its memory begins; 0 where it has none of its own."""
    return gradient.data_ptr() if type(gradient) is Tensor and gradient.layout is torch.strided else 0


def _cosine(before: float, change: float, left: float) -> float | None:
    """Of what a step took away and the parameter before it, which is what was taken away and what is left."""
    size = before * change
    if not math.isfinite(size) or size <= 0:
        return None
    return max(-1.0, min(1.0, (change * change + left) / size))


class Updates:
    """The steps of one optimizer.

    A step is measured when a backward pass was observed since the step before, or when it is given a closure that may
    run one.  The parameters that have a gradient (with a closure: that require one) are copied when it begins, and
    the copies are gone when it ends.

    Args:
        optimizer: whose hooks are used.
        events: how many backward events have begun.
        wanted: whether anything is observed now.
        place: its number among the optimizers of the watch.
    """

    def __init__(
        self, optimizer: Optimizer, events: Callable[[], int], wanted: Callable[[], bool], place: int = 0
    ) -> None:
        self.type = type(optimizer).__name__
        self.place = place
        self.calls = 0
        self.in_kernel = False  # whether a fused kernel decides which steps are skipped
        self._running = False  # whether a step runs that may call the model
        self.steps: deque[Step] = deque(maxlen=HISTORY)
        self._first = 0
        self._events = events
        self._wanted = wanted
        self._copies: list[Tensor | None] = []
        self._measures = False  # whether the step that runs is one to be measured
        self._settings: list[Settings] = []
        self._gradient: Tensor | None = None
        self._carried: deque[_Carried] = deque(maxlen=HISTORY)
        self._optimizer = weakref.ref(optimizer)  # a watch keeps no optimizer's state alive
        self._grouped: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._found: Tensor | None = None
        self._skips: Tensor | None = None
        self._layout: Layout | None = None
        self._failed = False
        self._optimizer = weakref.ref(optimizer)
        # What torch.compile makes of a step must not contain us.
        before, after = map(torch.compiler.disable, (_unseen(self._before), _unseen(self._after)))
        self._handles = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._copies, self._measures = [], False

    def discard(self) -> None:
        """The gradients so far were thrown away: the next step belongs to what comes."""
        if not self._running:
            # Copies are left by a step that raised.
            self._first, self._copies, self._measures = self._events(), [], False

    def begins(self, event: int) -> None:
        """A backward event begins: what gradients its parameters carry from before."""
        there = [(p, p.grad) for p in self.parameters if p.grad is not None]
        norm = joint_norm([gradient for _, gradient in there]) if there else 0.0
        self._carried.append(_Carried(event, norm, [(p, place) for p, g in there[:_ASKED] if (place := _place(g))]))

    @property
    def parameters(self) -> list[Tensor]:
        """All that are in a group of the optimizer now, or were last while it was there."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return self._grouped

    def of(self, event: int) -> Step | None:
        """The step that used this backward event, if it has been taken and was measured."""
        return next((step for step in reversed(self.steps) if step.first <= event < step.end), None)

    # ---- the hooks -------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = any(map(callable, args[1:])) or callable(kwargs.get("closure"))
        self._copies, self._measures, self._running = [], False, closure
        self._note_found(optimizer)
        if not self._wanted() or not (closure or self._events() > self._first):
            return
        try:
            with torch.no_grad():
                self._settings = [
                    Settings(*(_kept(group.get(name)) for name in ("lr", "eps", "weight_decay")))
                    for group in optimizer.param_groups
                ]
                moved = [
                    (parameter, number)
                    for number, group in enumerate(optimizer.param_groups)
                    for parameter in group["params"]
                    if parameter.grad is not None or (closure and parameter.requires_grad)
                ]
                if self._layout is None or not self._layout.fits(moved):
                    self._layout = Layout(moved)
                gradients = [parameter.grad for parameter, _ in moved if parameter.grad is not None]
                self._gradient = joint_norm(gradients) if gradients and not closure else None
                self._copies = self._layout.copies()
                self._measures = True
        except Exception as error:  # noqa: BLE001  # the user's step must go on, whatever the parameters are
            self._give_up(error)

    def _note_found(self, optimizer: Optimizer) -> None:
        """``GradScaler`` leaves it to a fused optimizer to skip a step: ``found_inf`` says so, on the device."""
        found = getattr(optimizer, "found_inf", None)
        self._found = found.detach().clone() if isinstance(found, Tensor) else None
        if self._found is not None:
            self.in_kernel = True
            skipped = (self._found > 0).to(torch.int64)
            self._skips = skipped if self._skips is None else self._skips.to(skipped.device) + skipped

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        number, self.calls = self.calls, self.calls + 1
        first, self._first = self._first, self._events()
        copies, measures, layout = self._copies, self._measures, self._layout
        self._copies, self._measures, self._running = [], False, False
        if not measures or layout is None or self._first == first:
            return
        try:
            with torch.no_grad():
                measured = layout.changes(copies, self._settings)
        except Exception as error:  # noqa: BLE001  # as above
            self._give_up(error)
            return
        carried = [one.now() for one in self._carried if first <= one.event < self._first]
        step = Step(self.type, self.place, number, first, self._first, layout, measured, self._settings)
        step.gradient, step.carried, step.found, step.skips = self._gradient, carried, self._found, self._skips
        self.steps.append(step)

    def _give_up(self, error: Exception) -> None:
        self._copies, self._measures = [], False
        if self._failed:
            return
        self._failed = True
        message = f"fxgrad cannot measure what {self.type} does to the parameters: {type(error).__name__}: {error}"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here; a training step must not end on this one
            return


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """``hook`` with operators of its own that no mode of the user's sees."""

    def hidden(*args: Any) -> None:
        with without_torch_function(), without_dispatch_modes():
            hook(*args)

    return hidden


def _kept(setting: Any) -> Any:
    """A setting of a parameter group as it is now; a tensor stays on its device."""
    return setting.detach().clone() if isinstance(setting, Tensor) else setting


def _number(setting: Any) -> float | None:
    if isinstance(setting, Tensor):
        return float(setting)
    return float(setting) if isinstance(setting, (int, float)) else None
