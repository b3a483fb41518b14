"""What C++ hooks wrote in a backward event, brought into the form of the other readings.

A *slot* of the native recorder is a value of one forward call, or a parameter; a value may be several sites, where one
tensor has several names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fxgrad.schema import Level

if TYPE_CHECKING:
    from fxgrad.record.recorder import EventRecord

#: What a slot holds, as the extension numbers levels.
LEVELS: Mapping[Level, int] = {"norm": 1, "full": 2, "histogram": 3}
_NORM, _FULL, _HISTOGRAM = LEVELS.values()
SEVERAL = "arrived in several parts during one backward (reentrant checkpointing)"


class Source(NamedTuple):
    """Where a reading is: what was written in which of the passes of one event, all of them on the CPU."""

    number: int
    kind: Literal["norm", "norm64", "full", "full64", "bins"]


class Written(Protocol):
    """What C++ hooks wrote in one backward pass (the extension's ``Event``), by slot."""

    state: bytes
    doubled: bytes
    squares: Tensor
    columns: Tensor
    bins: Tensor

    def close(self) -> None:
        """Nothing more is written."""
        ...


class Sizes(Protocol):
    """The sizes of the values behind the slots (the extension's ``Shapes``)."""

    def at(self, slot: int) -> list[int]:
        """Of one slot."""
        ...


def unpack(event_record: EventRecord, sites: Sequence[Sequence[int]] | None, sizes: Sizes) -> None:
    """Bring what C++ hooks wrote into the form of the other readings; ``sites`` of each slot, None: its own number."""
    for number, written in enumerate(event_record.native):
        state, doubled = written.state, written.doubled
        if not any(state):
            continue
        norms = written.squares.sqrt()
        event_record.buffers[Source(number, "norm")] = norms.to(torch.float32)  # as the Python recorder keeps them
        if any(doubled):
            event_record.buffers[Source(number, "norm64")] = norms
        if any(level >= _FULL for level in state):
            event_record.buffers[Source(number, "full")] = event_record.buffers[Source(number, "full64")] = (
                written.columns
            )
        if _HISTOGRAM in state:
            event_record.buffers[Source(number, "bins")] = written.bins
        for slot, level in enumerate(state):
            if not level or (sites is not None and slot >= len(sites)):
                continue
            kind: Any = ("norm" if level == _NORM else "full") + ("64" if doubled[slot] else "")
            shape = torch.Size(sizes.at(slot))
            for site in (slot,) if sites is None else sites[slot]:
                _put(event_record, site, (Source(number, kind), shape, shape.numel(), slot))
    event_record.native = []


def _put(event_record: EventRecord, site: int, reading: Any) -> None:
    missing = site + 1 - len(event_record.readings)
    if missing > 0:
        event_record.readings.extend([None] * missing)
    if event_record.readings[site] is not None:
        event_record.failures[site] = SEVERAL
    event_record.readings[site] = reading
