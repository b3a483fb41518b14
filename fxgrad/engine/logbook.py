"""When a training run is logged: every n-th step, or when told, and never so that training changes or stops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from fxgrad.diagnosis import diagnose
from fxgrad.errors import LogWarning, NoFlowError, OptionError
from fxgrad.loading import loaded
from fxgrad.schema import Finding, GradientFlow, Log, LogEntry
from fxgrad.torch_support.private import (
    current_backward,
    functorch_active,
    without_dispatch_modes,
    without_torch_function,
)
from fxgrad.torch_support.streams import random_streams

__all__ = ["SERIES", "Logbook", "checked_logs"]

SERIES = 8  # flows that an entry is judged by, the latest last: checks that need a series need a few of them

Read = Callable[[int], Sequence[GradientFlow]]
Tell = Callable[[Sequence[Finding]], None]


def checked_logs(log_to: Any, log_every: Any, *, status: bool = False) -> tuple[Log, ...]:
    """The logs of ``watch(log_to=...)``, and the line on the screen where ``status`` is True.

    Raises:
        OptionError: something else than a log or several, or ``log_every`` is no whole number of at least 1.
    """
    if log_every is not None and (isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 1):
        message = f"log_every must be a whole number of at least 1, or None, but is {log_every!r}"
        raise OptionError(message)
    listed = tuple(log_to) if isinstance(log_to, (list, tuple)) else () if log_to is None else (log_to,)
    for one in listed:
        if isinstance(one, type) or not isinstance(one, Log):
            message = (
                f"log_to= takes logs, objects with write(entry) and close(), but got {one!r:.80}. Take one of "
                "fxgrad.integrations: CsvLog('gradients.csv'), TensorBoardLog(writer), WandbLog(run), MlflowLog()"
            )
            raise OptionError(message)
    return (*listed, loaded("fxgrad.render.status").StatusLine()) if status else listed


class Logbook:
    """The logs of one watch.

    Args:
        logs: who gets the entries.  Where torch.distributed runs, rank 0 alone writes.
        every: a step is due this many steps after the one that was written last; None: only when told.
    """

    def __init__(self, logs: Sequence[Log] = (), every: int | None = None) -> None:
        self._logs = list(logs)
        self._every = every
        self._read: Read = lambda _: ()
        self._tell: Tell = lambda _: None
        self._notes: dict[str, float | Tensor] = {}
        self._step: int | None = None  # of the latest training forward
        self._written: tuple[int, int] | None = None  # the step and the backward event of the latest entry
        self._told: set[tuple[str, str]] = set()

    def opened(self, read: Read, tell: Tell) -> Logbook:
        """The same, for a watch.

        ``read`` gives its latest flows, at most as many as asked for, oldest first; ``tell`` takes what was found.
        """
        self._read, self._tell = read, tell
        return self

    def note(self, scalars: dict[str, Any]) -> dict[str, float | Tensor]:
        """Keep these until they are written or replaced, and give what is kept.  A tensor stays on its device.

        Raises:
            OptionError: one is no single number.
        """
        taken: dict[str, float | Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                with without_torch_function(), without_dispatch_modes(), torch.no_grad():
                    taken[name] = value.detach().clone()  # the user may go on to change it in place
            elif not isinstance(value, Tensor) and hasattr(value, "__float__"):
                taken[name] = float(value)
            else:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
                message = f"note({name}=...) takes one number, or a tensor with one element, but got {what}"
                raise OptionError(message)
        self._notes.update(taken)
        return taken

    def forward(self, step: int) -> None:
        """A training forward with this number is about to run: the step before it is complete."""
        before, self._step = self._step, step
        if self._every is None or before is None or not self._logs or current_backward() >= 0:
            return
        if self._written is None or before - self._written[0] >= self._every:
            self.write(before)

    def finish(self) -> None:
        """Write the latest step, if that was not done, and close every log."""
        if self._step is not None and self._every is not None:
            self.write(self._step)
        while self._logs:
            log = self._logs.pop()
            self._guarded(log, log.close)

    def write(self, step: int | None) -> bool:
        """Write an entry, if there was a backward pass since the latest one.  Waits for the device, once.

        Returns:
            Whether there was one.
        """
        if not self._logs or functorch_active() or _capturing():
            return False
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
            return False
        with random_streams(), torch.no_grad(), without_dispatch_modes():
            with without_torch_function():
                entry = self._entry(self._step or 0 if step is None else step)
            if entry is None:
                return False
            for log in list(self._logs):
                self._guarded(log, partial(log.write, entry))
        self._tell(entry.diagnosis.findings)
        return True

    def _entry(self, step: int) -> LogEntry | None:
        try:
            flows = self._read(SERIES)
        except NoFlowError:
            return None
        if not flows or (self._written is not None and self._written[1] == flows[-1].event.backward):
            return None
        self._written = step, flows[-1].event.backward
        diagnosis = flows[-1].diagnosis if len(flows) == 1 else diagnose(flows)
        bad = [finding for finding in diagnosis.findings if finding.severity != "info"]
        fresh = tuple(finding for finding in bad if (finding.rule, finding.place) not in self._told)
        self._told.update((finding.rule, finding.place) for finding in fresh)
        notes = {name: float(value) for name, value in self._notes.items()}
        return LogEntry(step, flows[-1], diagnosis, fresh, notes)

    def _guarded(self, log: Log, act: Callable[[], None]) -> None:
        """A log that fails gets no more entries; training goes on, unless the user made warnings errors."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  # a full disk must not end a training run
            self._logs = [other for other in self._logs if other is not log]
            message = f"{type(log).__name__} failed and gets no more entries: {type(error).__name__}: {error}"
            warnings.warn(message, LogWarning, stacklevel=2)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
