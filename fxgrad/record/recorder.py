"""The sink that observes: probes call it with gradients, it keeps statistics per backward event.

A ``Recording`` is one instrumented forward call, a ``BackwardEvent`` one run of the backward pass.  Where a backward
pass runs through several recordings, each gets its own part of the event.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.record.slots import BufferKey, Kind, Reading, Slots
from fxgrad.record.statistics import accumulator, dense, write_full, write_norm
from fxgrad.torch_private import at_end_of_backward, current_backward, functorch_active

if TYPE_CHECKING:
    from fxgrad.schema import Level

HISTORY = 128  # finished events kept; the facts of a ResNet-50 event take about 60 KB
_NO_DIFFERENTIATION = torch.no_grad()


@dataclass(slots=True, eq=False)
class Part:
    """What one backward event wrote of one recording (or, with ``recording`` None, of the parameters)."""

    event: BackwardEvent
    slots: Slots
    readings: list[Reading | None] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    def seen(self, index: int) -> bool:
        """Whether the site has already had a gradient in this event."""
        return index < len(self.readings) and self.readings[index] is not None


@dataclass(slots=True, eq=False)
class BackwardEvent:
    """One run of the backward pass."""

    number: int
    thread: int
    parts: dict[Any, Part] = field(default_factory=dict)
    certain_end: bool = False


@dataclass(slots=True, eq=False)
class Kept:
    """A finished part: a copy of its slots on the device, small, to be read when somebody asks."""

    recording: Any
    event: int
    buffers: dict[BufferKey, Tensor]
    readings: list[Reading | None]
    failures: dict[int, str]
    parameters: Kept | None = None


class Recorder:
    """Takes gradients of sites and parameters and keeps their statistics by backward event.

    Nothing is copied to the host, and no gradient is kept, until ``history`` is read.
    """

    def __init__(self, level: Level) -> None:
        self.level: Level = level
        self.history: deque[Kept] = deque(maxlen=HISTORY)
        self.escalated: set[int] = set()  # parameters to be measured at full
        self.on = True
        self._lock = threading.RLock()
        self._open: dict[int, BackwardEvent] = {}
        self._count = 0
        self._free: list[Slots] = []

    def observe(self, owner: Any, index: int, gradient: Tensor, escalate: bool) -> None:
        """Write the statistics of ``gradient`` into the slot of site ``index`` of ``owner``.

        ``owner`` is a recording, or None for parameters.  Never raises: a statistic that cannot be computed is
        noted with its reason.
        """
        part = self._part(owner, index)
        try:
            reading = self._write(part, owner, index, gradient, escalate)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on, whatever the gradient is
            part.failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        readings = part.readings
        if len(readings) <= index:
            readings.extend([None] * (index + 1 - len(readings)))
        readings[index] = reading

    def _write(self, part: Part, owner: Any, index: int, gradient: Tensor, escalate: bool) -> Reading:
        if functorch_active():
            message = "a torch.func transform is running, whose gradients have no storage to reduce"
            raise NotImplementedError(message)
        with _NO_DIFFERENTIATION if torch.is_grad_enabled() else _NULL:
            values = gradient if gradient.layout is torch.strided else dense(gradient)
            kind: Kind
            if self.level == "full" or escalate:
                kind = "full"
            else:
                kind = "norm" if accumulator(values.dtype) is torch.float32 else "norm64"
            expected = owner.expected if owner is not None else index + 1
            slot = part.slots.slot(values.device, kind, index, expected)
            total = gradient.numel()
            if kind == "full":
                write_full(values, slot, total - values.numel())
            else:
                write_norm(values, slot)
        return Reading((values.device, kind), gradient.shape, gradient.dtype, total)

    def _part(self, owner: Any, index: int) -> Part:
        event = self._event()
        part = event.parts.get(owner)
        if part is not None and part.seen(index):
            if owner is None and event.certain_end:
                part.failures[index] = "arrived in several parts during one backward (reentrant checkpointing)"
            else:  # a second gradient of one value: another backward pass has begun
                self._finish(event)
                event, part = self._event(), None
        if part is None:
            with self._lock:
                part = event.parts[owner] = Part(event, self._free.pop() if self._free else Slots())
        return part

    def _event(self) -> BackwardEvent:
        """The event of the backward pass that is running now; a backward inside of a backward belongs to it."""
        task = current_backward()
        event = self._open.get(task)
        if event is not None:
            return event
        thread = threading.get_ident()
        with self._lock:
            outer = next((e for e in self._open.values() if e.thread == thread and e.certain_end), None)
            event = self._open[task] = outer or BackwardEvent(self._count, thread)
            self._count += outer is None
        if outer is None:
            event.certain_end = at_end_of_backward(lambda: self._finish(event))
        return event

    def settle(self) -> None:
        """End the events of this thread whose end torch did not announce.  Called before a forward and a read."""
        thread = threading.get_ident()
        for event in {id(e): e for e in self._open.values() if e.thread == thread}.values():
            self._finish(event)

    def _finish(self, event: BackwardEvent) -> None:
        with self._lock:
            tasks = [task for task, found in self._open.items() if found is event]
            for task in tasks:
                del self._open[task]
            if not tasks:
                return
            own = event.parts.pop(None, None)
            parameters = None if own is None else self._keep(None, own)
            for owner, part in event.parts.items():
                kept = self._keep(owner, part)
                kept.parameters = parameters
                self.history.append(kept)

    def _keep(self, owner: Any, part: Part) -> Kept:
        used = {reading.key for reading in part.readings if reading is not None}
        buffers = {key: part.slots.buffers[key].clone() for key in used}
        self._free.append(part.slots)
        return Kept(owner, part.event.number, buffers, part.readings, part.failures)


class _Null:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NULL = _Null()
