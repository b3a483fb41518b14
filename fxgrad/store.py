"""Flows as versioned, strict JSON: NaN and Inf are spelled, types are checked on reading, files are written whole."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import secrets
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fxgrad.errors import FlowFileError, OptionError
from fxgrad.schema import GradientFlow, Node, Site

FORMAT = "fxgrad-flow"
Kind = TypeVar("Kind")
VERSION = 5  # 5: what a flow says of ranks
SERIES_FORMAT = "fxgrad-series"
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(flow: GradientFlow, path: str | Path | None = None) -> str:
    """The flow as JSON text; written to ``path`` as well if that is given.

    Raises:
        FlowFileError: the file cannot be written.
    """
    index = {node: number for number, node in enumerate(flow.nodes)}
    text = strict_json({"format": FORMAT, "version": VERSION, "flow": _plain(flow, index)})
    if path is not None:
        write_whole(Path(path), text)
    return text


def strict_json(content: Any, indent: int | None = None) -> str:
    """JSON text of ``content``, whose NaN and Inf must be spelled already (see ``plain``)."""
    separators = (",", ":") if indent is None else (",", ": ")
    # ASCII, since a file name that is no valid text (a lone surrogate in Python) cannot be written as UTF-8.
    return json.dumps(content, allow_nan=False, ensure_ascii=True, indent=indent, separators=separators) + "\n"


def load(path: str | Path) -> GradientFlow:
    """Read a flow that ``to_json`` wrote.

    Raises:
        FlowFileError: the file is missing, damaged, not a flow, or from a newer version.
    """
    return from_json(_text_of(path), str(path))


def from_json(text: str, where: str = "the text") -> GradientFlow:
    """The flow in ``text``; ``where`` names its origin in errors.

    Raises:
        FlowFileError: the text is damaged, not a flow, or from a newer version.
    """
    content = _parsed(text, where)
    if content.get("format") == SERIES_FORMAT:
        message = f"{where} is a series of flows and no single flow. Read it with fxgrad.load_series(path)."
        raise FlowFileError(message)
    _check_version(content, where)
    try:
        return _read_flow(content.get("flow"))
    except _DamageError as error:
        message = f"{where} is damaged: {error}. Write it again with flow.to_json(path)."
        raise FlowFileError(message) from error


def save_series(flows: Iterable[GradientFlow], path: str | Path) -> None:
    """Write several flows of one model (``watch.history``), oldest first, into one file; equal nodes are shared.

    Raises:
        OptionError: there is no flow, or something else among them.
        FlowFileError: the file cannot be written.
    """
    series = tuple(flows) if isinstance(flows, Iterable) and not isinstance(flows, GradientFlow) else (flows,)
    odd = [type(one).__name__ for one in series if not isinstance(one, GradientFlow)]
    if odd or not series:
        found = f"a {odd[0]} among them" if odd else "nothing"
        message = f"save_series takes flows, such as watch.history, but was given {found}"
        raise OptionError(message)
    shared: dict[Node, int] = {}
    written = []
    for flow in series:
        own = {node: number for number, node in enumerate(flow.nodes)}
        numbers = [shared.setdefault(node, len(shared)) for node in flow.nodes]
        written.append(_plain(flow, own) | {"nodes": numbers})
    content = {
        "format": SERIES_FORMAT,
        "version": VERSION,
        "nodes": [plain(node) for node in shared],
        "flows": written,
    }
    write_whole(Path(path), strict_json(content))


def load_series(path: str | Path) -> tuple[GradientFlow, ...]:
    """Read what ``save_series`` wrote, or the single flow that ``to_json`` wrote.

    Raises:
        FlowFileError: the file is missing, damaged, neither of the two, or from a newer version.
    """
    where = str(path)
    text = _text_of(path)
    content = _parsed(text, where)
    _check_version(content, where)
    try:
        if content["format"] == FORMAT:
            return (_read_flow(content.get("flow")),)
        return _read_series(content)
    except _DamageError as error:
        message = f"{where} is damaged: {error}. Write it again with fxgrad.save_series(flows, path)."
        raise FlowFileError(message) from error


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that no system takes
        message = f"{path} cannot be read as a flow: {error}. Give the path of a file that flow.to_json(path) wrote."
        raise FlowFileError(message) from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    """The outermost object of a flow's or series' file."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        message = f"{where} is no flow: it is not valid JSON ({error}). Write it again with flow.to_json(path)."
        raise FlowFileError(message) from error
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, SERIES_FORMAT):
        message = f"{where} is no flow: its format is not {FORMAT!r}. Flows are written by flow.to_json(path)."
        raise FlowFileError(message)
    return content


def _check_version(content: dict[str, Any], where: str) -> None:
    version = content.get("version")
    if type(version) is not int or version < 1:
        message = f"{where} is damaged: its version is {version!r}. Write it again with flow.to_json(path)."
        raise FlowFileError(message)
    if version < VERSION:
        message = (
            f"{where} has version {version}, from before the first release. Write it again with flow.to_json(path)."
        )
        raise FlowFileError(message)
    if version > VERSION:
        message = f"{where} has version {version}, newer than {VERSION}, which this fxgrad reads. Upgrade fxgrad."
        raise FlowFileError(message)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that at no time a part of it is there; a link is followed to the file that it names.

    Raises:
        FlowFileError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="\n")  # a pipe or device is written to, never replaced
        else:
            _replace(path.resolve(), text.encode())
    except (OSError, ValueError) as error:  # ValueError: what UTF-8 cannot say, or a path that no system takes
        message = f"{path} cannot be written: {error}. Name another place, or make its folder first."
        raise FlowFileError(message) from error


