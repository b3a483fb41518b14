"""Comparable pictures of Python state.  What cannot be pictured is never equal to anything, itself included."""

from __future__ import annotations

import enum
import functools
import logging
import re
import types
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

SIMPLE = (
    int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
CONTAINERS = (dict, list, set, deque)
_FIXED = (nn.Module, types.ModuleType, enum.Enum, re.Pattern, logging.Logger, *FUNCTIONS)
_DEPTH = 6
_BUDGET = 2000  # values in one picture; a larger graph of objects would cost more to compare than a trace saves
_BYTES = 4096
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Same:
    """An object by identity.  Not by id(), which another object may get; and without keeping it alive if possible."""

    __slots__ = ("_hold",)

    def __init__(self, value: Any) -> None:
        try:
            self._hold: Any = weakref.ref(value)
        except TypeError:
            self._hold = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._hold()
        return isinstance(other, Same) and mine is not None and mine is other._hold()

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


class Unknown:
    """State that cannot be pictured (iterators, random generators, locks, objects of C): never equal."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


class _Camera:
    def __init__(self) -> None:
        self.left = _BUDGET
        self.complete = True

    def take(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, SIMPLE):
            return (type(value), value)
        if isinstance(value, Same):
            return value
        if isinstance(value, Tensor):
            return Tensor  # read by name at every call
        self.left -= 1
        if depth >= _DEPTH or self.left < 0:
            return self._unknown()
        if isinstance(value, _FIXED):
            return Same(value)
        return self._composed(value, depth + 1)

    def _composed(self, value: Any, depth: int) -> Any:  # noqa: PLR0911  # one return a type
        if isinstance(value, (list, tuple, deque)):
            return (type(value), tuple(self.take(item, depth) for item in value))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(value)) if all(map(_plain, value)) else self._unknown()
        if isinstance(value, dict):
            return (type(value), tuple((self.take(k, depth), self.take(v, depth)) for k, v in value.items()))
        if isinstance(value, types.MethodType):  # made anew at each access
            return (Same(value.__self__), Same(value.__func__))
        if isinstance(value, functools.partial):
            return (type(value), self.take((value.func, value.args, value.keywords), depth))
        if isinstance(value, slice):
            return (slice, self.take((value.start, value.stop, value.step), depth))
        return self._array(value) if type(value).__module__ == "numpy" else self._object(value, depth)

    def _array(self, value: Any) -> Any:
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject or getattr(value, "nbytes", _BYTES + 1) > _BYTES:
            return self._unknown()
        return (type(value), str(dtype), getattr(value, "shape", ()), value.tobytes())

    def _object(self, value: Any, depth: int) -> Any:
        """An object of a plain Python class by its attributes; one with state in C is unknown."""
        kind = type(value)
        base = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
        special = any("__reduce__" in vars(c) or "__reduce_ex__" in vars(c) for c in kind.__mro__ if c is not object)
        if base not in (object, types.SimpleNamespace) or (special and base is object):
            return self._unknown()
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        own = getattr(value, "__dict__", None)
        if own is None and not slots:
            return Same(value) if kind is object else self._unknown()
        held = {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **(own or {})}
        return (Same(value), tuple((name, self.take(item, depth)) for name, item in held.items()))

    def _unknown(self) -> Unknown:
        self.complete = False
        return Unknown()


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _plain(value: Any) -> bool:
    return isinstance(value, SIMPLE)


def snapshot(value: Any) -> Any:
    """A picture of ``value``: simple values by value, containers and plain objects by content, the rest by identity."""
    return _Camera().take(value)


def pictured(value: Any) -> tuple[Any, bool]:
    """The picture, and whether it shows everything."""
    camera = _Camera()
    return camera.take(value), camera.complete
