"""The picture as SVG: boxes in columns that fit on one screen, coloured by the scale, with the answer beside them."""

from __future__ import annotations

import math

from fxgrad.render.boxes import READABLE, boxes_of
from fxgrad.render.cards import NAME_SIZE, PAD, WORD_SIZE, Card, cell_place, make_card
from fxgrad.render.changes import Changes
from fxgrad.render.columns import Layout, Pair, Parts, Path, Room, arrange
from fxgrad.render.labels import Labels, short
from fxgrad.render.lettering import middle
from fxgrad.render.marks import Marks
from fxgrad.render.options import PictureOptions
from fxgrad.render.panel import PANEL, Legend, panel
from fxgrad.render.scale import Size, colour, joint, scale_of
from fxgrad.render.svg_text import Letters, Line, Pen, Place, text_on
from fxgrad.render.themes import THEMES
from fxgrad.render.uses import use_words, uses_between
from fxgrad.schema import Edge, GradientFlow

__all__ = ["draw"]

_SCREEN = Room(1400, 900)
_FEWER = (34, 28, 23, 18, 14)  # boxes at most, where what is ``READABLE`` doesn't fit
_MARGIN = 17.0
_ROOM = Room(_SCREEN.width - PANEL - 3 * _MARGIN - 10, _SCREEN.height - 2 * _MARGIN - 8)
_USES = 10  # uses that the tooltip of one edge lists
_PLAIN = 1.5  # decades around the neutral size within which a line has no colour
_DARK = 2.0  # decades from which a colour is dark enough for a line
_WIDE = 2.2  # a line with a colour of the scale
_ROUND = 7.0
_DASHED = "5 4"


def draw(flow: GradientFlow, options: PictureOptions, before: GradientFlow | None = None) -> str | None:
    """SVG text; None where no engine is installed that could lay it out.

    With ``before``, colours mean what became of each gradient since that flow.
    """
    picture = _Picture(flow, options, before)
    layout = picture.layout()
    for readable in _FEWER if options.depth is None else ():
        if layout is None or picture.fit(layout) >= 1:
            break
        smaller = _Picture(flow, options, before, readable)
        found = smaller.layout() if len(smaller.boxes) < len(picture.boxes) else None
        if found is not None and smaller.fit(found) > picture.fit(layout):
            picture, layout = smaller, found
    return None if layout is None else picture.drawn(layout)


