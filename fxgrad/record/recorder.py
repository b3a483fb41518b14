"""The sink that observes: probes call it with gradients, it keeps statistics per backward event.

A *recording* is one instrumented forward call, a ``BackwardEvent`` one run of the backward pass.  Where a backward
pass runs through several recordings, each gets its own part of the event; the parameters are a part of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fxgrad.record.slots import BufferKey, Kind, Reading, Slots
from fxgrad.record.statistics import accumulator, dense, write_full, write_norm
from fxgrad.torch_private import at_end_of_backward, current_backward, functorch_active

if TYPE_CHECKING:
    from fxgrad.schema import Level

HISTORY = 128  # finished events kept; the facts of a ResNet-50 event take about 40 KB


class Owner(Protocol):
    """Whose sites are observed: a recording, or the parameters.

    ``task`` and ``part`` are the recorder's: the backward pass that is running through the owner, and its part.
    """

    task: int | None
    part: Any
    expected: int


class Parameters:
    """The owner of the parameters' sites."""

    def __init__(self) -> None:
        self.task: int | None = None
        self.part: Part | None = None
        self.expected = 0


@dataclass(slots=True, eq=False)
class Part:
    """What one backward event wrote of one owner.

    ``fast`` are the slots that most gradients go to: those of float32 gradients on the device of the first one.
    """

    event: BackwardEvent
    slots: Slots
    readings: list[Reading | None]
    failures: dict[int, str] = field(default_factory=dict)
    key: BufferKey | None = None
    fast: tuple[Tensor, ...] = ()


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
        self.parameters = Parameters()
        self.escalated: set[int] = set()  # parameters to be measured at full
        self.on = True
        self._norm_only = level == "norm"
        self._lock = threading.RLock()
        self._open: dict[int, BackwardEvent] = {}
        self._count = 0
        self._free: list[Slots] = []

    def observe(self, owner: Owner, index: int, gradient: Tensor, *, escalate: bool) -> None:
        """Write the statistics of ``gradient`` into the slot of site ``index`` of ``owner``.

        Never raises: a statistic that cannot be computed is noted with its reason.  This runs once per site and
        step, so that the usual case (a dense float32 gradient, no differentiation of the backward) comes first.
        """
        part: Part
        if owner.task == current_backward() and index < len(owner.part.readings) and not owner.part.readings[index]:
            part = owner.part
        else:
            part = self._part(owner, index)
        try:
            usual = self._norm_only and not escalate and gradient.dtype is torch.float32 and not torch.is_grad_enabled()
            if usual and index < len(part.fast) and gradient.layout is torch.strided and not functorch_active():
                key = part.key
                if key is not None and gradient.device == key[0]:
                    torch.linalg.vector_norm(gradient, out=part.fast[index])
                    part.readings[index] = (key, gradient.shape, torch.float32)
                    return
            part.readings[index] = self._write(part, owner, index, gradient, escalate=escalate)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on, whatever the gradient is
            part.failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _write(self, part: Part, owner: Owner, index: int, gradient: Tensor, *, escalate: bool) -> Reading:
        if functorch_active():
            message = "a torch.func transform is running, whose gradients have no storage to reduce"
            raise NotImplementedError(message)
        with torch.no_grad():
            values = gradient if gradient.layout is torch.strided else dense(gradient)
            kind: Kind
            if self.level == "full" or escalate:
                kind = "full"
            else:
                kind = "norm" if accumulator(values.dtype) is torch.float32 else "norm64"
            slots = part.slots.views(values.device, kind, max(index + 1, owner.expected))
            if kind == "full":
                write_full(values, slots[index], gradient.numel() - values.numel())
            else:
                write_norm(values, slots[index])
                if kind == "norm" and part.key in (None, (values.device, kind)):
                    part.key, part.fast = (values.device, kind), slots
        return ((values.device, kind), gradient.shape, gradient.dtype)

    # ---- events ----------------------------------------------------------------------------------------------

    def _part(self, owner: Owner, index: int) -> Part:
        event = self._event()
        part = event.parts.get(owner)
        if part is not None and index < len(part.readings) and part.readings[index] is not None:
            if owner is self.parameters and event.certain_end:
                part.failures[index] = "arrived in several parts during one backward (reentrant checkpointing)"
            else:  # a second gradient of one value: another backward pass has begun
                self._finish(event)
                event, part = self._event(), None
        with self._lock:
            if part is None:
                part = event.parts[owner] = Part(event, self._free.pop() if self._free else Slots(), [])
            missing = max(index + 1, owner.expected) - len(part.readings)
            part.readings.extend([None] * missing)
            owner.task, owner.part = current_backward(), part
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
        if not self._open:
            return
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
            own = event.parts.pop(self.parameters, None)
            parameters = None if own is None else self._keep(self.parameters, own)
            for owner, part in sorted(event.parts.items(), key=lambda item: item[0].number):
                kept = self._keep(owner, part)
                kept.parameters = parameters
                self.history.append(kept)

    def _keep(self, owner: Owner, part: Part) -> Kept:
        owner.task = owner.part = None
        used = {reading[0] for reading in part.readings if reading is not None}
        buffers = {key: part.slots.buffers[key].clone() for key in used}
        self._free.append(part.slots)
        return Kept(owner, part.event.number, buffers, part.readings, part.failures)
