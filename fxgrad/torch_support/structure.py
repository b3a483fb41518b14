"""Tensors in nested Python values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_DEPTH = 8  # a bound, for structures that contain themselves


def tensors_in(value: Any, position: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tensor, tuple, list, dict or dataclass, with its position in it.

    Python of the user's is not run for it: a subclass is read past what it overrides, and a mapping that is no dict,
    whose values may be made when asked for, is not entered.
    """
    if isinstance(value, Tensor):
        yield position, value
    elif isinstance(value, torch.Size) or depth > _DEPTH:
        return
    elif isinstance(value, (tuple, list)):
        items = tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)
        for index, item in enumerate(items):
            yield from tensors_in(item, f"{position}[{index}]", depth + 1)
    elif isinstance(value, (dict, UserDict)):
        for key, item in dict.items(value if isinstance(value, dict) else value.data):
            yield from tensors_in(item, f"{position}[{key!r}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            with contextlib.suppress(AttributeError):  # a field without a value
                item = object.__getattribute__(value, entry.name)
                yield from tensors_in(item, f"{position}.{entry.name}", depth + 1)
