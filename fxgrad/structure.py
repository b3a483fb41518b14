"""Tensors in nested Python values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_DEPTH = 8  # a bound, for structures that contain themselves


def tensors_in(value: Any, position: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tensor, tuple, list, dict or dataclass, with its position in it."""
    if isinstance(value, Tensor):
        yield position, value
    elif isinstance(value, torch.Size) or depth > _DEPTH:
        return
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{position}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{position}[{key!r}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None), f"{position}.{entry.name}", depth + 1)
