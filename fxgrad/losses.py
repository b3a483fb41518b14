"""Losses by name: ``"mse"``, ``"cross_entropy"`` ... against a random target, in Python and on the command line.

The target is made from the output's shape and a seed: what the gradient does inside the model shows with any target.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.torch_support.structure import tensors_in

__all__ = ["NAMES", "SHORT", "Loss", "named_loss", "offer"]

Loss = Callable[[Any], Tensor]


def _classes(output: Tensor, generator: torch.Generator) -> Tensor:
    """A class number for every position; classes lie along dimension 1, or are the only dimension."""
    dim = min(1, output.ndim - 1)
    shape = output.shape[:dim] + output.shape[dim + 1 :]
    return torch.randint(output.shape[dim], shape, generator=generator)


def _normal(output: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def _bits(output: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, output.shape, generator=generator).to(output.dtype)


_AGAINST: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, torch.Generator], Tensor], str]] = {
    "cross_entropy": (F.cross_entropy, _classes, "random classes along dimension 1"),
    "nll_loss": (F.nll_loss, _classes, "random classes along dimension 1"),
    "mse_loss": (F.mse_loss, _normal, "standard normal values"),
    "l1_loss": (F.l1_loss, _normal, "standard normal values"),
    "smooth_l1_loss": (F.smooth_l1_loss, _normal, "standard normal values"),
    "huber_loss": (F.huber_loss, _normal, "standard normal values"),
    "binary_cross_entropy": (F.binary_cross_entropy, _bits, "random zeros and ones"),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, _bits, "random zeros and ones"),
}

#: The names that are known.
NAMES = ("mean", "sum", *_AGAINST)
#: Short names of some of them.
SHORT: Mapping[str, str] = {name.removesuffix("_loss"): name for name in _AGAINST if name.endswith("_loss")} | {
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy_with_logits",
}


def named_loss(name: str, seed: int = 0) -> Loss:
    """The loss of this name.

    ``sum`` and ``mean`` run over all outputs that can be differentiated, the others over the first of them.

    Raises:
        OptionError: there is none.
    """
    whole = SHORT.get(name, name)
    if whole in ("sum", "mean"):
        return _reduction(whole)
    if whole not in _AGAINST:
        message = f"loss={name!r} is not a known loss. {offer(name)} Your own is a function of the model's output"
        raise OptionError(message)
    return _against_random(whole, seed)


def offer(name: str) -> str:
    """Near names, or all of them."""
    near = difflib.get_close_matches(name, [*NAMES, *SHORT])
    return f"Did you mean {' or '.join(near)}?" if near else f"The names are {', '.join(NAMES)}."


def _differentiable(output: Any) -> list[Tensor]:
    found = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    if not found:
        message = (
            "the output has no tensor that requires a gradient: all parameters are frozen, the output is detached or "
            "of integers, or the model ran under no_grad"
        )
        raise ValueError(message)
    return found


def _reduction(name: str) -> Loss:
    def loss(output: Any) -> Tensor:
        tensors = _differentiable(output)
        total = sum((t.sum().to(tensors[0].device) for t in tensors), start=tensors[0].new_zeros(()))
        return total / sum(t.numel() for t in tensors) if name == "mean" else total

    loss.__qualname__ = f"the {name} over all outputs"
    return loss


def _against_random(name: str, seed: int) -> Loss:
    function, make_target, words = _AGAINST[name]

    def loss(output: Any) -> Tensor:
        first = _differentiable(output)[0]
        target = make_target(first, torch.Generator().manual_seed(seed))
        return function(first, target.to(first.device))

    loss.__qualname__ = f"{name} of the first output against {words}, seed {seed}"
    return loss
