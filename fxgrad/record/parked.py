"""Gradients on an accelerator that are not large wait until many are there, and are reduced by a few launches.

What waits is a reference, an alias of the gradient's memory, not a copy: that launches nothing.  It is a tensor object
of its own, since torch gives a parameter its gradient without a copy only where nobody else has that object; and where
a gradient's memory is shared, autograd adds the next part out of place, to the same bits.  What was changed in place
before it is reduced has a failure with its reason, no number.

Nothing here waits for the device, and no kernel gets its arguments from host memory that may change, so that all of it
can be captured into a CUDA graph.  Several streams: a group has gradients of one, and is reduced on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fxgrad.record.owners import Parameters
from fxgrad.record.slots import Reading, Slots
from fxgrad.record.staging import STAGED, WIDTH, Batch
from fxgrad.record.statistics import accumulator, columns, without_gaps
from fxgrad.torch_support.private import norms_of, version_of

BOUND = 8_000_000  # bytes that may wait on one device in one backward pass, at least
_SHARE = 200  # that part of the parameters' bytes, where it is more
SMALL = 65_536  # bytes of a small gradient
#: The largest gradient that waits takes one of so many parts of the bound.  At `norm` a group that is reduced since the
#: bound is reached has at least 7 gradients then, and 107 where all are small.  It costs two operators, three where
#: there are two dtypes: never more than one for 32 small ones and one for each that is not small.
PARTS = {"norm": 8, "full": 2}
_ROW = 36 * WIDTH  # bytes that a row takes at `full` with all that is made of it, the gradient included
CHANGED = "was changed in place before it was reduced; from the next backward pass on it is reduced at once"
_FREED = "its memory was freed before it was reduced"
_DTYPES = (*STAGED, torch.float64)


def parks(device: torch.device) -> bool:
    """Whether small gradients wait on ``device``: where launches cost more than the work in them.

    Whether other accelerators have multi-tensor kernels and streams is not known; there each is reduced at once.
    """
    return device.type == "cuda"


def bound_for(parameters: int) -> int:
    """Bytes that may wait on one device, for parameters of so many bytes."""
    return max(BOUND, parameters // _SHARE)


class Writable(Protocol):
    """Where readings and failures go: a part of an event."""

    slots: Slots
    readings: list[Reading | None]
    failures: dict[int, str]


class Norms(Batch):
    """The norms of one group; ``result`` has shape (gradients,)."""

    __slots__ = ()


class Rows(NamedTuple):
    """The rows of a batch that one gradient lies in, ``end`` exclusive."""

    first: int
    end: int


class _Waiting(NamedTuple):
    """A gradient that waits: its alias, and how often its memory had been changed by then."""

    part: Writable
    site: int
    alias: Tensor
    version: int

    def trouble(self) -> str | None:
        if version_of(self.alias) != self.version:
            return CHANGED
        return None if self.alias.untyped_storage().nbytes() else _FREED

    def fail(self, reason: str) -> None:
        self.part.readings[self.site] = None
        self.part.failures[self.site] = reason
        self.part.slots.impatient.add(self.site)


class _Key(NamedTuple):
    """What waits together.  ``dtype`` is that of the norms, or of the gradients at ``full``."""

    kind: Literal["norm", "full"]
    dtype: torch.dtype
    stream: int


_PENDING = Batch()


class Parked:
    """The gradients of one backward pass that wait on one device.

    Attributes:
        most: bytes that waited at once.
        batches: what was reduced so far.
    """

    def __init__(self, device: torch.device, bound: int) -> None:
        self._device = device
        self._bound = bound
        self._groups: dict[_Key, list[_Waiting]] = {}
        self._streams: dict[int, Any] = {}
        self._bytes = 0
        self.most = 0
        self.batches: list[Batch] = []

    def put(self, part: Writable, index: int, gradient: Tensor, kind: Literal["norm", "full"]) -> Reading | None:
        """Let ``gradient`` wait; None where it is none of those that do."""
        dtype = gradient.dtype
        if (
            type(gradient) is not Tensor
            or dtype not in _DTYPES
            or gradient.layout is not torch.strided
            or index in part.slots.impatient
            or (kind == "full" and dtype not in STAGED)
        ):
            return None
        numel, held = gradient.numel(), gradient.untyped_storage().nbytes()  # a view keeps all of its memory
        cost = held if kind == "norm" else max(held, -(-numel // WIDTH) * _ROW)
        if not numel or cost > self._bound // PARTS[kind] or gradient.is_neg() or not without_gaps(gradient):
            return None
        if self._bytes + cost > self._bound:
            self.flush()
        key = _Key(kind, accumulator(dtype) if kind == "norm" else dtype, self._stream())
        alias = gradient.detach()
        self._groups.setdefault(key, []).append(_Waiting(part, index, alias, version_of(alias)))
        self._bytes += cost
        self.most = max(self.most, self._bytes)
        return _PENDING, gradient.shape, numel, None

    def _stream(self) -> int:
        """The number of the stream that the running hook launches on."""
        if self._device.type != "cuda":  # tests
            return 0
        stream = torch.accelerator.current_stream(self._device)
        number: int = stream.stream_id
        self._streams.setdefault(number, stream)
        return number

    def flush(self) -> None:
        """Reduce what waits."""
        groups, self._groups, self._bytes = self._groups, {}, 0
        with torch.no_grad():
            for key, waiting in groups.items():
                with self._on(key.stream):  # memory that is freed there is used again behind our kernels only
                    self._reduce(key, waiting)

    def finish(self) -> None:
        """Reduce what waits; what the present stream does from here on sees the results."""
        self.flush()
        if self._streams:
            current = torch.accelerator.current_stream(self._device)
            for stream in self._streams.values():
                if stream != current:
                    current.wait_stream(stream)

    def _on(self, number: int) -> AbstractContextManager[Any]:
        stream = self._streams.get(number)
        if stream is None or stream == torch.accelerator.current_stream(self._device):
            return nullcontext()
        context: AbstractContextManager[Any] = stream
        return context

    def _reduce(self, key: _Key, waiting: list[_Waiting]) -> None:
        sound = []
        for one in waiting:
            trouble = one.trouble()
            if trouble is None:
                sound.append(one)
            else:
                one.fail(trouble)
        if not sound:
            return
        try:
            if key.kind == "norm":
                self._reduce_norms(sound, key.dtype)
            else:
                self._reduce_rows(sound, key.dtype)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on
            for one in sound:
                one.fail(f"{type(error).__name__}: {error}".splitlines()[0])

    def _reduce_norms(self, waiting: list[_Waiting], dtype: torch.dtype) -> None:
        kinds: dict[torch.dtype, list[_Waiting]] = {}
        for one in waiting:
            kinds.setdefault(one.alias.dtype, []).append(one)
        norms = [norm for same in kinds.values() for norm in norms_of([one.alias for one in same], dtype)]
        places = enumerate(one for same in kinds.values() for one in same)
        self._done(Norms(), torch.stack(norms), ((one, place) for place, one in places))

    def _reduce_rows(self, waiting: list[_Waiting], dtype: torch.dtype) -> None:
        zeros = torch.zeros(WIDTH, dtype=dtype, device=self._device)
        pieces, places, end = [], [], 0
        for one in waiting:
            numel = one.alias.numel()
            first, end = end, end - (-numel // WIDTH)
            places.append((one, Rows(first, end)))
            pieces.append(one.alias.as_strided((numel,), (1,)))  # in whatever order they lie in memory
            if numel % WIDTH:
                pieces.append(zeros[: -numel % WIDTH])
        self._done(Batch(), columns(torch.cat(pieces).view(end, WIDTH), dtype), iter(places))

    def _done(self, batch: Batch, result: Tensor, places: Iterator[tuple[_Waiting, Any]]) -> None:
        batch.result = result
        self.batches.append(batch)
        for one, place in places:
            one.part.readings[one.site] = (batch, one.alias.shape, one.alias.numel(), place)


class Parking:
    """All that waits in one backward pass, device by device."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._devices: dict[torch.device, Parked] = {}

    @staticmethod
    def on(device: torch.device) -> bool:
        """Whether gradients on ``device`` may wait."""
        return parks(device)

    def put(self, part: Writable, index: int, gradient: Tensor, kind: Literal["norm", "full"]) -> Reading | None:
        """Let ``gradient`` wait; None where it is to be reduced at once."""
        device = gradient.device
        parked = self._devices.get(device)
        if parked is None:
            parked = self._devices[device] = Parked(device, bound_for(self._parameters.nbytes(device)))
        return parked.put(part, index, gradient, kind)

    def finish(self) -> list[Batch]:
        """Reduce what waits; all that was reduced in this pass."""
        for parked in self._devices.values():
            parked.finish()
        return [batch for parked in self._devices.values() for batch in parked.batches]
