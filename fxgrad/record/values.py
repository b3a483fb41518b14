"""Statistics of the values themselves: what a forward call's nodes returned, its parameters and its buffers.

The same reductions and the same memory as for gradients: small values are staged in pages, larger ones are reduced
into preallocated slots.  Nothing is copied to the host, and no value is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.record.full import is_staged, write_bins, write_full
from fxgrad.record.library import library
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slots import BufferKey, Reading, Slots
from fxgrad.record.staging import LARGEST, Batch, Page
from fxgrad.record.statistics import columns, without_gaps
from fxgrad.schema import Level, Placement
from fxgrad.torch_support.private import storage_of, version_of
from fxgrad.torch_support.shards import is_sharded, local_part, placement_of

_SINGLES: BufferKey = (torch.device("cpu"), "full")


class Units(NamedTuple):
    """The active entries of an activation's output, by unit.

    ``counts`` has shape (units,); it stays on the device.  ``axis``: dimension of the units, ``samples``: entries of
    a unit.
    """

    counts: Tensor
    axis: int
    samples: int


class _Latest(NamedTuple):
    """The latest value that was reduced in some memory: where in it, how many entries, of which dtype and version."""

    facts: tuple[Any, ...]
    reading: Reading


class _Taken:
    """Slots and readings of one kind of tensors."""

    __slots__ = ("failures", "placed", "readings", "slots", "sources")

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.readings: list[Reading | None] = []
        self.failures: dict[int, str] = {}
        self.placed: dict[int, Placement] = {}
        self.sources: set[BufferKey] = set()


class _Memory:
    """What one forward call after the other writes into."""

    __slots__ = ("pages", "sites", "state")

    def __init__(self) -> None:
        self.sites = Slots()
        self.state = Slots()
        self.pages: dict[torch.dtype, Page] = {}


class ValueRecorder:
    """Makes a ``ForwardValues`` for each forward call.

    Args:
        level: of the gradients; values are taken at ``full`` at least, since ``norm`` counts nothing.
        native: whether the native library may be used.
    """

    def __init__(self, level: Level, *, native: bool = True) -> None:
        self._native = native
        self.level: Level = "histogram" if level == "histogram" else "full"
        self._free: list[_Memory] = []  # a call inside of a call, or in another thread, has memory of its own

    def begin(self) -> ForwardValues:
        """A forward call begins."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _Memory()
        for page in memory.pages.values():
            page.begin()
        return ForwardValues(self.level, memory, self._free, library() if self._native else None)


