"""Edited graphs in a form that can be copied and pickled: nodes by number, with our facts on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxgrad.capture.containers import Rebuild
from fxgrad.capture.symbolic import Span
from fxgrad.handles.graphs import Kind


@dataclass(frozen=True, slots=True)
class At:
    """A node among the arguments of another, by its place in the graph."""

    place: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A graph for one kind of call.

    Attributes:
        key: what the graph depends on.
        modes: which modules were training, by path.
        example: arguments of this kind, without numbers.
        spans: the calls of inlined modules.
        rebuild: gives results their container types.
        nodes: op, target, arguments, keyword arguments, name and our facts of each.
    """

    key: Any
    modes: dict[str, bool]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    spans: tuple[Span, ...]
    rebuild: Rebuild
    nodes: tuple[tuple[str, Any, Any, Any, str, Any], ...]


def pack(kind: Kind) -> Packed:
    """What a copy needs of a graph."""
    place: dict[Any, Any] = {node: At(number) for number, node in enumerate(kind.graph.nodes)}
    nodes = tuple(
        (
            node.op, node.target, fx.node.map_arg(node.args, place.__getitem__),
            fx.node.map_arg(node.kwargs, place.__getitem__), node.name, node.meta.get("fxgrad"),
        )
        for node in kind.graph.nodes
    )  # fmt: skip
    return Packed(kind.key, dict(kind.modes), kind.example, tuple(kind.spans), kind.rebuild, nodes)


def unpack(packed: Packed) -> Kind:
    """The graph again, as one that was edited."""
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, target, args, kwargs, name, facts in packed.nodes:
        node = graph.create_node(op, target, _filled(args, made), _filled(kwargs, made), name=name)
        if facts is not None:
            node.meta["fxgrad"] = facts
        made.append(node)
    graph.lint()
    kind = Kind(packed.key, packed.modes, packed.example, graph, list(packed.spans), packed.rebuild)
    kind.edited = True
    return kind


def _filled(value: Any, made: list[fx.Node]) -> Any:
    """Arguments with the nodes for their places."""
    if isinstance(value, At):
        return made[value.place]
    if isinstance(value, (tuple, list)):
        items = [_filled(item, made) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _filled(item, made) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_filled(value.start, made), _filled(value.stop, made), _filled(value.step, made))
    return value
