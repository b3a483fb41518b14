"""From what was kept of an event to its numbers in a run file, for an event like one before: no flow is made of it.

Most steps of a run are alike in all but their norms.  Of an event that is like one whose flow was written, the numbers
are taken straight from where the hooks wrote them; any difference, also a norm of 0, Inf or NaN, and the flow is made.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fxgrad.engine.assembly import event_of, reading_of
from fxgrad.engine.training import Known
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.reading import read_norms
from fxgrad.record.recorder import EventRecord
from fxgrad.run_file import RunFile
from fxgrad.run_file.numbers import filled, prototype, split, taken
from fxgrad.schema import GradientFlow, Level, Update

__all__ = ["Coming", "Written", "WrittenEvents"]

_LOOKED = 64  # of so many events, one is written both ways and compared
_PATTERNS = 4  # events that later ones may be like


@dataclass(frozen=True, slots=True)
class Coming:
    """An event that is to be written, with what is known of the training around it.

    Attributes:
        kept: of the event.
        known: of the optimizers and the scaler; None where there is neither.
        assemble: gives the flow without that.
        lock: held while what was kept is brought into form.
        loss, level: as for ``assemble``.
    """

    kept: EventRecord
    known: Known | None
    assemble: Callable[[EventRecord], GradientFlow]
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    loss: str = ""
    level: Level = "norm"

    def flow(self) -> GradientFlow:
        """The flow of the event.  Copies to the host."""
        flow = self.assemble(self.kept)
        return flow if self.known is None else self.known.complete(self.kept, flow)


@dataclass(frozen=True, slots=True)
class Written:
    """An event that is in the file.

    Attributes:
        flow: gives its flow.
        bad: whether the backward pass raised, or something is NaN or Inf.
    """

    flow: Callable[[], GradientFlow]
    bad: bool


@dataclass(frozen=True, slots=True)
class _Pattern:
    """An event that others may be like.

    Attributes:
        like: equal for those that are; it holds what it compares by identity.
        tail: what its numbers of the training and of the event itself are the numbers of.
        flow: its flow, without numbers.
        structure: of the file.
        places: of each measured value, then of each parameter, where it is among the readings; None for one without.
    """

    like: tuple[Any, ...]
    tail: tuple[Any, ...]
    flow: GradientFlow
    structure: int
    places: tuple[tuple[int | None, ...], tuple[int | None, ...]]


class WrittenEvents:
    """Writes the events of one watch into its file."""

    def __init__(self, file: RunFile) -> None:
        self._file = file
        self._patterns: list[_Pattern] = []
        self.step: int | None = None  # of the event that was written last
        self.broken = False  # whether an error was found, whose step is kept
        self._count = 0
        self._quick = True

    def write(self, coming: Coming, notes: dict[str, float]) -> Written:
        """Write an event.

        Raises:
            RunFileError: it cannot be written.
        """
        self._count += 1
        read = _read(coming) if self._quick else None
        if read is not None:
            for found in reversed(self._patterns if self._count % _LOOKED else []):
                numbers = _numbers(found, coming, read, self._file.first) if found.like == read.like else None
                if numbers is None:
                    continue
                event = coming.kept.event, coming.kept.forward_record.number
                self.step = self._file.repeat(found.structure, numbers, event, notes)
                return Written(partial(_again, found.flow, numbers), bad=False)
        return self._write_flow(coming, read, notes)

    def _write_flow(self, coming: Coming, read: _Read | None, notes: dict[str, float]) -> Written:
        flow = coming.flow()
        try:
            self.step = self._file.append(flow, notes=notes)
        except BaseException:
            self._patterns.clear()  # of structures that may not be in the file
            raise
        if read is not None:
            self._learn(coming, read, flow)
        return Written(partial(_itself, flow), _is_bad(flow))

    def _learn(self, coming: Coming, read: _Read, flow: GradientFlow) -> None:
        """Let later events be like this one, if its numbers are found in the quick way, too."""
        parts = split(flow)
        if parts.ragged or not all(map(_ordinary, read.values)):
            return
        forward_record = coming.kept.forward_record
        sites = tuple(reading_of(forward_record, number) for number in range(len(forward_record.call_graph.sites)))
        places = (
            tuple(None if n is None else read.sites.get(n) for n in sites),
            tuple(read.parameters.get(number) for number, _, _ in forward_record.parameters),
        )
        tail = _tail(coming, flow.event.backward)
        pattern = _Pattern(read.like, tail[0], prototype(flow), self._file.structure, places)
        known = [one for one in self._patterns if one.like == read.like and one.tail == pattern.tail]
        if any(_numbers(one, coming, read, 0) != parts.numbers for one in (*known, pattern)):
            self._quick = False  # never taken for granted
            self._patterns.clear()
        elif not known:
            self._patterns = [*self._patterns[-_PATTERNS + 1 :], pattern]


@dataclass(frozen=True, slots=True)
class _Read:
    """The norms of an event that has nothing but norms.

    Attributes:
        like: equal for events that differ in nothing but their numbers.
        values: numel and norm of each reading.
        sites, parameters: by number, which of them it is.
    """

    like: tuple[Any, ...]
    values: list[tuple[int, float]]
    sites: dict[int, int]
    parameters: dict[int, int]


def _read(coming: Coming) -> _Read | None:
    """None for an event that is out of the ordinary."""
    kept = coming.kept
    if kept.flow is not None or kept.raised is not None:
        return None
    forward: ForwardRecord = kept.forward_record
    odd = (forward.edges, forward.rewriting, forward.values, forward.window, forward.deviation)
    if any(one is not None for one in odd):
        return None
    with coming.lock:
        found = read_norms([kept, *([] if kept.parameters is None else [kept.parameters])])
    if found is None:
        return None
    layouts, values = found
    count = itertools.count()
    places = [{number: next(count) for number, one in enumerate(layout) if one is not None} for layout in layouts]
    graph = forward.graph
    like = (
        _Same(graph), graph.asked, graph.hidden, len(graph.lost), graph.loss, layouts, forward.report,
        tuple(forward.shape_of(n) for n in range(len(graph.sites)) if n not in places[0]),
        forward.unmeasurable, forward.not_required, forward.same, forward.unprobed, forward.outside, forward.reduced,
        forward.frozen_places, tuple((names, p.shape, p.dtype, p.device) for _, names, p in forward.parameters),
    )  # fmt: skip
    return _Read(like, values, places[0], places[1] if len(places) > 1 else {})


class _Same:
    """Equal to what holds the very same object."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._of is self._of

    __hash__ = None  # type: ignore[assignment]


