"""Small gradients of one backward pass, copied as they arrive and reduced together.

A gradient may change or go away as soon as its hook returns, so the entries are copied; that costs about as much as
one tiny kernel, while the twelve scalars of one tiny gradient cost several.  Memory is bounded by the page.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxgrad.record.slots import Reading

WIDTH = 1024  # entries of a row
ROWS = 256  # of a page: 1 MiB of float32
LARGEST = 16 * WIDTH  # entries of the largest gradient that is staged
STAGED = (torch.float32, torch.float16, torch.bfloat16)
#: Rows (shape (rows, ``WIDTH``), float32) and the gradients' dtype to their columns, shape (11, rows).
Reduce = Callable[[Tensor, torch.dtype], Tensor]


class Batch:
    """What one filling of a page was reduced to.

    ``result`` has shape (11, rows), float64; where it is None, ``error`` says why.
    """

    __slots__ = ("error", "result")

    def __init__(self) -> None:
        self.result: Tensor | None = None
        self.error: str | None = None


class Place:
    """Where the n-th gradient of a filling lies: rows ``first`` to ``end`` (exclusive)."""

    __slots__ = ("end", "first", "numel", "rest", "shape", "view")

    def __init__(self, buffer: Tensor, shape: torch.Size, first: int) -> None:
        self.shape = shape
        self.numel = shape.numel()
        self.first = first
        self.end = first + max(1, -(-self.numel // WIDTH))
        entries = buffer[first : self.end].view(-1)
        self.view = entries[: self.numel].view(shape)
        self.rest = entries[self.numel :].zero_() if self.numel < entries.numel() else None


class Page:
    """Memory for the small gradients of one dtype in one backward pass after the other.

    Places are remembered from pass to pass, since the same gradients come in the same order.  What a row holds beyond
    its gradient is zero when it is reduced.
    """

    def __init__(self, dtype: torch.dtype, reduce: Reduce) -> None:
        self.dtype = dtype
        self._reduce = reduce
        self._buffer = torch.zeros(ROWS, WIDTH, dtype=torch.float32, device="cpu")
        self._fillings: list[list[Place | None]] = [[None]]  # each ends with a None
        self._places = self._fillings[0]
        self._count = 0
        self._batch = Batch()
        self.batches: list[Batch] = []

    def begin(self) -> None:
        """Start with the first filling of a backward pass."""
        self._places, self._count, self._batch, self.batches = self._fillings[0], 0, Batch(), []

    def put_known(self, gradient: Tensor) -> Reading | None:
        """Copy ``gradient`` where it is like the one that came here in the pass before; None where it isn't."""
        place = self._places[self._count]
        if (
            place is None
            or place.shape != gradient.shape
            or gradient.dtype is not self.dtype
            or type(gradient) is not Tensor
            or gradient.get_device() >= 0
        ):
            return None
        if place.rest is not None and len(self._fillings) > 1:
            place.rest.zero_()
        place.view.copy_(gradient)  # refuses a gradient that is not strided
        self._count += 1
        return self._batch, place.shape, place.numel, place

    def put(self, gradient: Tensor) -> Reading:
        """Copy ``gradient``, of at most ``LARGEST`` entries; call under ``no_grad``."""
        place = self._places[self._count]
        if place is None or place.shape != gradient.shape:
            place = self._place(gradient.shape)
        elif place.rest is not None and len(self._fillings) > 1:  # another filling's entries are in the same rows
            place.rest.zero_()
        place.view.copy_(gradient)
        self._count += 1
        return self._batch, place.shape, place.numel, place

    def _place(self, shape: torch.Size) -> Place:
        last = self._places[self._count - 1] if self._count else None
        first = last.end if last is not None else 0
        if first + -(-shape.numel() // WIDTH) > ROWS or first == ROWS:
            self._next_filling()
            known, first = self._places[0], 0
            if known is not None and known.shape == shape:
                if known.rest is not None:
                    known.rest.zero_()
                return known
        del self._places[self._count :]
        place = Place(self._buffer, shape, first)
        self._places += [place, None]
        return place

    def _next_filling(self) -> None:
        number = next(n for n, places in enumerate(self._fillings) if places is self._places) + 1
        self.flush()
        if number == len(self._fillings):
            self._fillings.append([None])
        self._places = self._fillings[number]

    def flush(self) -> None:
        """Reduce what has arrived since the last time."""
        last = self._places[self._count - 1] if self._count else None
        if last is None:
            return
        batch, self._batch, self._count = self._batch, Batch(), 0
        self.batches.append(batch)
        try:
            batch.result = self._reduce(self._buffer[: last.end], self.dtype)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on
            batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
