"""What the picture shows in each box: its words, its size, its look, and a strip of cells for a run of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxgrad.render.boxes import Box
from fxgrad.render.labels import Labels
from fxgrad.render.lettering import middle, wide
from fxgrad.render.marks import Marks
from fxgrad.render.scale import Size
from fxgrad.render.words import Look, number

__all__ = ["NAME_SIZE", "PAD", "WORD_SIZE", "Card", "Cell", "cell_place", "make_card"]

NAME_SIZE, WORD_SIZE = 12.5, 11.0
PAD = 9.0
_ROOM = 208.0  # for words
_LINE = 14.5
_CELL = (14.0, 24.0)
_CELL_LEAST = 4.0
_IN_ROW = 48  # cells
_GAP = 1.5
_SHAPES = 2  # outputs of which the shape is told
_OFF = 0.3  # decades beyond the first and the last from which the worst block is named


@dataclass(frozen=True, slots=True)
class Cell:
    """One block of a run: its name, look and value, and the number of the finding that blames it."""

    name: str
    look: Look
    value: float | None
    words: str
    finding: int | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """One box as it is drawn.

    Attributes:
        name: the first line.
        lines: those below it.
        look, value: what fills it.
        cells: one for each block of a run.
        findings: numbers of the findings whose culprit is in it.
        rewritten: whether rewrite rules stand in it.
        plain: whether it is only words, as the model's output.
        tooltip: all that is known.
        width, height: in points.
    """

    name: str
    lines: tuple[str, ...]
    look: Look
    value: float | None
    cells: tuple[Cell, ...]
    findings: tuple[int, ...]
    rewritten: bool
    plain: bool
    tooltip: tuple[str, ...]
    width: float
    height: float


def make_card(box: Box, index: int, labels: Labels, marks: Marks, size: Size) -> Card:
    """The card of the box with this index."""
    look, value = labels.look(box), labels.value(box)
    plain = box.single and box.nodes[0].op == "output"
    cells = _cells(box, index, labels, marks)
    if plain:
        name, lines = "output", []
    elif box.blocks:
        name, lines = _run_name(box), [_run_kind(box), *_run_words(cells, size)]
    else:
        name, lines = middle(box.name, _ROOM, NAME_SIZE, bold=True), _lines(box, labels, look)
    lines = [middle(line, _ROOM + 60 if box.blocks else _ROOM, WORD_SIZE) for line in lines if line]
    words = max([wide(name, NAME_SIZE, bold=True), *(wide(line, WORD_SIZE) for line in lines)])
    width, rows = max(words, _strip_width(len(cells))) + 2 * PAD, -(-len(cells) // _IN_ROW)
    height = _LINE * (1 + len(lines)) + rows * (_CELL[1] + _GAP) + (5 if cells else 0) + 9
    return Card(
        name, tuple(lines), look, value, cells, tuple(marks.numbers(index)),
        bool(labels.rewritten(box) or labels.rewritten_parameters(box)), plain,
        tuple(labels.tooltip(box) + marks.tooltip(index)), max(width, 60.0), height,
    )  # fmt: skip


def _lines(box: Box, labels: Labels, look: Look) -> list[str]:
    if box.single:
        own = [site for site in box.outputs if site.key == box.nodes[0].key] or box.outputs
        shapes = " ".join("×".join(map(str, site.shape)) or "scalar" for site in own[:_SHAPES])
        kind = box.kind if box.nodes[0].op == "call_module" else ""
        about = " · ".join(word for word in (kind, shapes) if word)
    else:
        count = len(box.all_nodes)
        about = f"{box.kind} · {count} value{'s' if count > 1 else ''}"
    reasons = labels.reasons(box) if look == "not_measured" and box.single else []
    if look == "not_measured":
        return [about, ", ".join(reasons).replace("_", " ") or "not measured"]
    gain = labels.gain(box)
    after = [*labels.rewritten(box), *labels.rewritten_parameters(box)]
    told = f"{len(after)} rewritten" if after and not box.single else labels.after(box) if after else ""
    return [about, labels.words(box) + ("" if gain is None else f" · gain {number(gain)}"), told]


def _run_name(box: Box) -> str:
    first, last = box.blocks[0].name, box.blocks[-1].name
    head, dot, tail = last.rpartition(".")
    if first.rpartition(".")[0] == head and dot:
        last = tail
    return middle(f"{first} … {last}", _ROOM + 40, NAME_SIZE, bold=True)


def _run_kind(box: Box) -> str:
    kinds = [part.kind for part in box.blocks[0].parts] or [box.kind]
    alike = len({tuple(part.kind for part in block.parts) or block.kind for block in box.blocks}) == 1
    return f"{len(box.blocks)} × {', '.join(kinds)}" if alike else f"{len(box.blocks)} values in a row"


def _run_words(cells: tuple[Cell, ...], size: Size) -> list[str]:
    """The first and the last block's value, and the worst or marked one's."""
    first, last = cells[0], cells[-1]
    ends, worst = f"first {first.words} · last {last.words}", worst_of(cells, size)
    if worst.finding is not None:
        return [ends] if worst in (first, last) else [ends, f"marked: {worst.words} at {worst.name}"]
    if _far(worst, size) - max(_far(first, size), _far(last, size)) < _OFF:
        return [ends]
    return [ends, f"worst: {worst.words} at {worst.name}"]


def worst_of(cells: tuple[Cell, ...], size: Size) -> Cell:
    """The cell that a finding blames, or else the one that is farthest from the neutral size."""
    return max(cells, key=lambda cell: (cell.finding is not None, _far(cell, size)))


def _far(cell: Cell, size: Size) -> float:
    if cell.look == "nonfinite":
        return math.inf
    if cell.look == "zero":
        return 1e6
    return abs(size.decades(cell.value)) if cell.value else -1.0


def _cells(box: Box, index: int, labels: Labels, marks: Marks) -> tuple[Cell, ...]:
    blamed = marks.blamed(index) if box.blocks else {}
    found = []
    for block in box.blocks:
        look, value = labels.look(block), labels.value(block)
        numbers = [blamed[node.key] for node in block.nodes if node.key in blamed]
        words = labels.words(block) if look != "measured" else number(value)
        found.append(Cell(block.name, look, value, words, min(numbers, default=None)))
    return tuple(found)


def _step(count: int) -> float:
    """Width of a cell and the gap beside it."""
    return max(_CELL_LEAST, min(_CELL[0], (_ROOM + 60) / min(count, _IN_ROW) - _GAP)) + _GAP


def _strip_width(count: int) -> float:
    return _step(count) * min(count, _IN_ROW) if count else 0.0


def cell_place(count: int, number: int) -> tuple[float, float, float, float]:
    """Left, top, width and height of one of ``count`` cells, inside of the strip."""
    row, column = divmod(number, _IN_ROW)
    step = _step(count)
    return column * step, row * (_CELL[1] + _GAP), step - _GAP, _CELL[1]
