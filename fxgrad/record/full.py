"""Level ``full`` for one tensor: what is staged in a page, and what is reduced by itself into a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.record.kernels import kernels
from fxgrad.record.slots import BufferKey, Reading, Slots
from fxgrad.record.staging import LARGEST, STAGED
from fxgrad.record.statistics import ZERO_COUNT, dense, scaled


def is_staged(values: Tensor) -> bool:
    """Whether a tensor is small and plain enough for a page."""
    return (
        values.dtype in STAGED
        and values.numel() <= LARGEST
        and values.device.type == "cpu"
        and values.layout is torch.strided
        and type(values) is Tensor
    )


def write_full(tensor: Tensor, slots: Slots, index: int, size: int) -> Reading:
    """Write the scalars of ``tensor`` into slot ``index`` of ``size``; call under ``no_grad``.

    Raises:
        TypeError: the tensor is of a class with arithmetic of its own (fake, distributed), and so are its scalars.
    """
    values = tensor if tensor.layout is torch.strided else dense(tensor)
    result = kernels.whole(values)
    if type(result).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it may have no numbers
        message = f"the statistics of a {type(tensor).__name__} came out as a {type(result).__name__}"
        raise TypeError(message)
    key: BufferKey = (values.device, "full64" if scaled(values.dtype) else "full")
    slot = slots.views(key, size)[index]
    slot.copy_(result)
    if values is not tensor:  # what is not stored is zero
        slot[ZERO_COUNT] += tensor.numel() - values.numel()
    return key, tensor.shape, tensor.numel(), index
