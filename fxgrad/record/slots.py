"""Preallocated device memory for the statistics of one forward call's sites."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from fxgrad.record.statistics import COLUMNS
from fxgrad.schema.histogram import BINS

#: What a slot holds: a norm, the square of one, or a column of scalars (``full64``: squares scaled by the largest).
Kind = Literal["norm", "norm64", "square", "full", "full64", "histogram"]
BufferKey = tuple[torch.device, Kind]
#: Where one site's statistics are, and the gradient's facts: buffer (or batch), shape, number of entries, place in it.
Reading = tuple[Any, torch.Size, int, Any]
_BLOCK = 64  # sites more than expected are added in blocks, so that a graph that grows allocates rarely


class Slots:
    """One slot per site and device; buffers are made at the first use and used again afterwards.

    Attributes:
        buffers: the memory, by device and kind.
        usual: the buffer that most gradients go to, the first that one plain call could write.
        usual_dtype: the dtype of those gradients.
        unusual: sites whose latest gradient cannot be written into ``usual`` by one plain call.
        impatient: sites whose gradients are not to wait for others, since somebody changes them; shared by the slots of
            all events.
    """

    def __init__(self, impatient: set[int] | None = None) -> None:
        self.buffers: dict[BufferKey, Tensor] = {}
        self.usual: BufferKey | None = None
        self.usual_dtype: torch.dtype | None = None
        self.unusual: set[int] = set()
        self.impatient: set[int] = set() if impatient is None else impatient
        self._views: dict[BufferKey, tuple[Tensor, ...]] = {}
        self._expected: list[Tensor | None] = []

    def views(self, key: BufferKey, size: int) -> tuple[Tensor, ...]:
        """The slots of one device and kind, at least ``size`` of them."""
        views = self._views.get(key, ())
        return views if len(views) >= size else self._grow(key, size)

    def _grow(self, key: BufferKey, size: int) -> tuple[Tensor, ...]:
        device, kind = key
        size = -(-size // _BLOCK) * _BLOCK
        width = {"full": len(COLUMNS), "full64": len(COLUMNS), "histogram": BINS}.get(kind)
        shape = (size, width) if width is not None else (size,)
        dtype = torch.float32 if kind in ("norm", "square") else torch.float64
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        old = self.buffers.get(key)
        if old is not None:
            buffer[: old.shape[0]].copy_(old)
        self.buffers[key] = buffer
        self._views[key] = buffer.unbind()
        self._expected = []
        return self._views[key]

    def learn(self, index: int, key: BufferKey, dtype: torch.dtype | None) -> None:
        """Note whether the gradient of site ``index``, which went to ``key``, can be written by one plain call.

        ``dtype`` is the gradient's, None where it is not strided.
        """
        if self.usual is None and key[1] in ("norm", "full") and dtype is not None and dtype.is_floating_point:
            self.usual, self.usual_dtype = key, dtype
        if key == self.usual and dtype is self.usual_dtype:
            if index in self.unusual:
                self.unusual.discard(index)
                self._expected = []
        elif index not in self.unusual:
            self.unusual.add(index)
            self._expected = []

    def expected(self, usual: BufferKey, size: int, barred: Collection[int]) -> list[Tensor | None]:
        """The slots of ``size`` sites, None for those that are barred or unusual, and a None behind the last."""
        if len(self._expected) != size + 1:
            views = self.views(usual, size)
            self._expected = [*(None if n in self.unusual else views[n] for n in range(size)), None]
        slots = list(self._expected)
        for index in barred:
            if index < size:
                slots[index] = None
        return slots
