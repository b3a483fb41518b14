"""The sink that observes: probes call it with gradients, it keeps statistics per backward event.

A *forward record* is one instrumented forward call, a ``BackwardEvent`` one run of the backward pass.  Where a backward
pass runs through several forward records, each gets its own part of the event; the parameters are a part of their own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.record.events import Event, Events
from fxgrad.record.full import is_staged, write_any_norm, write_bins, write_full
from fxgrad.record.hooks import FullHook, Hook, norm_of_float32, norm_of_half, write_fast
from fxgrad.record.library import library
from fxgrad.record.native import SEVERAL, Written, unpack
from fxgrad.record.owners import Owner, Parameters
from fxgrad.record.parked import Parking
from fxgrad.record.raising import Raised, exception_since, marks
from fxgrad.record.slots import BufferKey, Kind, Reading, Slots
from fxgrad.record.staging import Batch, Page
from fxgrad.record.statistics import accumulator, columns, dense, dottable, write_square
from fxgrad.torch_support.private import (
    current_backward,
    functorch_active,
    under_a_mode,
    without_dispatch_modes,
)
from fxgrad.torch_support.private_passes import keeps_graph
from fxgrad.torch_support.shards import is_sharded, local_part, placement_of

if TYPE_CHECKING:
    from fxgrad.schema import GradientFlow, Level, Placement

CLEARED = "torch cleared our hook when the first hook in Python was registered on the parameter"
HISTORY = 128  # finished events kept; the facts of a ResNet-50 event take about 40 KB


@dataclass(slots=True, eq=False)
class Part:
    """What one backward event wrote of one owner.

    ``fast`` has the slots of sites whose gradient has yet to come and is expected to be of the usual kind, which a
    hook may fill by itself; it ends with a None, for the number -1 of a hook without a site.  What a hook wrote has
    the gradient's shape as its reading.  ``put`` stages a small gradient
    at level ``full``.  ``quick``: what a hook does by itself is seen by nobody.  ``sources`` are the buffers that the
    readings are in, besides the batches of the event.
    ``channels``: by site, the dimension of its units and the l2 norm of each unit's gradient.  ``native``: what C++
    hooks wrote, of which ``readings`` do not know yet.  ``placed``: how gradients lie that are spread over ranks.
    """

    event: BackwardEvent
    slots: Slots
    readings: list[Reading | None]
    failures: dict[int, str] = field(default_factory=dict)
    fast: list[Tensor | None] = field(default_factory=list)
    norm: Callable[..., Tensor] = norm_of_float32
    put: Callable[[Tensor], Reading | None] | None = None
    quick: bool = False
    sources: set[BufferKey] = field(default_factory=set)
    channels: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    native: list[Written] = field(default_factory=list)
    placed: dict[int, Placement] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class BackwardEvent(Event):
    """One run of the backward pass, and what it wrote."""

    parked: Parking = field(kw_only=True)
    keeps_graph: bool = False  # with ``retain_graph=True``
    in_sight: tuple[int, ...] = ()  # the exceptions that were there before it
    parts: dict[Any, Part] = field(default_factory=dict)
    pages: dict[torch.dtype, Page] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EventRecord:
    """A finished part: a copy of its slots on the device, small, to be read when somebody asks.

    ``buffers`` by ``BufferKey`` or ``Batch``, and by ``("channels", site)`` where ``channels`` names the site.
    ``raised``: where the backward pass raised; ``freed``: whether one before it had let go of what the forward saved.
    ``flow``: what was made of it when it was first read; ``completed``: with what was known later of the step behind.
    """

    forward_record: Any
    event: int
    buffers: dict[Any, Tensor]
    readings: list[Reading | None]
    failures: dict[int, str]
    usual: BufferKey | None
    parameters: EventRecord | None = None
    channels: dict[int, int] = field(default_factory=dict)
    native: list[Written] = field(default_factory=list)
    placed: dict[int, Placement] = field(default_factory=dict)
    raised: Raised | None = None
    freed: bool = False
    flow: GradientFlow | None = None
    completed: tuple[object, GradientFlow] | None = None

    def finish(self) -> None:
        """Bring all readings into one form, and say which batches failed.  May be called twice."""
        if self.native:
            unpack(self, self.forward_record.slots, self.forward_record.sizes)
            self.forward_record.settled = True
        for index, reading in enumerate(self.readings):
            if isinstance(reading, torch.Size):  # a hook's own
                self.readings[index] = (self.usual, reading, reading.numel(), index)
            elif reading is not None and isinstance(reading[0], Batch) and reading[0].result is None:
                self.failures[index] = reading[0].error or "the batch that it was in was never reduced"


class Recorder(Events[BackwardEvent]):
    """Takes gradients of sites and parameters and keeps their statistics by backward event.

    Nothing is copied to the host until ``history`` is read, and no gradient is kept beyond its backward pass.

    Attributes:
        library: the native reductions; None where they aren't there (yet), or not wanted.
    """

    def __init__(self, level: Level, *, native: bool = True) -> None:
        super().__init__()
        self._native = native
        self.library = library() if native else None
        self.level: Level = level
        self.history: deque[EventRecord] = deque(maxlen=HISTORY)
        self.parameters = Parameters()
        self.escalated = self.parameters.escalated  # parameters to be measured at full
        self.on = True
        #: Called with the number of an event that begins, in its backward pass; with what was kept of one that ended.
        self.began: Callable[[int], None] | None = None
        self.ended: Callable[[list[EventRecord]], None] | None = None
        self._free: dict[bool, list[Slots]] = {True: [], False: []}  # the parameters' and the forward records'
        self._impatient: dict[bool, set[int]] = {True: set(), False: set()}
        self._pages: dict[torch.dtype, list[Page]] = {}

    def hook(self, owner: Owner, index: int) -> Hook:
        """A tensor hook for site ``index`` of ``owner``."""
        return (FullHook if self.level == "full" else Hook)(self.observe, owner, index)

    def observe(self, owner: Owner, index: int, gradient: Tensor) -> None:
        """Write the statistics of ``gradient`` into the slot of site ``index`` of ``owner``.

        Never raises: a statistic that cannot be computed is noted with its reason.
        """
        if owner is self.parameters and not self.on:
            return
        if gradient.requires_grad and not owner.differentiated:
            owner.invalidate()
        part: Part
        if owner.task == current_backward() and index < len(owner.part.readings) and owner.part.readings[index] is None:
            part = owner.part
        else:
            part = self._part(owner, index)
            if part.fast and write_fast(part, index, gradient):
                return
        try:
            with without_dispatch_modes():
                reading = part.readings[index] = self._write_own(part, owner, index, gradient)
            if not isinstance(reading[0], Batch):
                part.sources.add(reading[0])
        except Exception as error:  # noqa: BLE001  # the user's backward must go on, whatever the gradient is
            part.failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]

    def observe_channels(self, owner: Owner, index: int, gradient: Tensor, axis: int) -> None:
        """Keep the l2 norm of each unit's gradient, over the finite entries; units lie along ``axis``.  Never raises.

        Called before ``observe`` gets the same gradient.
        """
        if functorch_active():
            return
        if owner.task == current_backward() and index < len(owner.part.readings):
            part: Part = owner.part
        else:
            part = self._part(owner, index)
        with contextlib.suppress(Exception), without_dispatch_modes(), torch.no_grad():  # the user's backward goes on
            modulus = torch.nan_to_num(gradient.abs(), nan=0.0, posinf=0.0, neginf=0.0)
            others = [n for n in range(gradient.ndim) if n != axis]
            norms = (
                torch.linalg.vector_norm(modulus, dim=others, dtype=accumulator(gradient.dtype)) if others else modulus
            )
            part.channels[index] = axis, norms

    def _write_own(self, part: Part, owner: Owner, index: int, gradient: Tensor) -> Reading:
        """What this rank has of a gradient; nearly always, all of it."""
        if not is_sharded(gradient):
            return self._write(part, owner, index, gradient)
        part.placed[index] = placement_of(gradient)
        with torch.no_grad():
            reading = self._write(part, owner, index, local_part(gradient))
        return reading[0], gradient.shape, *reading[2:]

    def _write(self, part: Part, owner: Owner, index: int, gradient: Tensor) -> Reading:
        if functorch_active():
            message = "a torch.func transform is running, whose gradients have no storage to reduce"
            raise NotImplementedError(message)
        if Parking.on(gradient.device):
            waits = self._park(part, owner, index, gradient)
            if waits is not None:
                return waits
        quick = part.quick
        with torch.no_grad():
            if self.level != "norm" or index in owner.escalated:
                return self._write_full(part, owner, index, gradient, quick=quick)
            values = gradient if gradient.layout is torch.strided else dense(gradient)
            kind: Kind = "norm" if accumulator(values.dtype) is torch.float32 else "norm64"
            if kind == "norm" and self.library is None and dottable(values):
                kind = "square"
            key = (values.device, kind)
            slots = part.slots.views(key, max(index + 1, owner.expected))
            if kind == "square":
                write_square(values, slots[index])
            else:
                write_any_norm(values, slots[index], self.library)
            part.slots.learn(index, key, values.dtype if values is gradient and index not in part.placed else None)
        return key, gradient.shape, gradient.numel(), index

    def _park(self, part: Part, owner: Owner, index: int, gradient: Tensor) -> Reading | None:
        """Let a small gradient wait for others; None where it is to be reduced at once."""
        own, event, level = self.parameters, part.event, self.level
        if level == "histogram" or not event.certain_end or (owner is own and own.acts(index)):
            return None
        return event.parked.put(part, index, gradient, "full" if index in owner.escalated else level)

    def _write_full(self, part: Part, owner: Owner, index: int, gradient: Tensor, *, quick: bool) -> Reading:
        bins = self.level == "histogram"
        place = index, max(index + 1, owner.expected)
        if self.library is None and is_staged(gradient):
            if bins:
                part.sources.add(write_bins(gradient, part.slots, place))
            return self._page(part, gradient.dtype, quick=quick).put(gradient)
        reading = write_full(gradient, part.slots, place, self.library, bins=bins)
        if bins:
            part.sources.add((reading[0][0], "histogram"))
        elif self.library is not None and self.level == "full":
            alone = gradient.layout is torch.strided and index not in part.placed
            part.slots.learn(index, reading[0], gradient.dtype if alone else None)
        return reading

    def _page(self, part: Part, dtype: torch.dtype, *, quick: bool) -> Page:
        event = part.event
        page = event.pages.get(dtype)
        if page is None:
            free = self._pages.setdefault(dtype, [])
            page = event.pages[dtype] = free.pop() if free else Page(dtype, columns)
            page.begin()
        part.put = page.put_known if quick else None
        return page

    # ---- events ----------------------------------------------------------------------------------------------

    def _part(self, owner: Owner, index: int) -> Part:
        event = self.running()
        part = event.parts.get(owner)
        if part is not None and index < len(part.readings) and part.readings[index] is not None:
            if owner is self.parameters and event.certain_end:
                part.failures[index] = SEVERAL
            else:  # a second gradient of one value: another backward pass has begun
                self.end(event)
                event, part = self.running(), None
        with self._lock:
            if part is None:
                part = self._new_part(event, owner)
            missing = max(index + 1, owner.expected) - len(part.readings)
            part.readings.extend([None] * missing)
            owner.task, owner.part = current_backward(), part
            self._quicken(part, owner)
        return part

    def _new_part(self, event: BackwardEvent, owner: Owner) -> Part:
        kind = owner is self.parameters
        free = self._free[kind]
        part = event.parts[owner] = Part(event, free.pop() if free else Slots(self._impatient[kind]), [])
        if not kind:
            owner.reached()
        return part

    def native_begins(self, owner: Owner, written: Written) -> bool:
        """C++ hooks begin to write what arrives in the running backward pass; False: it is not to be recorded."""
        if owner is self.parameters and not self.on:
            return False
        event = self.running()
        with self._lock:
            part = event.parts.get(owner) or self._new_part(event, owner)
            part.native.append(written)
            owner.task, owner.part = current_backward(), part
        return True

    def native_failed(self, owner: Owner, index: int, why: str) -> None:
        """A C++ hook could not write a statistic."""
        self._part(owner, index).failures[index] = why.splitlines()[0]

    def native_again(self, owner: Owner, index: int) -> bool:
        """A second gradient came to a C++ hook in one pass: whether it is that of another event."""
        event = self.running()
        if owner is self.parameters and event.certain_end:
            event.parts[owner].failures[index] = SEVERAL
            return False
        self.end(event)
        return True

    def _quicken(self, part: Part, owner: Owner) -> None:
        """Let hooks write by themselves what is expected to be of the usual kind, where that is right in this pass."""
        usual, part.put = part.slots.usual, None
        part.quick = not (torch.is_grad_enabled() or functorch_active() or under_a_mode())
        if usual is None or not part.quick or not self._choose(part, usual):
            part.fast = []
            return
        part.fast = part.slots.expected(usual, len(part.readings), owner.escalated)
        if part.sources:  # the part has been written to by a backward pass around this one, or inside of it
            part.fast = [slot if not read else None for slot, read in zip(part.fast, [*part.readings, 0], strict=True)]
        part.sources.add(usual)

    def _choose(self, part: Part, usual: BufferKey) -> bool:
        """Set what writes a gradient into a slot of ``usual``; False where no one call does, or gradients may wait."""
        if Parking.on(usual[0]):
            return False
        native = self.library if usual[0].type == "cpu" else None
        if self.level == "norm":
            plain = norm_of_float32 if part.slots.usual_dtype is torch.float32 else norm_of_half
            part.norm = plain if native is None else native.norm_into
        elif self.level == "full" and native is not None:
            part.norm = native.full_of_singles_into
        else:
            return False
        return True

    def _new(self, number: int, thread: int) -> BackwardEvent:
        parked = Parking(self.parameters)
        return BackwardEvent(number, thread, parked=parked, keeps_graph=keeps_graph(), in_sight=marks())

    def _began(self, event: BackwardEvent) -> None:
        self.parameters.begins()
        if self.began is not None:
            self.began(event.number)

    def _has_raised(self, event: BackwardEvent) -> None:
        for owner in event.parts:
            owner.raising()

    def close_events(self) -> None:
        """As of all events."""
        if self._native and self.library is None:
            self.library = library()
        super().close_events()

    def _ended(self, event: BackwardEvent) -> None:
        raised = Raised(exception_since(event.in_sight)) if event.raised else None
        with self._lock, without_dispatch_modes():
            for page in event.pages.values():
                page.flush()
            batches = [batch for page in event.pages.values() for batch in page.batches] + event.parked.finish()
            own = self._own(event)
            parameters = None if own is None else self._keep(self.parameters, own, batches)
            finished = []
            for owner, part in sorted(event.parts.items(), key=lambda item: item[0].number):
                event_record = self._keep(owner, part, batches)
                event_record.parameters, event_record.raised, event_record.freed = parameters, raised, owner.freed
                owner.passed(freed=not event.keeps_graph)
                finished.append(event_record)
            if raised is not None:
                raised.parts = finished
            self.history.extend(finished)
            for dtype, page in event.pages.items():
                self._pages[dtype].append(page)
            event.parts.clear()  # parts hold their event: no circle that waits for the collector
        if self.ended is not None and finished:
            self.ended(finished)

    def _own(self, event: BackwardEvent) -> Part | None:
        """The part of the parameters, which says of which of them the hook was gone."""
        lost = self.parameters.lost()
        if lost and self.parameters not in event.parts:
            self._new_part(event, self.parameters)
        part = event.parts.pop(self.parameters, None)
        if part is not None:
            part.failures.update(dict.fromkeys(lost, CLEARED))
        return part

    def _keep(self, owner: Owner, part: Part, batches: list[Batch]) -> EventRecord:
        owner.task = owner.part = None
        slots = part.slots
        buffers: dict[Any, Tensor] = {source: slots.buffers[source].clone() for source in part.sources}
        buffers.update({batch: batch.result for batch in batches if batch.result is not None})
        buffers.update({("channels", site): norms for site, (_, norms) in part.channels.items()})
        axes = {site: axis for site, (axis, _) in part.channels.items()}
        self._free[owner is self.parameters].append(slots)
        for written in part.native:
            written.close()
        return EventRecord(
            owner, part.event.number, buffers, part.readings, part.failures, slots.usual, channels=axes,
            native=part.native, placed=part.placed,
        )  # fmt: skip