class ForwardValues:
    """Statistics of the values of one forward call.  Takes tensors, keeps scalars.

    Attributes:
        sites, state: what was taken of the sites and of parameters and buffers, once ``finish`` was called.
        units: by site, the active entries of an activation's output; also among the buffers of ``sites``.
    """

    def __init__(self, level: Level, memory: _Memory, free: list[_Memory], native: Any) -> None:
        self._library = native
        self.level = level
        self.sites: EventRecord | None = None
        self.state: EventRecord | None = None
        self.units: dict[int, Units] = {}
        self._memory: _Memory | None = memory
        self._free = free
        self._sites = _Taken(memory.sites)
        self._state = _Taken(memory.state)
        self._latest: dict[object, _Latest] | None = {} if level == "full" else None

    def take(self, site: int, value: Tensor) -> None:
        """The value at ``site``, as it is now.  Call under ``no_grad``.  Never raises."""
        identity = self._identity(value) if self._latest is not None else None
        if identity is None or self._latest is None:
            self._take(self._sites, site, value)
            return
        memory, facts = identity
        known = self._latest.get(memory)
        if known is not None and known.facts == facts:
            self._extend(self._sites, site)
            self._sites.readings[site] = known.reading
            return
        self._take(self._sites, site, value)
        reading = self._sites.readings[site]
        if reading is not None:
            self._latest[memory] = _Latest(facts, reading)

    def library_takes(self, value: Tensor) -> bool:
        """Whether the native reductions take a value."""
        return self._library is not None and self._library.reducible(value)

    @staticmethod
    def _identity(value: Tensor) -> tuple[object, tuple[Any, ...]] | None:
        """The memory of a value and what it is of it; None where that is not worth knowing or cannot be known."""
        try:
            memory = storage_of(value) if _may_repeat(value) else None
            if memory is None:
                return None
            return memory, (value.storage_offset(), value.numel(), value.dtype, version_of(value), value.is_neg())
        except Exception:  # noqa: BLE001  # a tensor without memory, whatever it is
            return None

    def forget(self) -> None:
        """Memory may be written to that no version counts from here on: every value is reduced anew."""
        self._latest = None

    def take_state(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and buffers, as they are now.  Call under ``no_grad``.  Never raises."""
        listed = list(tensors)
        done = self._take_at_once(listed)
        for number, tensor in enumerate(listed):
            if not done or not done[number]:
                self._take(self._state, number, tensor)

    def _take_at_once(self, tensors: list[Tensor]) -> bytes:
        """What the native reductions take of ``tensors``, in one call; by tensor, whether it was."""
        memory, taken = self._memory, self._state
        if memory is None or self._library is None or self.level != "full" or not tensors:
            return b""
        taken.slots.views(_SINGLES, len(tensors))
        done: bytes = self._library.full_of_all(tensors, taken.slots.buffers[_SINGLES])
        taken.sources.add(_SINGLES)
        taken.readings = [
            (_SINGLES, tensor.shape, tensor.numel(), number) if one else None
            for number, (tensor, one) in enumerate(zip(tensors, done, strict=True))
        ]
        return done

    @staticmethod
    def _extend(taken: _Taken, index: int) -> None:
        missing = index + 1 - len(taken.readings)
        if missing > 0:
            taken.readings.extend([None] * missing)

    def _take(self, taken: _Taken, index: int, tensor: Tensor) -> None:
        memory = self._memory
        if memory is None:  # the forward has returned
            return
        self._extend(taken, index)
        try:
            taken.readings[index] = self._write(memory, taken, index, _plain(tensor))
            if is_sharded(tensor):
                taken.placed[index] = placement_of(tensor)
        except Exception as error:  # noqa: BLE001  # the user's forward must go on, whatever the value is
            taken.readings[index] = None
            taken.failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _write(self, memory: _Memory, taken: _Taken, index: int, value: Tensor) -> Reading:
        bins = self.level == "histogram"
        if self._library is None and is_staged(value):
            if bins:
                taken.sources.add(write_bins(value, taken.slots, (index, index + 1)))
            page = memory.pages.get(value.dtype)
            if page is None:
                page = memory.pages[value.dtype] = Page(value.dtype, columns)
            return page.put(value)
        reading = write_full(value, taken.slots, (index, index + 1), self._library, bins=bins)
        taken.sources.add(reading[0])
        if bins:
            taken.sources.add((reading[0][0], "histogram"))
        return reading

    def finish(self) -> None:
        """The forward has returned: reduce what is staged, keep the scalars, give the memory back."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        for page in memory.pages.values():
            page.flush()
        batches = [batch for page in memory.pages.values() for batch in page.batches]
        self.sites, self.state = _keep(self._sites, batches), _keep(self._state, batches)
        self.sites.buffers.update({("units", site): units.counts for site, units in self.units.items()})
        self._free.append(memory)


def _may_repeat(value: Tensor) -> bool:
    """Whether a value may be a rearrangement of one before it that is worth looking for: large, and without gaps.

    Views, reshapes, permutations and ops that return their argument make a third of the values of a transformer.  One
    that requires a gradient is written to behind torch's back by nobody.
    """
    if not value.requires_grad or type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
        return False
    return value.numel() > LARGEST and not value.is_nested and without_gaps(value)


def _plain(tensor: Tensor) -> Tensor:
    """The entries as the reductions take them.

    Raises:
        NotImplementedError: there are none.
    """
    if tensor.is_meta:
        message = "a meta tensor has no entries"
        raise NotImplementedError(message)
    value = local_part(tensor.detach())
    if value.is_nested:
        value = value.values()
    # A kernel reads memory: bits that say "conjugated" or "negated" mean nothing to it.
    return value.resolve_conj().resolve_neg() if value.is_neg() or value.is_conj() else value


def _keep(taken: _Taken, batches: list[Batch]) -> EventRecord:
    buffers: dict[Any, Tensor] = {key: taken.slots.buffers[key].clone() for key in taken.sources}
    buffers.update({batch: batch.result for batch in batches if batch.result is not None})
    return EventRecord(None, 0, buffers, taken.readings, taken.failures, None, placed=taken.placed)
