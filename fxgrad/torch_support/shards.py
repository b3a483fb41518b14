"""Tensors that lie on several ranks (``torch.distributed.tensor.DTensor``): what this rank has of them.

Nothing here talks to other ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.schema import Placement

__all__ = ["gathers", "is_fsdp", "is_sharded", "local_part", "placement_of"]

_PLAIN = (Tensor, nn.Parameter)
#: Torch's own Python between a call and the function that it comes to.
_BETWEEN = ("torch._ops", "torch._tensor", "torch.functional", "torch.overrides")
PARTIAL = "each rank has a part of the sum only, and the ranks would have to add them up to measure it"


def _loaded(module: str, name: str) -> Any:
    """A class of torch's that nobody can have an instance of before its module is loaded."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return type(tensor) not in _PLAIN and isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def is_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule"))


def gathers(args: tuple[Any, ...]) -> bool:
    """Whether ``fully_shard`` itself made the call with ``args``: it gathers parameters in hooks of the forward.

    Its casts of inputs carry gradients, and are nodes like any other.
    """
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in args):
        return False
    frame: Any = sys._getframe(2)  # noqa: SLF001  # inspect.stack() reads source files
    while frame.f_globals.get("__name__") in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return "torch.distributed.fsdp." in frame.f_globals.get("__name__", "")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a ``DTensor``, sharing its memory; any other tensor is itself.  Call under ``no_grad``.

    Raises:
        NotImplementedError: a partial sum, of which no norm or count says anything.
    """
    if not is_sharded(tensor):
        return tensor
    held: Any = tensor
    if any(placement.is_partial() for placement in held.placements):
        raise NotImplementedError(PARTIAL)
    local: Tensor = held.to_local()
    return local


def placement_of(tensor: Tensor) -> Placement:
    """How a ``DTensor`` lies on the ranks."""
    held: Any = tensor
    mesh, copy = held.device_mesh, 0
    place = mesh.get_coordinate() or [0] * mesh.ndim
    for dimension, placement in enumerate(held.placements):
        if placement.is_replicate():
            copy = copy * mesh.size(dimension) + place[dimension]
    return Placement(", ".join(map(_words, held.placements)), copy)


def _words(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    return f"Shard({placement.dim})" if hasattr(placement, "dim") else "Partial"
