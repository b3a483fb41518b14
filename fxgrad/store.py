"""Flows as versioned, strict JSON: NaN and Inf are spelled, types are checked on reading, files are written whole."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxgrad.errors import FlowFileError, OptionError
from fxgrad.plain import DamageError, flow_plain, from_plain, plain
from fxgrad.schema import GradientFlow, Node
from fxgrad.schema.ranks import path_here

FORMAT = "fxgrad-flow"
VERSION = 5  # 5: what a flow says of ranks
SERIES_FORMAT = "fxgrad-series"


def to_json(flow: GradientFlow, path: str | Path | None = None) -> str:
    """The flow as JSON text; written to ``path`` as well if that is given.

    Raises:
        FlowFileError: the file cannot be written.
    """
    index = {node: number for number, node in enumerate(flow.nodes)}
    text = strict_json({"format": FORMAT, "version": VERSION, "flow": flow_plain(flow, index)})
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
        return flow_of_plain(content.get("flow"))
    except DamageError as error:
        message = f"{where} is damaged: {error}. Write it again with flow.to_json(path)."
        raise FlowFileError(message) from error


def save_series(flows: Iterable[GradientFlow], path: str | Path) -> None:
    """Write several flows of one model (``watch.history``), oldest first, into one file; equal nodes are shared.

    Reduced flows are written by rank 0 alone.

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
    if path_here(series[-1].ranks, path) is None:
        return
    shared: dict[Node, int] = {}
    written = []
    for flow in series:
        own = {node: number for number, node in enumerate(flow.nodes)}
        numbers = [shared.setdefault(node, len(shared)) for node in flow.nodes]
        written.append(flow_plain(flow, own) | {"nodes": numbers})
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
            return (flow_of_plain(content.get("flow")),)
        return _read_series(content)
    except DamageError as error:
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


# ---- reading -------------------------------------------------------------------------------------------------------


def _refuse_constant(word: str) -> Any:
    message = f"{word} must be spelled as text"
    raise ValueError(message)


def _read_series(content: dict[str, Any]) -> tuple[GradientFlow, ...]:
    shared = from_plain(tuple[Node, ...], content.get("nodes"), "nodes")
    written = content.get("flows")
    if not isinstance(written, list) or not written:
        message = "it holds no flows"
        raise DamageError(message)
    found = []
    for number, flow in enumerate(written):
        if not isinstance(flow, dict):
            message = f"flows[{number}] is no flow"
            raise DamageError(message)
        places = from_plain(tuple[int, ...], flow.get("nodes"), f"flows[{number}].nodes")
        if not all(0 <= place < len(shared) for place in places):
            message = f"flows[{number}] has a node that is not there"
            raise DamageError(message)
        found.append(flow_of_plain({**flow, "nodes": tuple(shared[place] for place in places)}))
    return tuple(found)


def flow_of_plain(content: Any) -> GradientFlow:
    """The flow that ``flow_plain`` gave ``content`` of, checked all the way down.

    Raises:
        ValueError: it is damaged.
    """
    if not isinstance(content, dict):
        message = "it holds no flow"
        raise DamageError(message)
    nodes = from_plain(tuple[Node, ...], content.get("nodes"), "nodes")
    sites = content.get("sites")
    if not isinstance(sites, list):
        message = "sites are missing"
        raise DamageError(message)
    filled = []
    for number, site in enumerate(sites):
        at = site.get("node") if isinstance(site, dict) else None
        if type(at) is not int or not 0 <= at < len(nodes):
            message = f"sites[{number}] belongs to no node"
            raise DamageError(message)
        filled.append({**site, "node": nodes[at]})
    flow: GradientFlow = from_plain(GradientFlow, {**content, "nodes": nodes, "sites": filled}, "flow")
    _check_references(flow)
    return flow


def _check_references(flow: GradientFlow) -> None:
    keys = {node.key for node in flow.nodes}
    if len(keys) != len(flow.nodes):
        message = "two nodes have one key"
        raise DamageError(message)
    named = [*((e.producer, "an edge") for e in flow.edges), *((e.consumer.key, "an edge") for e in flow.edges)]
    named += [(spot.key, "a blind spot") for spot in flow.blind_spots]
    for key, what in named:
        if key not in keys:
            message = f"{what} names the unknown node {key!r}"
            raise DamageError(message)
