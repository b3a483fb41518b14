"""A flow taken apart: a prototype, which most steps of a run share, and the numbers of this one step.

The prototype is the flow itself with a zero in place of every measured number, so that it is written, read and checked
by ``fxgrad.store`` like any other flow, and a field that the schema gains needs nothing here.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fxgrad.schema import Edge, GradientFlow, Node, Site

__all__ = ["Column", "Fixed", "Parts", "columns", "filled", "prototype", "split", "taken"]

#: What tells of the program and not of a step: never taken apart.
_FIXED = frozenset({"Node", "BlindSpot", "ModuleCall", "CaptureReport", "Failure", "LossOp", "Consumer"})
#: Whole numbers that are measured, by class; all others are part of the prototype.  ``*``: all.
_COUNTED = {
    "Statistics": ("*",),
    "Activity": ("active", "samples"),
    "EventInfo": ("backward", "forward"),
    "OptimizerFacts": ("step", "skipped", "asked"),
    "StepFacts": ("number", "parameters"),
    "Rewritten": ("*",),
}
#: Tuples whose length is another one in each step.
_RAGGED = {"Activity": ("never",)}

Kind = typing.Literal["fixed", "float", "int", "floats", "ints", "ragged", "record", "records"]
Ragged = list[tuple[int, ...]]
#: By field of a flow: a tuple of records without numbers, and its signature.
Fixed = dict[str, tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Parts:
    """A flow taken apart.

    Attributes:
        signature: equal for flows of one prototype.
        numbers: float64, in the order of the fields.
        ragged: the tuples of another length in each step, in that order.
    """

    signature: tuple[Any, ...]
    numbers: array[float]
    ragged: Ragged


@dataclass(frozen=True, slots=True)
class Column:
    """Where a number of a flow stands: ``("sites", "layer1.0/relu", "statistics.l2_norm")``."""

    part: str
    of: str
    field: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the records of one class are taken apart."""

    fixed: Callable[[Any], Any]
    numbers: Callable[[Any], tuple[Any, ...]]
    inner: Callable[[Any], tuple[Any, ...]]
    nested: tuple[tuple[str, Kind], ...]  # what ``inner`` gives
    kinds: tuple[tuple[str, Kind], ...]  # of all fields, in their order


def split(flow: GradientFlow, fixed: Fixed | None = None) -> Parts:
    """The flow's numbers, and what they are the numbers of.

    ``fixed`` remembers, from one flow to the next, the tuples that hold no numbers and are the same objects again.
    """
    numbers: array[float] = array("d")
    ragged: Ragged = []
    call_graph = _plan(GradientFlow)
    known: Fixed = {} if fixed is None else fixed
    signature: list[Any] = [call_graph.fixed(flow)]
    for value, (name, kind) in zip(call_graph.inner(flow), call_graph.nested, strict=True):
        if kind != "records":
            signature.append(None if value is None else taken(value, numbers, ragged))
            continue
        before = known.get(name)
        if before is None or before[0] is not value:
            count = len(numbers) + len(ragged)
            before = value, tuple([taken(one, numbers, ragged) for one in value])
            if len(numbers) + len(ragged) == count:
                known[name] = before
        signature.append(before[1])
    return Parts(tuple(signature), numbers, ragged)


def prototype(flow: GradientFlow) -> GradientFlow:
    """The flow with a zero in place of every measured number."""
    made: GradientFlow = _filled(flow, itertools.repeat(0.0), itertools.repeat(()))
    return made


def filled(of: GradientFlow, numbers: Iterator[float], ragged: Iterator[tuple[int, ...]]) -> GradientFlow:
    """The flow with this prototype and these numbers.

    Raises:
        StopIteration: there are too few of them.
    """
    made: GradientFlow = _filled(of, numbers, ragged)
    return made


def columns(of: GradientFlow) -> list[Column]:
    """What each number of a flow with this prototype is."""
    found: list[Column] = []
    for part, kind in _plan(GradientFlow).kinds:
        value = getattr(of, part)
        if kind == "records":
            for number, record in enumerate(value):
                found += (Column(part, _label(record, number), name) for name in _names(record))
        elif kind == "record" and value is not None:
            found += (Column(part, "", name) for name in _names(value))
    return found


def _label(record: Any, number: int) -> str:
    if isinstance(record, Site):
        return record.id
    if isinstance(record, Edge):
        return f"{record.producer}{record.output_position} -> {record.consumer.key} {record.consumer.argument}"
    name = getattr(record, "name", None)
    return name if isinstance(name, str) else str(number)


# ---- what a field is --------------------------------------------------------------------------------------------


_PLANS: dict[type, _Plan] = {}


