"""One tensor by itself into a slot: by the native library where it is there and takes it, else by plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxgrad.record.histogram import write_histogram
from fxgrad.record.slots import BufferKey, Reading, Slots
from fxgrad.record.staging import LARGEST, STAGED
from fxgrad.record.statistics import ZERO_COUNT, dense, scaled, whole, write_norm


def is_staged(values: Tensor) -> bool:
    """Whether a tensor is small and plain enough for a page, where the library doesn't take it."""
    return (
        values.dtype in STAGED
        and values.numel() <= LARGEST
        and values.device.type == "cpu"
        and values.layout is torch.strided
        and type(values) is Tensor
    )


def write_full(tensor: Tensor, slots: Slots, place: tuple[int, int], library: Any, *, bins: bool = False) -> Reading:
    """Write the scalars of ``tensor`` into the slot at ``place``, its number and how many there are; under ``no_grad``.

    ``bins``: the histogram of exponents as well, into the slot of that kind.

    Raises:
        TypeError: the tensor is of a class with arithmetic of its own (fake, distributed), and so are its scalars.
    """
    index, size = place
    values = tensor if tensor.layout is torch.strided else dense(tensor)
    key: BufferKey = (values.device, "full64" if scaled(values.dtype) else "full")
    slot = slots.views(key, size)[index]
    taken = _taken(values, library)
    if taken is None:
        if bins:
            write_bins(values, slots, place)
        _write_plainly(values, slot)
    elif bins:
        library.histogram_into(taken, slot, slots.views((values.device, "histogram"), size)[index])
    else:
        library.full_into(taken, slot)
    if values is not tensor:  # what is not stored is zero
        slot[ZERO_COUNT] += tensor.numel() - values.numel()
    return key, tensor.shape, tensor.numel(), index


def _taken(values: Tensor, library: Any) -> Tensor | None:
    """The entries as the library takes them, which needs memory without gaps; None where it takes no such tensor."""
    if library is None or library.reducible(values):
        return values if library is not None else None
    if type(values) is not Tensor or not values.dtype.is_floating_point or values.is_contiguous():
        return None
    copy = values.contiguous()
    return copy if library.reducible(copy) else None


def write_bins(values: Tensor, slots: Slots, place: tuple[int, int]) -> BufferKey:
    """Write the histogram of exponents of strided ``values`` by plain torch; into which buffer."""
    index, size = place
    key: BufferKey = (values.device, "histogram")
    write_histogram(values, slots.views(key, size)[index])
    return key


def _write_plainly(values: Tensor, slot: Tensor) -> None:
    result = whole(values)
    if type(result).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it may have no numbers
        message = f"the statistics of a {type(values).__name__} came out as a {type(result).__name__}"
        raise TypeError(message)
    slot.copy_(result)


def write_any_norm(values: Tensor, slot: Tensor, library: Any) -> None:
    """Write the l2 norm of strided ``values`` into the 0-d ``slot`` of dtype ``accumulator(values.dtype)``."""
    if library is not None and library.reducible(values):
        library.norm_into(values, slot)
    else:
        write_norm(values, slot)
