"""Preallocated device memory for the statistics of one forward call's sites."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fxgrad.record.statistics import FIELDS

Kind = Literal["norm", "norm64", "full"]
BufferKey = tuple[torch.device, Kind]
#: Where one site's statistics are, and the gradient's facts: buffer, shape, dtype.
Reading = tuple[BufferKey, torch.Size, torch.dtype]
_BLOCK = 64  # sites more than expected are added in blocks, so that a graph that grows allocates rarely


class Slots:
    """One slot per site and device; buffers are made at the first use and used again afterwards."""

    def __init__(self) -> None:
        self.buffers: dict[BufferKey, Tensor] = {}
        self._views: dict[BufferKey, tuple[Tensor, ...]] = {}

    def views(self, device: torch.device, kind: Kind, size: int) -> tuple[Tensor, ...]:
        """The slots on ``device``, at least ``size`` of them."""
        views = self._views.get((device, kind), ())
        return views if len(views) >= size else self._grow((device, kind), size)

    def _grow(self, key: BufferKey, size: int) -> tuple[Tensor, ...]:
        device, kind = key
        size = -(-size // _BLOCK) * _BLOCK
        shape = (size, len(FIELDS)) if kind == "full" else (size,)
        dtype = torch.float32 if kind == "norm" else torch.float64
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        old = self.buffers.get(key)
        if old is not None:
            buffer[: old.shape[0]].copy_(old)
        self.buffers[key] = buffer
        self._views[key] = buffer.unbind()
        return self._views[key]
