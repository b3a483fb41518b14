"""Records as the values that JSON knows, and back: NaN and Inf are spelled, types are checked on reading."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fxgrad.schema import Node, Site

__all__ = ["DamageError", "flow_plain", "from_plain", "plain"]

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_Reader = Callable[[Any], Any]


class DamageError(ValueError):
    """What is wrong with the content, in words; ``where`` says at which place."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = where

    def __str__(self) -> str:
        """The place and the problem."""
        return f"{self.where} {self.problem}".strip()

    def under(self, place: str) -> None:
        """It lies in ``place``."""
        self.where = place + self.where


# ---- writing -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """JSON values of a record: dataclasses as objects, tuples as lists, NaN and Inf spelled."""
    return flow_plain(value, {})


def flow_plain(value: Any, index: dict[Node, int]) -> Any:
    """The same; a site's node is written as its number among the nodes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = {f.name: flow_plain(getattr(value, f.name), index) for f in dataclasses.fields(value)}
        if isinstance(value, Site):
            result["node"] = index[value.node]
        return result
    if isinstance(value, Mapping):
        return {str(name): flow_plain(item, index) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [flow_plain(item, index) for item in value]
    return value


# ---- reading -------------------------------------------------------------------------------------------------------


def from_plain(kind: Any, value: Any, where: str = "") -> Any:
    """``value`` as ``kind``, checked all the way down; ``where`` names it in errors.

    Raises:
        DamageError: it is no such thing.
    """
    try:
        return _reader(kind)(value)
    except DamageError as error:
        error.under(where)
        raise


@functools.cache
def _reader(kind: Any) -> _Reader:
    """What reads values of one kind: made once, as a flow has thousands of them."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional(_reader(next(part for part in parts if part is not type(None))))
    if origin is typing.Literal:
        return _word(parts)
    if origin is tuple:
        several = len(parts) == 2 and parts[1] is Ellipsis  # noqa: PLR2004  # tuple[X, ...]
        return _list(_reader(parts[0])) if several else _row(tuple(map(_reader, parts)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _names(_reader(parts[1]))
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    return _float if kind is float else _simple(kind)


def _optional(read: _Reader) -> _Reader:
    return lambda value: None if value is None else read(value)


def _word(words: tuple[Any, ...]) -> _Reader:
    def read(value: Any) -> Any:
        if value not in words:
            message = f"is {value!r}, which is none of {', '.join(map(repr, words))}"
            raise DamageError(message)
        return value

    return read


def _simple(kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            message = f"is {value!r}, but must be of type {kind.__name__}"
            raise DamageError(message)
        return value

    return read


def _list(one: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value  # read before
        made: list[Any] = []
        try:
            for item in _checked_list(value):
                made.append(one(item))  # noqa: PERF401  # its length says which one is damaged
        except DamageError as error:
            if isinstance(value, list):
                error.under(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _row(readers: tuple[_Reader, ...]) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value  # read before
        if len(_checked_list(value)) != len(readers):
            message = f"has {len(value)} entries, but must have {len(readers)}"
            raise DamageError(message)
        made: list[Any] = []
        try:
            for one, item in zip(readers, value, strict=True):
                made.append(one(item))
        except DamageError as error:
            error.under(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        message = f"is {value!r}, but must be a list"
        raise DamageError(message)
    return value


def _names(one: _Reader) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            message = f"is {value!r}, but must be an object"
            raise DamageError(message)
        made = {}
        for name, item in value.items():
            try:
                made[name] = one(item)
            except DamageError as error:
                error.under(f"[{name!r}]")
                raise
        return made

    return read


def _record(kind: Any) -> _Reader:
    readers: dict[str, _Reader] = {}

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value  # read before
        if not isinstance(value, dict):
            message = f"is {value!r}, but must be an object"
            raise DamageError(message)
        if not readers:  # at the first use: a record may hold records of its own kind
            hints = typing.get_type_hints(kind)
            readers.update({f.name: _reader(hints[f.name]) for f in dataclasses.fields(kind)})
        if value.keys() != readers.keys():
            odd = ", ".join(sorted(readers.keys() ^ value.keys()))
            message = f"lacks fields or has unknown ones ({odd})"
            raise DamageError(message)
        made: dict[str, Any] = {}
        name = ""
        try:
            for name, item in value.items():
                made[name] = readers[name](item)
        except DamageError as error:
            error.under(f".{name}")
            raise
        return kind(**made)

    return read


def _float(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str) and value in _SPELLED:
        return _SPELLED[value]
    if type(value) not in (int, float):
        message = f"is {value!r}, but must be a number"
        raise DamageError(message)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):  # 1e999, or an integer of hundreds of digits
        message = "is beyond the range of a number"
        raise DamageError(message)
    return number
