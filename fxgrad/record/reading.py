"""What was kept of an event, on the host: the one copy from each device happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxgrad.record.native import Source
from fxgrad.record.parked import Norms
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slots import Reading
from fxgrad.record.staging import WIDTH, Batch
from fxgrad.record.statistics import ZERO_COUNT, from_full, from_norm, merged_rows
from fxgrad.record.values import ForwardValues, Units
from fxgrad.schema import Activity, ChannelSums, Statistics

_Rows = dict[tuple[int, Any], Any]
_NORMS = frozenset({"norm", "norm64", "square"})  # kinds of slots


def _place(part: EventRecord, key: Any) -> tuple[int, Any]:
    return (0 if isinstance(key, Batch) else id(part)), key


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one backward event and of its forward call, on the host; lists by number.

    Attributes:
        sites, parameters: of the gradients.
        values, state: of the values at the sites; of the parameters and, behind them, the buffers.
        activity, channels: by site.
    """

    sites: list[Statistics | None]
    parameters: list[Statistics | None]
    values: list[Statistics | None]
    state: list[Statistics | None]
    activity: dict[int, Activity]
    channels: dict[int, ChannelSums]


def read_event(event_record: EventRecord, forward: ForwardValues | None) -> Measured:
    """All that was measured: one copy to the host per device."""
    parts = [
        event_record,
        event_record.parameters,
        *((forward.sites, forward.state) if forward is not None else (None, None)),
    ]
    rows = _rows(parts)
    sites, parameters, values, state = ([] if part is None else _read(part, rows) for part in parts)
    measured = Measured(sites, parameters, values, state, {}, {})
    for site, axis in event_record.channels.items():
        norms = rows[_place(event_record, ("channels", site))]
        measured.channels[site] = ChannelSums(axis, tuple(norm * norm for norm in norms))
    if forward is not None and forward.sites is not None:
        for site, units in forward.units.items():
            measured.activity[site] = _activity(rows[_place(forward.sites, ("units", site))], units)
    return measured


def _activity(counts: Sequence[float], units: Units) -> Activity:
    never = tuple(unit for unit, count in enumerate(counts) if not count) if units.samples else ()
    return Activity(units.axis, len(counts), units.samples, never, int(sum(counts)))


def _rows(parts: Sequence[EventRecord | None]) -> _Rows:
    present = [part for part in parts if part is not None]
    for part in present:
        part.finish()
    return _on_host(present)


def _read(part: EventRecord, rows: _Rows) -> list[Statistics | None]:
    return [
        None if reading is None or number in part.failures else _complete(part, rows, number, reading)
        for number, reading in enumerate(part.readings)
    ]


def _complete(part: EventRecord, rows: _Rows, number: int, reading: Reading) -> Statistics:
    source = reading[0]
    statistics = _statistics(rows[_place(part, source)], reading)
    if number in part.placed:
        statistics = replace(statistics, placement=part.placed[number])
    if isinstance(source, Source):
        key: Any = Source(source.number, "bins")
    else:
        key = (torch.device("cpu") if isinstance(source, Batch) else source[0]), "histogram"
        reading = (source, reading[1], reading[2], number)
    histograms = rows.get(_place(part, key))
    if histograms is None:
        return statistics
    return replace(statistics, level="histogram", exponent_histogram=tuple(map(int, histograms[reading[3]])))


def _on_host(parts: Sequence[EventRecord]) -> _Rows:
    """The slots and batches of all parts as nested lists; those of one device travel together."""
    buffers = [(_place(part, key), buffer) for part in parts for key, buffer in part.buffers.items()]
    buffers = list(dict(buffers).items())  # several parts of one event may lie in one batch
    rows: _Rows = {}
    for device in {buffer.device for _, buffer in buffers}:
        here = [(place, buffer) for place, buffer in buffers if buffer.device == device]
        joined = torch.cat([buffer.reshape(-1).to(torch.float64) for _, buffer in here]).to("cpu")
        start = 0
        for place, buffer in here:
            rows[place] = joined[start : start + buffer.numel()].reshape(buffer.shape).tolist()
            start += buffer.numel()
    return rows


def _statistics(rows: Any, reading: Reading) -> Statistics:
    source, _, numel, place = reading
    if isinstance(source, Norms):
        return from_norm(rows[place], numel)
    if isinstance(source, Batch):
        values = merged_rows([[column[row] for column in rows] for row in range(place.first, place.end)])
        padding = (place.end - place.first) * WIDTH - numel
        values[ZERO_COUNT] -= padding
        return from_full(values, numel)
    kind = source.kind if isinstance(source, Source) else source[1]
    if kind in ("full", "full64"):
        return from_full(rows[place], numel, scaled=kind == "full64")
    return from_norm(rows[place] ** 0.5 if kind == "square" else rows[place], numel)


def read_gradients(parts: Sequence[EventRecord]) -> list[list[Statistics | None]]:
    """Statistics of gradients by site number, for each part: one copy to the host per device."""
    for part in parts:
        part.finish()
    rows = _on_host(parts)
    return [_read(part, rows) for part in parts]


def read_norms(
    parts: Sequence[EventRecord],
) -> tuple[tuple[tuple[Any, ...], ...], list[tuple[int, float]]] | None:
    """The norms of parts that hold nothing else: one copy to the host per device.

    Returns:
        For each part, what each of its readings is (None where there is none): equal for events that differ in their
        norms only.  And numel and norm of all readings, in that order.  None where there is more than norms.
    """
    for part in parts:
        part.finish()
        if part.failures or part.channels or part.placed:
            return None
    rows = _on_host(parts)
    batches: dict[Batch, int] = {}
    layouts: list[tuple[Any, ...]] = []
    values: list[tuple[int, float]] = []
    for part in parts:
        layout: list[Any] = []
        for reading in part.readings:
            if reading is None:
                layout.append(None)
                continue
            source, shape, numel, place = reading
            key: Any = source
            if isinstance(source, Norms):
                key = batches.setdefault(source, len(batches))
            elif isinstance(source, Batch) or source[1] not in _NORMS:
                return None
            value = rows[_place(part, source)][place]
            values.append((numel, value**0.5 if not isinstance(source, Batch) and source[1] == "square" else value))
            layout.append((key, shape, place))
        layouts.append(tuple(layout))
    return tuple(layouts), values