def _plan(kind: type) -> _Plan:
    if kind not in _PLANS:
        _PLANS[kind] = _planned(kind)
    return _PLANS[kind]


def _planned(kind: Any) -> _Plan:
    hints = typing.get_type_hints(kind)
    kinds = tuple((f.name, _kind_of(kind, f.name, hints[f.name])) for f in dataclasses.fields(kind))
    fixed = [name for name, word in kinds if word == "fixed"]
    numbers = [name for name, word in kinds if word in ("float", "int")]
    nested = tuple((name, word) for name, word in kinds if word not in ("fixed", "float", "int"))
    return _Plan(_getter(fixed), _getter(numbers), _getter([name for name, _ in nested]), nested, kinds)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda _: ()
    get = attrgetter(names[0])
    return lambda record: (get(record),)


def _kind_of(kind: type, name: str, hint: Any) -> Kind:
    hint, several = _inner(hint)
    if kind.__name__ in _FIXED:
        return "fixed"
    if name in _RAGGED.get(kind.__name__, ()):
        return "ragged"
    counted = _COUNTED.get(kind.__name__, ())
    if hint is float:
        return "floats" if several else "float"
    if hint is int and ("*" in counted or name in counted):
        return "ints" if several else "int"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and _has_numbers(hint):
        return "records" if several else "record"
    return "fixed"


def _inner(hint: Any) -> tuple[Any, bool]:
    """``X`` of ``X``, ``X | None``, ``tuple[X, ...]`` or ``tuple[X | None, ...]``, and whether there are several."""
    several = False
    while True:
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            rest = [part for part in parts if part is not type(None)]
            if len(rest) != 1:
                return hint, several
            (hint,) = rest
        elif origin is tuple and len(parts) == 2 and parts[1] is Ellipsis and not several:  # noqa: PLR2004
            hint, several = parts[0], True
        else:
            return hint, several


def _has_numbers(kind: type) -> bool:
    return kind is not Node and any(word != "fixed" for _, word in _plan(kind).kinds)


# ---- apart, and together ----------------------------------------------------------------------------------------


def taken(record: Any, numbers: array[float], ragged: Ragged) -> tuple[Any, ...]:
    """The signature of a record; its numbers go to the end of ``numbers``."""
    call_graph = _plan(type(record))
    signature = [call_graph.fixed(record), _put(call_graph.numbers(record), numbers)]
    for value, (_, kind) in zip(call_graph.inner(record), call_graph.nested, strict=True):
        if value is None:
            signature.append(None)
        elif kind == "record":
            signature.append(taken(value, numbers, ragged))
        elif kind == "records":
            signature.append(tuple([taken(one, numbers, ragged) for one in value]))
        elif kind == "ragged":
            ragged.append(value)
        else:
            signature.append((len(value), _put(value, numbers)))
    return tuple(signature)


def _put(values: tuple[Any, ...], numbers: array[float]) -> Any:
    """Append those that are there; which these are, None for all."""
    if None not in values:
        numbers.extend(values)
        return None
    numbers.extend([value for value in values if value is not None])
    return tuple([value is not None for value in values])


def _filled(record: Any, numbers: Iterator[float], ragged: Iterator[tuple[int, ...]]) -> Any:
    call_graph = _plan(type(record))
    made: dict[str, Any] = {}
    for name, kind in call_graph.kinds:  # numbers first, in the order in which they were taken
        if kind in ("float", "int"):
            value = getattr(record, name)
            made[name] = None if value is None else next(numbers) if kind == "float" else int(next(numbers))
    for name, kind in call_graph.nested:
        value = getattr(record, name)
        if value is None:
            continue
        if kind == "record":
            made[name] = _filled(value, numbers, ragged)
        elif kind == "records":
            made[name] = tuple([_filled(one, numbers, ragged) for one in value])  # a generator may not stop so
        elif kind == "ragged":
            made[name] = next(ragged)
        else:
            make = int if kind == "ints" else float
            made[name] = tuple([None if one is None else make(next(numbers)) for one in value])
    return dataclasses.replace(record, **made) if made else record


def _names(record: Any) -> Iterator[str]:
    """What each number of a record is, in order."""
    call_graph = _plan(type(record))
    for name, kind in call_graph.kinds:
        if kind in ("float", "int") and getattr(record, name) is not None:
            yield name
    for name, kind in call_graph.nested:
        value = getattr(record, name)
        if value is None or kind == "ragged":
            continue
        if kind == "record":
            yield from (f"{name}.{inner}" for inner in _names(value))
        elif kind == "records":
            yield from (f"{name}[{n}].{inner}" for n, one in enumerate(value) for inner in _names(one))
        else:
            yield from (f"{name}[{n}]" for n, one in enumerate(value) if one is not None)
