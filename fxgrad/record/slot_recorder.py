"""The recorder of the function engine: the gradient of a run's slots arrives whole, once per backward event.

Each run brings slots of its own, so that nothing is ever added over runs or events.  Parameters are observed by tensor
hooks, which work under ``torch.compile`` as they do without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.record.events import Begin, Event, Events
from fxgrad.record.full import write_any_norm
from fxgrad.record.hooks import Hook
from fxgrad.record.library import library
from fxgrad.record.owners import Parameters
from fxgrad.record.parked import Parking
from fxgrad.record.raising import Raised, exception_since, marks
from fxgrad.record.recorder import HISTORY, EventRecord
from fxgrad.record.slots import BufferKey, Kind, Reading, Slots
from fxgrad.record.statistics import accumulator, dense

if TYPE_CHECKING:
    from fxgrad.record.owners import Owner


@dataclass(slots=True, eq=False)
class SlotEvent(Event):
    """One backward event: what each run's slots received, and the parameters' statistics."""

    parked: Parking = field(kw_only=True)
    in_sight: tuple[int, ...] = ()
    runs: list[tuple[Any, Tensor]] = field(default_factory=list)
    slots: Slots = field(default_factory=Slots)
    readings: list[Reading | None] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EventRuns:
    """A finished event; ``parts``: what was made of it when it was first read, a forward call each, with its flow."""

    number: int
    runs: list[tuple[Any, Tensor]]
    parameters: EventRecord | None
    raised: Raised | None = None
    parts: list[EventRecord] | None = None


class SlotRecorder(Events[SlotEvent]):
    """Takes the gradients of slots and parameters.  Nothing is copied to the host until somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.history: deque[EventRuns] = deque(maxlen=HISTORY)
        self.parameters = Parameters()
        self.began: Callable[[int], None] | None = None
        self.ended: Callable[[EventRuns], None] | None = None
        self.escalated: set[int] = set()
        self._impatient: set[int] = set()  # parameters whose gradients somebody changes during the backward pass
        self._library = library()

    def expect(self, run: Any, slots: Tensor, returned: Any) -> None:
        """Take what arrives at ``slots``, the leaf that ``run`` brought along; ``returned``: where a pass begins."""
        if slots.requires_grad:
            Begin(self).put(returned)
            slots.register_hook(lambda gradient: self._take(run, gradient))  # type: ignore[no-untyped-call]

    def _take(self, run: Any, gradient: Tensor) -> None:
        if not self.on:
            return
        event = self.running()
        if any(known is run for known, _ in event.runs) and not event.certain_end:
            self.end(event)  # a second gradient of one run: another backward pass has begun
            event = self.running()
        event.runs.append((run, gradient.detach().clone()))  # a compiled backward may use its memory again

    def keep(self, event: EventRuns) -> None:
        """An event has ended."""
        self.history.append(event)

    def hook(self, owner: Owner, index: int) -> Hook:
        """A tensor hook for parameter ``index``."""
        return Hook(self.observe, owner, index)

    def observe(self, owner: Owner, index: int, gradient: Tensor) -> None:
        """What the hooks of parameters call."""
        del owner
        if not self.on:
            return
        event = self.running()
        missing = max(index + 1, self.parameters.expected) - len(event.readings)
        event.readings.extend([None] * missing)
        if event.readings[index] is not None:
            event.failures[index] = "arrived in several parts during one backward"
            return
        try:
            if Parking.on(gradient.device) and event.certain_end and not self.parameters.acts(index):
                waits = event.readings[index] = event.parked.put(event, index, gradient, "norm")
                if waits is not None:
                    return
            with torch.no_grad():
                values = gradient if gradient.layout is torch.strided else dense(gradient)
                kind: Kind = "norm" if accumulator(values.dtype) is torch.float32 else "norm64"
                key: BufferKey = (values.device, kind)
                write_any_norm(values, event.slots.views(key, len(event.readings))[index], self._library)
                event.readings[index] = (key, gradient.shape, gradient.numel(), index)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on, whatever the gradient is
            event.failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _new(self, number: int, thread: int) -> SlotEvent:
        event = SlotEvent(number, thread, parked=Parking(self.parameters), in_sight=marks())
        event.slots.impatient = self._impatient
        return event

    def _began(self, event: SlotEvent) -> None:
        if self.began is not None:
            self.began(event.number)

    def close_events(self) -> None:
        """As of all events."""
        self._library = library()
        super().close_events()

    def _ended(self, event: SlotEvent) -> None:
        if not event.runs:
            return
        with self._lock:
            batches = event.parked.finish()
            own = None
            if event.readings:
                buffers: Any = dict(event.slots.buffers)
                buffers.update({batch: batch.result for batch in batches})
                own = EventRecord(
                    forward_record=self.parameters, event=event.number, buffers=buffers,
                    readings=event.readings, failures=event.failures, usual=None,
                )  # fmt: skip
            raised = Raised(exception_since(event.in_sight)) if event.raised else None
            kept = EventRuns(event.number, event.runs, own, raised)
            self.keep(kept)
        if self.ended is not None:
            self.ended(kept)


def event_record_of(run: Any, gradient: Tensor, facts: SlotFacts) -> EventRecord:
    """One run's part of an event, in the form that ``assemble`` takes.  Copies the slots to the host, once."""
    sums = gradient.to("cpu", torch.float64).tolist()
    values = [0.0] * facts.sites
    readings: list[Reading | None] = [None] * facts.sites
    key: BufferKey = (torch.device("cpu"), "norm64")
    for site, slot in facts.slot_of.items():
        total = sums[slot]
        if total != 0:
            values[site] = 0.0 if total < 0 else total**0.5
            shape = torch.Size(facts.shapes[site])
            readings[site] = (key, shape, shape.numel(), site)
    buffers: Any = {key: torch.tensor(values, dtype=torch.float64)}
    return EventRecord(forward_record=run, event=0, buffers=buffers, readings=readings, failures={}, usual=None)


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What is known of a run's sites.

    Attributes:
        sites: how many there are.
        slot_of: by site number, its slot.
        shapes: by site number, the shape of the value.
    """

    sites: int
    slot_of: Mapping[int, int]
    shapes: list[tuple[int, ...]]
