"""What an optimizer's steps do to the parameters: norms on the device, taken between torch's public step hooks."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxgrad.record.recorder import HISTORY
from fxgrad.record.statistics import accumulator, write_norm
from fxgrad.schema import Update

_HALF = (torch.float16, torch.bfloat16)


_Moved = list[tuple[Tensor, int]]  # a parameter, and the number of its group


class _Layout:
    """Which parameters a step moves, and device memory for their norms; shared by the steps that move the same.

    Attributes:
        parameters: in the order of the rows.
        groups: by row, the number of its parameter group.
    """

    def __init__(self, moved: _Moved) -> None:
        self.parameters = [parameter for parameter, _ in moved]
        self.groups = [group for _, group in moved]
        self._places = [_place(parameter) for parameter, _ in moved]
        rows: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for row, place in enumerate(self._places):
            rows.setdefault(place, []).append(row)
        self._buffers = [
            (here, torch.zeros(len(here), 2, dtype=dtype, device=device)) for (device, dtype), here in rows.items()
        ]
        self._slots: dict[int, tuple[Tensor, ...]] = {
            row: slot.unbind() for here, buffer in self._buffers for row, slot in zip(here, buffer, strict=True)
        }

    def fits(self, moved: _Moved) -> bool:
        """Whether a step moves the same parameters, of the same kind."""
        if len(moved) != len(self.parameters):
            return False
        known = zip(self.parameters, self.groups, self._places, strict=True)
        return all(
            parameter is its and group == its_group and _place(parameter) == place
            for (parameter, group), (its, its_group, place) in zip(moved, known, strict=True)
        )

    def copies(self) -> list[Tensor]:
        """The parameters as they are now; their norms are written down."""
        copies = []
        for row, parameter in enumerate(self.parameters):
            copies.append(parameter.detach().clone())
            write_norm(copies[-1], self._slots[row][0])
        return copies

    def changes(self, copies: list[Tensor]) -> list[tuple[list[int], Tensor]]:
        """The norms of ``copies``, and of what has happened to the parameters since; the copies are used up."""
        for row, (parameter, copy) in enumerate(zip(self.parameters, copies, strict=True)):
            wide = copy.to(torch.float32) if copy.dtype in _HALF else copy
            write_norm(wide.sub_(parameter.detach()), self._slots[row][1])
        return [(rows, buffer.clone()) for rows, buffer in self._buffers]


def _place(values: Tensor) -> tuple[torch.device, torch.dtype]:
    return values.device, accumulator(values.dtype)


@dataclass(slots=True, eq=False)
class Step:
    """One step of one optimizer behind observed backward passes; numbers stay on the device until they are read.

    Attributes:
        number: of the step, as the host counts them from 0; without those that a fused kernel skipped, see ``skips``.
        first, end: it used the backward events from ``first`` on and before ``end``.
        layout: which parameters it moved.
        norms: by device and dtype: rows, and the two norms of each, shape (rows, 2): before, and of the change.
        rates: by parameter group, learning rate and epsilon.
        found: above 0 where a fused optimizer was told of Inf or NaN, so that its kernel changed nothing; else None.
        skips: how many steps were skipped so up to this one; None where none can have been.
    """

    number: int
    first: int
    end: int
    layout: _Layout
    norms: list[tuple[list[int], Tensor]]
    rates: list[tuple[Any, Any]]
    found: Tensor | None = None
    skips: Tensor | None = None
    _read: tuple[int | None, dict[int, Update]] | None = field(default=None)

    def read(self) -> tuple[int | None, dict[int, Update]]:
        """The number of the step (None where its kernel skipped it), and the updates by id of the parameter.

        Copies to the host at the first call.
        """
        if self._read is None:
            self._read = self._on_host()
        return self._read

    def _on_host(self) -> tuple[int | None, dict[int, Update]]:
        if self.found is not None and float(self.found) > 0:
            return None, {}
        number = self.number - (0 if self.skips is None else int(self.skips))
        rates = [(_number(rate), _number(epsilon)) for rate, epsilon in self.rates]
        found: dict[int, Update] = {}
        for rows, buffer in self.norms:
            for row, (before, change) in zip(rows, buffer.tolist(), strict=True):
                rate, epsilon = rates[self.layout.groups[row]]
                found[id(self.layout.parameters[row])] = Update(change, before, rate, epsilon)
        return number, found


class Updates:
    """The steps of one optimizer.

    A step is measured when a backward pass was observed since the step before, or when it is given a closure that may
    run one.  The parameters that have a gradient (with a closure: that require one) are copied when it begins, and
    the copies are gone when it ends.

    Args:
        optimizer: whose hooks are used.
        events: how many backward events have begun.
        wanted: whether anything is observed now.
    """

    def __init__(self, optimizer: Optimizer, events: Callable[[], int], wanted: Callable[[], bool]) -> None:
        self.type = type(optimizer).__name__
        self.calls = 0
        self.in_kernel = False  # whether a fused kernel decides which steps are skipped
        self._running = False  # whether a step runs that may call the model
        self.steps: deque[Step] = deque(maxlen=HISTORY)
        self._first = 0
        self._events = events
        self._wanted = wanted
        self._copies: list[Tensor] = []
        self._rates: list[tuple[Any, Any]] = []
        self._found: Tensor | None = None
        self._skips: Tensor | None = None
        self._layout: _Layout | None = None
        self._failed = False
        self._optimizer = weakref.ref(optimizer)
        # What torch.compile makes of a step must not contain us.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._handles = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._copies = []

    @property
    def parameters(self) -> list[Tensor]:
        """All that are in a group of the optimizer now."""
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def discard(self) -> None:
        """The gradients so far were thrown away: the next step belongs to what comes."""
        if not self._running:
            self._first, self._copies = self._events(), []  # copies are left by a step that raised

    def of(self, event: int) -> Step | None:
        """The step that used this backward event, if it has been taken and was measured."""
        return next((step for step in reversed(self.steps) if step.first <= event < step.end), None)

    # ---- the hooks -------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = any(map(callable, args[1:])) or callable(kwargs.get("closure"))
        self._copies, self._running = [], closure
        self._note_found(optimizer)
        if not self._wanted() or not (closure or self._events() > self._first):
            return
        try:
            with torch.no_grad():
                self._rates = [(_kept(group.get("lr")), _kept(group.get("eps"))) for group in optimizer.param_groups]
                moved = [
                    (parameter, number)
                    for number, group in enumerate(optimizer.param_groups)
                    for parameter in group["params"]
                    if parameter.grad is not None or (closure and parameter.requires_grad)
                ]
                if self._layout is None or not self._layout.fits(moved):
                    self._layout = _Layout(moved)
                self._copies = self._layout.copies()
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
        copies, self._copies, self._running = self._copies, [], False
        layout = self._layout
        if not copies or layout is None or self._first == first:
            return
        try:
            with torch.no_grad():
                norms = layout.changes(copies)
        except Exception as error:  # noqa: BLE001  # as above
            self._give_up(error)
            return
        step = Step(number, first, self._first, layout, norms, self._rates, self._found, self._skips)
        self.steps.append(step)

    def _give_up(self, error: Exception) -> None:
        self._copies = []
        if self._failed:
            return
        self._failed = True
        message = f"fxgrad cannot measure what {self.type} does to the parameters: {type(error).__name__}: {error}"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here; a training step must not end on this one
            return


def _kept(setting: Any) -> Any:
    """A setting of a parameter group as it is now; a tensor stays on its device."""
    return setting.detach().clone() if isinstance(setting, Tensor) else setting


def _number(setting: Any) -> float | None:
    if isinstance(setting, Tensor):
        return float(setting)
    return float(setting) if isinstance(setting, (int, float)) else None
