"""The probe of the function engine: an identity whose backward sends a statistic to a slot.

Nothing here has a side effect, so that ``torch.compile`` takes it whole and fuses the reduction with the kernels of
the backward pass.  A *slot* is one element of a small leaf tensor that a run brings along; the statistic is that
element's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: What a slot holds instead of a sum of exactly 0, because an empty slot means that no gradient came.
ZERO = -1.0


class Identity(torch.autograd.Function):
    """Forward: the value.  Backward: the gradient, and the sum of its squared moduli as the gradient of the slot."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slot: Tensor) -> Tensor:
        """A view of all of ``value``."""
        ctx.set_materialize_grads(False)  # an undefined gradient stays undefined: zeros would reach the parameters
        ctx.slot_dtype = slot.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The gradient as it came, and its statistic."""
        if gradient is None:
            return None, None
        return gradient, statistic(gradient.detach(), ctx.slot_dtype)


def statistic(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of squared moduli, accumulated in float32 (float64 for doubles); ``ZERO`` for a sum of 0.  0-d."""
    values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    total = values.to(torch.float64 if values.dtype is torch.float64 else torch.float32).square().sum()
    return torch.where(total == 0, ZERO, total).to(dtype)


def unbind(slots: Tensor) -> tuple[Tensor, ...]:
    """The slots one by one."""
    return slots.unbind()


def probe(value: Tensor, slots: tuple[Tensor, ...], index: int) -> Tensor:
    """The node that the pass inserts; the value itself where it can have no gradient."""
    if value.requires_grad and torch.is_grad_enabled():
        result: Tensor = Identity.apply(value, slots[index].to(value.device))
        return result
    return value


def probe_each(value: Any, slots: tuple[Tensor, ...], indices: tuple[int, ...]) -> Any:
    """The same for a tuple or list of tensors, nested too; ``indices`` in order, -1 for a tensor without a slot."""
    rest = list(indices)

    def fill(item: Any) -> Any:
        if isinstance(item, Tensor):
            index = rest.pop(0)
            return item if index < 0 else probe(item, slots, index)
        if isinstance(item, tuple):
            return tuple([fill(part) for part in item])
        return [fill(part) for part in item] if isinstance(item, list) else item

    return fill(value)


def fresh(value: Tensor) -> Tensor:
    """A copy for an in-place op to change, since an autograd function's output must not be changed.

    Without a compiler, what autograd saved of the value is marked as changed, so that an error in the model's own
    backward pass stays an error.
    """
    copy = value.clone()
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(value)  # behind the copy: torch refuses to read the value afterwards
    return copy


def copied(value: Tensor) -> Tensor:
    """The same for a compiler that makes every graph functional, with or without us."""
    return value.clone()