def _replace(path: Path, content: bytes) -> None:
    # Opened here and not by tempfile, whose files nobody but their owner may read.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        os.replace(temporary, path)  # noqa: PTH105  # the atomic call itself
    finally:
        temporary.unlink(missing_ok=True)


# ---- writing -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """JSON values of a record: dataclasses as objects, tuples as lists, NaN and Inf spelled."""
    return _plain(value, {})


def _plain(value: Any, index: dict[Node, int]) -> Any:
    """JSON values; a site's node is written as its number among the nodes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = {f.name: _plain(getattr(value, f.name), index) for f in dataclasses.fields(value)}
        if isinstance(value, Site):
            result["node"] = index[value.node]
        return result
    if isinstance(value, Mapping):
        return {str(name): _plain(item, index) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item, index) for item in value]
    return value


# ---- reading -------------------------------------------------------------------------------------------------------


class _DamageError(Exception):
    """What is wrong with the content, in words."""


def _refuse_constant(word: str) -> Any:
    message = f"{word} must be spelled as text"
    raise ValueError(message)


def _read_series(content: dict[str, Any]) -> tuple[GradientFlow, ...]:
    shared = _read(tuple[Node, ...], content.get("nodes"), "nodes")
    written = content.get("flows")
    if not isinstance(written, list) or not written:
        message = "it holds no flows"
        raise _DamageError(message)
    found = []
    for number, flow in enumerate(written):
        if not isinstance(flow, dict):
            message = f"flows[{number}] is no flow"
            raise _DamageError(message)
        places = _read(tuple[int, ...], flow.get("nodes"), f"flows[{number}].nodes")
        if not all(0 <= place < len(shared) for place in places):
            message = f"flows[{number}] has a node that is not there"
            raise _DamageError(message)
        found.append(_read_flow({**flow, "nodes": tuple(shared[place] for place in places)}))
    return tuple(found)


def _read_flow(content: Any) -> GradientFlow:
    if not isinstance(content, dict):
        message = "it holds no flow"
        raise _DamageError(message)
    nodes = _read(tuple[Node, ...], content.get("nodes"), "nodes")
    sites = content.get("sites")
    if not isinstance(sites, list):
        message = "sites are missing"
        raise _DamageError(message)
    filled = []
    for number, site in enumerate(sites):
        at = site.get("node") if isinstance(site, dict) else None
        if type(at) is not int or not 0 <= at < len(nodes):
            message = f"sites[{number}] belongs to no node"
            raise _DamageError(message)
        filled.append({**site, "node": nodes[at]})
    flow: GradientFlow = _read(GradientFlow, {**content, "nodes": nodes, "sites": filled}, "flow")
    _check_references(flow)
    return flow


def _check_references(flow: GradientFlow) -> None:
    keys = {node.key for node in flow.nodes}
    if len(keys) != len(flow.nodes):
        message = "two nodes have one key"
        raise _DamageError(message)
    named = [*((e.producer, "an edge") for e in flow.edges), *((e.consumer.key, "an edge") for e in flow.edges)]
    named += [(spot.key, "a blind spot") for spot in flow.blind_spots]
    for key, what in named:
        if key not in keys:
            message = f"{what} names the unknown node {key!r}"
            raise _DamageError(message)


def read_as(kind: type[Kind], value: Any, where: str) -> Kind:
    """What ``plain`` gave of a dataclass, as one again; ``where`` names its origin in errors.

    Raises:
        FlowFileError: something is missing, or of another type.
    """
    try:
        found: Kind = _read(kind, value, where)
    except _DamageError as error:
        raise FlowFileError(str(error)) from error
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, checked all the way down."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(parts, value, where)
    if origin is typing.Literal:
        if value not in parts:
            message = f"{where} is {value!r}, which is none of {', '.join(map(repr, parts))}"
            raise _DamageError(message)
        return value
    if origin is tuple:
        return _read_tuple(parts, value, where)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if kind is float:
        return _read_float(value, where)
    if type(value) is not kind:
        message = f"{where} is {value!r}, but must be of type {kind.__name__}"
        raise _DamageError(message)
    return value


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    (kind,) = (k for k in kinds if k is not type(None))
    return _read(kind, value, where)


def _read_tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value  # read before
    if not isinstance(value, list):
        message = f"{where} is {value!r}, but must be a list"
        raise _DamageError(message)
    if len(parts) == 2 and parts[1] is Ellipsis:  # noqa: PLR2004  # tuple[X, ...]
        return tuple(_read(parts[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if len(parts) != len(value):
        message = f"{where} has {len(value)} entries, but must have {len(parts)}"
        raise _DamageError(message)
    return tuple(_read(part, item, f"{where}[{n}]") for n, (part, item) in enumerate(zip(parts, value, strict=True)))


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value  # read before
    if not isinstance(value, dict):
        message = f"{where} is {value!r}, but must be an object"
        raise _DamageError(message)
    hints = _hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}
    if names != value.keys():
        odd = ", ".join(sorted(names ^ value.keys()))
        message = f"{where} lacks fields or has unknown ones ({odd})"
        raise _DamageError(message)
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_float(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _SPELLED:
        return _SPELLED[value]
    if type(value) not in (int, float):
        message = f"{where} is {value!r}, but must be a number"
        raise _DamageError(message)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):  # 1e999, or an integer of hundreds of digits
        message = f"{where} is beyond the range of a number"
        raise _DamageError(message)
    return number
