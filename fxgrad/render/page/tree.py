"""What can be opened on the page: modules inside of modules, runs of equal blocks, and parts of what is too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fxgrad.render.boxes import Box, Splitter
from fxgrad.schema import GradientFlow, Node

__all__ = ["Item", "tree_of"]

_LEVEL = 40  # items side by side; more of them are put into parts, so that each layout stays small
_PART = 8  # items that such a part has at least
_CELLS = 96  # cells of one strip

#: A node by its number; one with those that pass its gradient on; or what can be opened: ``{"m": path, "t": type,
#: "c": items}`` for a module call, ``{"r": blocks}`` for a run of equal blocks, ``{"g": items}`` for a part.
Item: TypeAlias = "int | list[int] | dict[str, object]"


def tree_of(flow: GradientFlow) -> list[Item]:
    """The items of the model's own forward, each with what is inside of it."""
    return _Tree(flow).level(flow.nodes, 0)


class _Tree:
    def __init__(self, flow: GradientFlow) -> None:
        self._splitter = Splitter(flow, fold=True)
        self._number = {node.key: place for place, node in enumerate(flow.nodes)}

    def level(self, nodes: Sequence[Node], depth: int) -> list[Item]:
        boxes = self._splitter.folded(self._splitter.split(nodes, depth, into_modules=False))
        return _parts([self._item(box, depth) for box in boxes])

    def _item(self, box: Box, depth: int) -> Item:
        if box.blocks:
            return _run([self._item(block, depth) for block in box.blocks])
        if box.parts:
            return {"g": [self._item(part, depth) for part in box.parts]}
        numbers = [self._number[node.key] for node in box.nodes]
        if not box.path:
            return numbers if len(numbers) > 1 else numbers[0]
        inside = self.level(box.nodes, depth + 1)
        if len(inside) == 1 and isinstance(inside[0], (int, list)):
            return inside[0]  # a frame around a single value tells nothing
        return {"m": box.path, "t": box.type, "c": inside}


def _parts(items: list[Item]) -> list[Item]:
    if len(items) <= _LEVEL:
        return items
    size = max(_PART, -(-len(items) // _LEVEL))
    return _parts([{"g": items[n : n + size]} if len(items) - n > 1 else items[n] for n in range(0, len(items), size)])


def _run(blocks: list[Item]) -> Item:
    if len(blocks) <= _CELLS:
        return {"r": blocks}
    size = -(-len(blocks) // _CELLS)
    parts = [blocks[n : n + size] for n in range(0, len(blocks), size)]
    return _run([{"g": [_run(part)]} if len(part) > 1 else part[0] for part in parts])
