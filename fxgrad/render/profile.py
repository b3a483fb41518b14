"""The profile: a line for each block of a model, with little bars in the colours of the scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from fxgrad.render.boxes import Box, boxes_of, grouped
from fxgrad.render.cards import Card, Cell, make_card, worst_of
from fxgrad.render.labels import Labels
from fxgrad.render.marks import Marks
from fxgrad.render.palette import mixed, text_colour
from fxgrad.render.scale import Size, scale_of
from fxgrad.render.words import number, printable
from fxgrad.schema import Finding, GradientFlow, NormWord

__all__ = ["LINES", "bar_of", "profile", "short_middle", "thinned"]

LINES = 25  # at most
_WIDE = 66  # columns from which a line says what its block is
_KIND, _KIND_LEAST = 24, 8  # columns for that
_NAME = 28  # columns for names that are kept before those for kinds
_SHADE = 0.2  # of the ink that would read on a colour, in the bar on it
_VALUES = 19
_NARROW_VALUES = 9
_SIGNS = {"zero": "0", "nonfinite": "!", "outside_range": "?", "not_measured": "-", "measured": "?"}
_SPECIAL = {"zero": "bold reverse", "nonfinite": "bold white on red", "outside_range": "reverse", "not_measured": "dim"}


@dataclass(frozen=True, slots=True)
class _Row:
    """A line before it is fitted: the finding's number, name, kind, values, and the cells of its bars."""

    mark: str
    name: str
    kind: str
    values: str
    short: str
    cells: tuple[Cell, ...]


def profile(flow: GradientFlow, findings: Sequence[Finding], width: int, norm: NormWord = "l2_norm") -> list[Text]:
    """At most ``LINES`` lines in forward order, none of them wider than ``width`` columns.

    Values that have no gradient since they need none are left out.
    """
    size = scale_of(flow, norm)
    boxes, _ = boxes_of(flow, None, fold=True, readable=LINES + 2)
    blind = {spot.key for spot in flow.blind_spots if spot.reason in ("no_grad_required", "integer", "no_grad_region")}
    blind |= {node.key for node in flow.nodes if node.op == "output"}
    kept = [box for box in boxes if any(node.key not in blind for node in box.all_nodes)]
    kept = grouped(kept, LINES)
    number_of = {node.key: n for n, box in enumerate(kept) for node in box.all_nodes}
    marks, labels = Marks(flow, findings, kept, number_of), Labels(flow, norm)
    cards = [make_card(box, n, labels, marks, size) for n, box in enumerate(kept)]
    return _fitted([_row(card, box, labels.words(box)) for card, box in zip(cards, kept, strict=True)], size, width)


def _row(card: Card, box: Box, words: str) -> _Row:
    mark = ",".join(map(str, card.findings))
    if not card.cells:
        cell = Cell(box.name, card.look, card.value, words)
        value = number(card.value) if card.look == "measured" else words
        module = not box.single or box.nodes[0].op == "call_module"  # a function's name says what it is
        return _Row(mark, box.name, box.kind if module else "", value, value, (cell,))
    first, last = card.cells[0].words, card.cells[-1].words
    return _Row(mark, card.name, card.lines[0], f"{first} … {last}", worst_of(card.cells, Size()).words, card.cells)


def _fitted(rows: list[_Row], size: Size, width: int) -> list[Text]:
    if not rows:
        return []
    wide = width >= _WIDE
    mark = max(len(row.mark) for row in rows)
    mark += 2 if mark else 0
    values = [row.values if wide else row.short for row in rows]
    value = min(max(map(len, values)), _VALUES if wide else _NARROW_VALUES)
    bars = min(max(len(row.cells) for row in rows), max(6, width // 3))
    longest = max(len(row.name) for row in rows)
    room = width - mark - value - bars - 2
    kind = min(max(len(row.kind) for row in rows), _KIND, room - min(longest, _NAME) - 1) if wide else 0
    kind = kind if kind >= _KIND_LEAST else 0
    name = max(8, min(longest, room - (kind + 1 if kind else 0)))
    lines = []
    for row, words in zip(rows, values, strict=True):
        line = Text(no_wrap=True, overflow="crop")
        if mark:
            line.append((f"{row.mark}>" if row.mark else "").ljust(mark), "bold magenta")
        line.append(short_middle(printable(row.name), name).ljust(name + 1), "bold" if row.mark else "")
        if kind:
            line.append(short_middle(printable(row.kind), kind).ljust(kind + 1), "dim")
        line.append(short_middle(words, value).rjust(value) + " ")
        for cell in thinned(row.cells, bars, size):
            line.append(*bar_of(cell, size))
        lines.append(line)
    return lines


def bar_of(cell: Cell, size: Size) -> tuple[str, str]:
    """A bar and its style: a shade of the scale's colour on that colour, which is seen on any terminal."""
    if cell.look != "measured" or not cell.value:
        return _SIGNS[cell.look], _SPECIAL.get(cell.look, "")
    ground = size.colour(cell.value)
    return size.bar(cell.value), f"{mixed(ground, text_colour(ground), _SHADE)} on {ground}"


def thinned(cells: Sequence[Cell], room: int, size: Size) -> list[Cell]:
    """At most ``room`` cells; of those that share a place, the worst."""
    if len(cells) <= room:
        return list(cells)
    bounds = [round(n * len(cells) / room) for n in range(room + 1)]
    return [worst_of(tuple(cells[a:b]), size) for a, b in pairwise(bounds)]


def short_middle(text: str, room: int) -> str:
    """``text``, or its beginning and its end with an ellipsis between, in ``room`` columns."""
    if len(text) <= room:
        return text
    head = max(1, (room - 1) * 2 // 5)
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"
