"""What C++ hooks wrote, as a part of a backward event: when it begins, what is left to Python, how it is read.

A *slot* of the native recorder is a value of one forward call, or a parameter; a value may be several sites, where one
tensor has several names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fxgrad.record.slots import Slots
from fxgrad.torch_private import current_backward

if TYPE_CHECKING:
    from fxgrad.record.recorder import Kept, Owner, Part, Recorder

_HERE = torch.device("cpu")
_NORM, _FULL, _HISTOGRAM = 1, 2, 3  # what a slot holds, as the extension numbers levels
SEVERAL = "arrived in several parts during one backward (reentrant checkpointing)"


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


def begins(recorder: Recorder, owner: Owner, written: Written, new_part: Any) -> bool:
    """A backward pass begins to write; whether it is to be recorded.  ``new_part``: makes a part of an event."""
    if owner is recorder.parameters and not recorder.on:
        return False
    event = recorder.event_of_pass()
    part: Part | None = event.parts.get(owner)
    if part is None:
        part = event.parts[owner] = new_part(event, recorder.free_slots(owner))
    part.native.append(written)
    owner.task, owner.part = current_backward(), part
    return True


def takes(recorder: Recorder, owner: Owner, sites: Sequence[int], gradient: Tensor) -> None:
    """A gradient that the native reductions do not take."""
    for site in sites:
        recorder.observe(owner, site, gradient)


def settle(kept: Kept, sites: Sequence[Sequence[int]] | None, sizes: Sizes) -> None:
    """Bring what C++ hooks wrote into the form of the other readings; ``sites`` of each slot, None: its own number."""
    for number, written in enumerate(kept.native):
        state, doubled = written.state, written.doubled
        if not any(state):
            continue
        kept.buffers[_HERE, f"native_norm{number}"] = written.squares
        kept.buffers[_HERE, f"native_full{number}"] = written.columns
        kept.buffers[_HERE, f"native_full64{number}"] = written.columns
        if _HISTOGRAM in state:
            kept.buffers[_HERE, f"native_bins{number}"] = written.bins
        for slot, level in enumerate(state):
            if not level or (sites is not None and slot >= len(sites)):
                continue
            kind = "norm" if level == _NORM else "full64" if doubled[slot] else "full"
            shape = torch.Size(sizes.at(slot))
            for site in (slot,) if sites is None else sites[slot]:
                _put(kept, site, ((_HERE, f"native_{kind}{number}"), shape, shape.numel(), slot))
    kept.native = []


def _put(kept: Kept, site: int, reading: Any) -> None:
    missing = site + 1 - len(kept.readings)
    if missing > 0:
        kept.readings.extend([None] * missing)
    if kept.readings[site] is not None:
        kept.failures[site] = SEVERAL
    kept.readings[site] = reading


def free(slots: list[Slots]) -> Slots:
    """Slots to write to."""
    return slots.pop() if slots else Slots()
