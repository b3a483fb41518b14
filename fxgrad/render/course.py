"""The course of a gradient over steps: a line for each block, a cell for each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from fxgrad.graph import find_site
from fxgrad.render.boxes import Box, boxes_of
from fxgrad.render.cards import Cell
from fxgrad.render.profile import LINES, bar_of, short_middle, thinned
from fxgrad.render.report import text_width
from fxgrad.render.scale import Size, joint, scale_of
from fxgrad.render.words import Look, look_of, number, printable
from fxgrad.schema import Finding, GradientFlow, NormWord, Series, Site

__all__ = ["Course", "Line", "course_of", "course_text"]

_NAME = 28
_RANKED: tuple[Look, ...] = ("nonfinite", "outside_range", "measured", "zero", "not_measured")


@dataclass(frozen=True, slots=True)
class Line:
    """One block, or one chosen value: a cell for each step; None where the step did not have it."""

    name: str
    cells: tuple[Cell | None, ...]

    @property
    def values(self) -> tuple[float | None, ...]:
        """Its norm at each step; None where that is no ordinary number."""
        return tuple(cell.value if cell is not None and cell.look == "measured" else None for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Course:
    """What rich prints for a history.

    Attributes:
        model: its class.
        norm: which norm the numbers mean.
        steps: numbers of the backward passes, oldest first.
        sizes: the scale of each step.
        lines: the blocks, inputs first.
        chosen: the values that were asked for.
        findings: what the checks say of each step.
        losses: what was noted as a loss: its name, and its value at each step, None where there is none.
    """

    model: str
    norm: NormWord
    steps: tuple[int, ...]
    sizes: tuple[Size, ...]
    lines: tuple[Line, ...]
    chosen: tuple[Line, ...] = ()
    findings: tuple[tuple[Finding, ...], ...] = ()
    losses: tuple[tuple[str, tuple[float | None, ...]], ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The heat map, and below it the findings by the step in which they came."""
        width, count = options.max_width, len(self.steps)
        first, last = (self.steps[0], self.steps[-1]) if self.steps else (0, 0)
        words = (
            f"{self.model}: {self.norm} of the gradient, backward {first} to {last} (▅ as at the loss, lower is less)"
        )
        yield Text(printable(words), "bold")
        for loss, values in self.losses:
            known = [value for value in values if value is not None]
            yield Text(printable(f"{loss}: {number(known[0])} … {number(known[-1])}, at least {number(min(known))}"))
        name = min(_NAME, width // 3, max((len(line.name) for line in self._shown), default=1))
        room = max(1, min(count, width - name - 2 - 9))
        for line in self._shown:
            row = Text(no_wrap=True, overflow="crop")
            row.append(short_middle(printable(line.name), name).ljust(name + 1))
            for cell, size in self._thinned(line, room):
                row.append(*bar_of(cell, size))
            ends = next((cell.words for cell in reversed(line.cells) if cell is not None), "-")
            row.append(f" {short_middle(ends, 8)}")
            yield row
        yield from self._findings_lines()

    @property
    def _shown(self) -> tuple[Line, ...]:
        return self.lines + self.chosen

    def _thinned(self, line: Line, room: int) -> Iterator[tuple[Cell, Size]]:
        """At most ``room`` cells, the worst of those that share a place."""
        blank = Cell(line.name, "not_measured", None, "-")
        paired = [cell or blank for cell in line.cells]
        relative = [
            Cell(c.name, c.look, c.value / s.reference if c.value is not None else None, c.words)
            for c, s in zip(paired, self.sizes, strict=True)
        ]
        for cell in thinned(relative, room, Size()):
            yield cell, Size()

    def _findings_lines(self) -> Iterator[RenderableType]:
        known: dict[tuple[str, str], tuple[int, Finding, int]] = {}
        for step, found in zip(self.steps, self.findings, strict=True):
            for one in found:
                if one.severity != "info":
                    began, _, times = known.get((one.rule, one.place), (step, one, 0))
                    known[one.rule, one.place] = (began, one, times + 1)
        for began, one, times in known.values():
            yield Text(
                printable(f"{one.severity.upper()} {one.rule} at {one.place}: from backward {began} on, {times}x")
            )


def course_of(
    flows: Sequence[GradientFlow], norm: NormWord = "l2_norm", values: Sequence[str] = (), *, judged: bool = True,
    notes: Mapping[str, Series] = MappingProxyType({}),
) -> Course:  # fmt: skip
    """The course of each block of the latest flow, and of chosen values, over all flows of one model.

    Of the ``notes`` those are shown whose name has "loss" in it.

    Raises:
        SiteNotFoundError: the latest flow has no value of that name.
    """
    last = flows[-1]
    boxes, _ = boxes_of(last, None, fold=True, readable=LINES)
    boxes = [box for box in boxes if any(site.measured for site in box.outputs)]
    room = LINES - len(boxes)
    boxes = [block for box in boxes for block in (box.blocks if 0 < len(box.blocks) <= room else [box])]
    tables = [{site.id: site for site in flow.sites} for flow in flows]
    chosen = [find_site(last, name) for name in values]
    return Course(
        last.capture.model,
        norm,
        tuple(flow.event.backward for flow in flows),
        tuple(scale_of(flow, norm) for flow in flows),
        tuple(_line(box.name, box.outputs, tables, norm) for box in _ended(boxes)),
        tuple(_line(site.id, [site], tables, norm) for site in chosen),
        tuple(flow.findings if judged else () for flow in flows),
        tuple(_losses(flows, notes)),
    )


def _losses(
    flows: Sequence[GradientFlow], notes: Mapping[str, Series]
) -> Iterator[tuple[str, tuple[float | None, ...]]]:  # fmt: skip
    for name, noted in notes.items():
        known = dict(zip(noted.steps, noted.values, strict=True))
        values = tuple(known.get(flow.event.backward) for flow in flows)
        if "loss" in name.lower() and any(value is not None for value in values):
            yield name, values


def _ended(boxes: Sequence[Box]) -> Sequence[Box]:
    """The boxes, at most as many as there are lines: the first ones and the last."""
    return boxes if len(boxes) <= LINES else [*boxes[: LINES // 2], *boxes[-(LINES - LINES // 2) :]]


def _line(name: str, outputs: Sequence[Site], tables: Sequence[dict[str, Site]], norm: NormWord) -> Line:
    cells = []
    for table in tables:
        found = [table[site.id] for site in outputs if site.id in table]
        looks = {look_of(site.statistics) for site in found}
        value = joint(found, norm)
        look = next((one for one in _RANKED if one in looks), _RANKED[-1])
        words = number(value) if look == "measured" else {"nonfinite": "NaN", "zero": "0"}.get(look, "-")
        cells.append(Cell(name, look, value, words) if found else None)
    return Line(name, tuple(cells))


def course_text(course: Course, width: int | None = None) -> str:
    """The course without colour, none of its lines wider than ``width`` columns (those of the terminal)."""
    buffer = StringIO()
    Console(file=buffer, width=width or text_width(), color_system=None, emoji=False).print(course)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