def _numbers(pattern: _Pattern, coming: Coming, read: _Read, first: int) -> array[float] | None:
    """The numbers of an event that is like another; None where it is not, after all.  ``first``: step of event 0."""
    if not all(map(_ordinary, read.values)):
        return None
    numbers: array[float] = array("d")
    for place in pattern.places[0]:
        if place is not None:
            numbers.extend(read.values[place])
    backward = coming.kept.event + first
    tail, updates, rest = _tail(coming, backward)
    if tail != pattern.tail:
        return None
    for place, (_, _, parameter) in zip(pattern.places[1], coming.kept.forward_record.parameters, strict=True):
        if place is not None:
            numbers.extend(read.values[place])
        if updates:
            numbers.extend(updates.get(id(parameter), ()))
    numbers.extend(rest)
    return numbers


def _tail(coming: Coming, backward: int) -> tuple[tuple[Any, ...], dict[int, array[float]], array[float]]:
    """Of the training and the event itself: what the numbers are, those of the updates by parameter, and the others."""
    kept, known = coming.kept, coming.known
    info = replace(event_of(kept, coming.loss, coming.level), backward=backward)
    found: Mapping[int, Update] = {}
    facts = None
    if known is not None:
        info, found, facts = known.around(kept, info)
    rest: array[float] = array("d")
    updates: dict[int, array[float]] = {}
    what: list[Any] = [taken(info, rest, [])]
    for _, _, parameter in kept.forward_record.parameters if found else ():
        update = found.get(id(parameter))
        numbers: array[float] = array("d")
        what.append(None if update is None else taken(update, numbers, []))
        updates[id(parameter)] = numbers
    what.append(None if facts is None else taken(facts, rest, []))
    return tuple(what), updates, rest


def _itself(flow: GradientFlow) -> GradientFlow:
    return flow


def _again(of: GradientFlow, numbers: array[float]) -> GradientFlow:
    return filled(of, iter(numbers), iter(()))


def _ordinary(value: tuple[int, float]) -> bool:
    return 0.0 < value[1] < math.inf


def _is_bad(flow: GradientFlow) -> bool:
    """Whether the backward pass raised, or something is NaN or Inf."""
    measured = (record.statistics for records in (flow.sites, flow.parameters) for record in records)
    return flow.event.failed is not None or any(one is not None and one.nonfinite is not False for one in measured)