class _Picture:
    """A flow on its way to SVG."""

    def __init__(
        self, flow: GradientFlow, options: PictureOptions, before: GradientFlow | None, readable: int = READABLE
    ) -> None:  # fmt: skip
        self.flow, self.options, self.norm = flow, options, options.norm
        self.theme = THEMES[options.theme]
        self.size = scale_of(flow, options.norm, options.scale)
        self.boxes, self.number = boxes_of(flow, options.depth, fold=options.fold, readable=readable)
        self.uses = uses_between(flow, self.number)
        self.marks = Marks(flow, options.findings, self.boxes, self.number)
        self.ways = self.marks.ways(self.uses)
        labels = Labels(flow, options.norm)
        self.cards = [make_card(box, n, labels, self.marks, self.size) for n, box in enumerate(self.boxes)]
        self.before = before
        if before is not None:
            self.size, changed = Size(), Changes(before, options.norm)
            self.cards = [changed.card(card, box) for card, box in zip(self.cards, self.boxes, strict=True)]
        heads: dict[int, int] = {}
        for tail, _ in self.uses:
            heads[tail] = heads.get(tail, 0) + 1
        self.split = {tail for tail, count in heads.items() if count > 1}
        self.pen = Pen(self.theme)

    def drawn(self, layout: Layout) -> str:
        """The picture with this layout, and the panel beside it."""
        self.pen.left = self.pen.top = _MARGIN
        height = panel(self.pen, self.flow, self.options.findings, self._legend())
        self.pen.left = left = 2 * _MARGIN + PANEL + 10
        self.pen.top += 4
        for name, *place in layout.frames:
            self._frame(name, (place[0], place[1], place[2], place[3]))
        for pair, path in layout.edges.items():
            self._edge(pair, path, named=pair in layout.stubs)
        for pair, (x, y) in layout.stubs.items():
            self._stub(pair, x, y, layout)
        for index, (x, y) in layout.boxes.items():
            self._card(self.cards[index], x, y)
        whole = max(height, layout.height) + 2 * _MARGIN + 8
        return self.pen.document(left + layout.width + _MARGIN, whole, f"Gradient flow of {self.flow.capture.model}")

    def fit(self, layout: Layout) -> float:
        """How much larger than the layout the screen is."""
        return min(_ROOM.width / layout.width, _ROOM.height / layout.height)

    def layout(self) -> Layout | None:
        """Where the boxes go."""
        sizes = [(card.width, card.height) for card in self.cards]
        containers = [box.container for box in self.boxes]
        if self.options.direction == "down":
            return arrange(Parts(sizes, containers, tuple(self.uses)), _ROOM)
        turned = [(height, width) for width, height in sizes]
        found = arrange(Parts(turned, containers, tuple(self.uses), turned=True), Room(_ROOM.height, _ROOM.width))
        return None if found is None else _turned(found)

    def _legend(self) -> Legend:
        looks = frozenset(card.look for card in self.cards if not card.plain)
        cells = frozenset(cell.look for card in self.cards for cell in card.cells)
        rewritten = any(card.rewritten for card in self.cards)
        lines = (self._look(pair, edges) for pair, edges in self.uses.items() if pair[0] in self.split)
        split = any(line.width == _WIDE for line in lines)
        return Legend(self.norm, self.size, looks | cells, rewritten, split, bool(self.ways), self.before is not None)

    # ---- boxes ---------------------------------------------------------------------------------------------------

    def _frame(self, name: str, place: Place) -> None:
        with self.pen.group("cluster", [name]):
            self.pen.rect(place, 10, f'fill="{self.theme.ground}" stroke="{self.theme.frame}" stroke-width="1"')
            self.pen.text((place[0] + 9, place[1] + 13), middle(name, place[2] - 14, 10.5), Letters(10.5, faint=True))

    def _card(self, card: Card, x: float, y: float) -> None:
        left, top = x - card.width / 2, y - card.height / 2
        place = (left, top, card.width, card.height)
        with self.pen.group("node", card.tooltip):
            fill, ink = self.theme.paper, self.theme.ink
            if card.plain:
                self.pen.text((x, y + 4), card.name, Letters(NAME_SIZE, faint=True, anchor="middle"))
                return
            if card.findings:
                ring = f'fill="none" stroke="{self.theme.accent}" stroke-width="3"'
                self.pen.rect((left - 4, top - 4, card.width + 8, card.height + 8), _ROUND + 3, ring)
            if card.cells:
                border = f'fill="{fill}" stroke="{self.theme.line}" stroke-width="0.8"'
                self.pen.rect(place, _ROUND, border)
            elif card.look == "measured" and card.value is not None:
                fill = self.size.colour(card.value)
                self.pen.filled(place, _ROUND, fill, striped=self.size.striped(card.value))
                ink = text_on(card.look, fill, self.theme)
            else:
                self.pen.look(place, card.look, _ROUND)
                ink = text_on(card.look, fill, self.theme)
            if card.rewritten:
                self.pen.bar((left, top + 2, 4.5, card.height - 4))
            self._words(card, left + PAD, top + 4, ink)
            for n, finding in enumerate(card.findings):
                self.pen.badge(left - 2 + 15 * n, top - 2, finding)

    def _words(self, card: Card, x: float, y: float, ink: str) -> None:
        y += 13
        self.pen.text((x, y), card.name, Letters(NAME_SIZE, bold=True, fill=ink))
        first, rest = (card.lines[:1], card.lines[1:]) if card.cells else (card.lines, ())
        for line in first:
            y += 14.5
            self.pen.text((x, y), line, Letters(WORD_SIZE, fill=ink))
        if card.cells:
            y = self._strip(card, x, y + 7) + 10
        for line in rest:
            self.pen.text((x, y), line, Letters(WORD_SIZE, fill=ink))
            y += 14.5

    def _strip(self, card: Card, x: float, y: float) -> float:
        bottom = y
        for n, cell in enumerate(card.cells):
            cx, cy, w, h = cell_place(len(card.cells), n)
            place = (x + cx, y + cy, w, h)
            bottom = max(bottom, y + cy + h)
            with self.pen.group("cell", [f"{cell.name}: {cell.words}"]):
                if cell.look == "measured" and cell.value is not None:
                    self.pen.filled(place, 1.5, self.size.colour(cell.value), striped=self.size.striped(cell.value))
                else:
                    self.pen.look(place, cell.look, 1.5)
                if cell.finding is not None:
                    ring = f'fill="none" stroke="{self.theme.accent}" stroke-width="2.5"'
                    self.pen.rect((place[0] - 1, place[1] - 2, w + 2, h + 4), 2, ring)
        return bottom + 3

    # ---- edges ---------------------------------------------------------------------------------------------------

    def _edge(self, pair: Pair, path: Path, *, named: bool) -> None:
        edges = self.uses[pair]
        uses = [use_words(edge, self.norm) for edge in edges[:_USES]]
        if pair in self.ways:
            uses.append(f"the way of {self.ways[pair]}")
        with self.pen.group("edge", uses):
            if pair in self.ways and not named:
                self.pen.curve(path.points, path.tip, Line(self.theme.accent, 4.2))
                self.pen.curve(path.points, path.tip, Line(self.theme.paper, 1.8))
            self.pen.curve(path.points, path.tip, self._look(pair, edges))

    def _look(self, pair: Pair, edges: list[Edge]) -> Line:
        """Where a value is used several times, a line shows what flows back over it."""
        if pair in self.ways:
            return Line(self.theme.accent, 0.4)
        if any(edge.rewritten is not None for edge in edges):
            return Line("#0072b2", 2.0, _DASHED)
        if any(edge.statistics is not None and edge.statistics.nonfinite for edge in edges):
            return Line("#d40000", 2.6)
        value = joint(edges, self.norm)
        if value is None or pair[0] not in self.split or self.before is not None:
            unknown = pair[0] in self.split and self.flow.event.sites == "edge" and self.before is None
            blind = unknown and self.cards[pair[0]].look != "not_measured"
            return Line(self.theme.line, 1.1, _DASHED if blind else "")
        if not value:
            return Line(self.theme.ink, 1.1, "1.5 3")
        return self._coloured(value)

    def _coloured(self, value: float) -> Line:
        decades = self.size.decades(value)
        if abs(decades) < _PLAIN:
            return Line(self.theme.line)
        return Line(colour(math.copysign(max(abs(decades), _DARK), decades)), _WIDE)

    def _stub(self, pair: Pair, x: float, y: float, layout: Layout) -> None:
        """Where edges come from that are not drawn."""
        tails = [a for a, b in self.uses if b == pair[1] and ((a, b) not in layout.edges or (a, b) == pair)]
        names = [self.boxes[tail].name for tail in tails]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        with self.pen.group("stub", [f"from {name}" for name in names]):
            words = middle(f"from {short(names[0])}{more}", 150, 10)
            self.pen.text((x, y + 3.5), words, Letters(10, faint=True, anchor="middle"))


def _turned(layout: Layout) -> Layout:
    """The same with right for down."""
    return Layout(
        layout.height,
        layout.width,
        {box: (y, x) for box, (x, y) in layout.boxes.items()},
        [(name, y, x, h, w) for name, x, y, w, h in layout.frames],
        {
            pair: Path(tuple((y, x) for x, y in path.points), (path.tip[1], path.tip[0]))
            for pair, path in layout.edges.items()
        },
        {pair: (y, x) for pair, (x, y) in layout.stubs.items()},
    )
