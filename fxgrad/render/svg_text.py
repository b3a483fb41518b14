"""SVG as text: a pen that writes words and shapes, and lets no name be anything else than words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fxgrad.render.palette import text_colour
from fxgrad.render.themes import Theme
from fxgrad.render.words import Look

__all__ = ["Letters", "Line", "Pen", "Place", "Point", "safe", "text_on"]

Point = tuple[float, float]
Place = tuple[float, float, float, float]  # left, top, width, height

_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_BLUE = "#0072b2"
_WARN = "#ffd400"
_INVALID = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def safe(words: str) -> str:
    """``words`` as text of an XML element: no markup, no entity, and no character that XML forbids."""
    return "".join(_INVALID.get(c, c if c.isprintable() else " ") for c in words)


@dataclass(frozen=True, slots=True)
class Letters:
    """How words are set: size in points, ``anchor`` as in SVG, ``fill`` in place of the theme's ink."""

    size: float
    bold: bool = False
    faint: bool = False
    anchor: str = "start"
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """How a line looks: colour, width in points, and SVG's pattern of dashes."""

    colour: str
    width: float = 1.1
    dash: str = ""


class Pen:
    """Writes SVG elements; ``left`` and ``top`` are added to every place."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.parts: list[str] = []
        self.left = self.top = 0.0

    def __str__(self) -> str:
        """All that was written."""
        return "\n".join(self.parts)

    def document(self, width: float, height: float, title: str) -> str:
        """The whole picture, as wide as the page lets it be."""
        stripes = (
            '<pattern id="above" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0 0V6" stroke="#ffffff" stroke-opacity="0.38" stroke-width="2.4"/></pattern>'
        )
        size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="100%" style="max-width:{_n(width * 1.3)}px"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" role="img">\n'
            f"<title>{safe(title)}</title>\n<defs>{stripes}</defs>\n"
            f'<rect width="{_n(width)}" height="{_n(height)}" fill="{self.theme.paper}"/>\n{self}\n</svg>\n'
        )

    @contextmanager
    def group(self, kind: str, tooltip: Iterable[str]) -> Iterator[None]:
        """A group of this class, whose tooltip shows while the mouse rests on it."""
        words = "\n".join(map(safe, tooltip))
        self.parts.append(f'<g class="{kind}">' + (f"<title>{words}</title>" if words else ""))
        yield
        self.parts.append("</g>")

    def text(self, at: Point, words: str, letters: Letters) -> None:
        """A line of text that begins (or is centred, or ends) at ``at``, its base there."""
        colour = letters.fill or (self.theme.faint if letters.faint else self.theme.ink)
        extra = ' font-weight="bold"' if letters.bold else ""
        extra += f' text-anchor="{letters.anchor}"' if letters.anchor != "start" else ""
        place = f'x="{_n(self.left + at[0])}" y="{_n(self.top + at[1])}"'
        self.parts.append(f'<text {place} font-size="{_n(letters.size)}" fill="{colour}"{extra}>{safe(words)}</text>')

    def rect(self, place: Place, radius: float, look: str) -> None:
        """A box with rounded corners: left, top, width, height; ``look`` are its attributes."""
        x, y, w, h = place
        corner = f' rx="{_n(radius)}"' if radius else ""
        where = f'x="{_n(self.left + x)}" y="{_n(self.top + y)}" width="{_n(w)}" height="{_n(h)}"'
        self.parts.append(f"<rect {where}{corner} {look}/>")

    def swatch(self, place: Place, fill: str, *, striped: bool) -> None:
        """A filled piece of the scale."""
        self.rect(place, 0, f'fill="{fill}"')
        if striped:
            self.rect(place, 0, 'fill="url(#above)"')

    def badge(self, x: float, y: float, number: int) -> None:
        """The number of a finding on a disc."""
        middle = f'cx="{_n(self.left + x)}" cy="{_n(self.top + y)}"'
        paper = self.theme.paper
        self.parts.append(f'<circle {middle} r="9" fill="{self.theme.accent}" stroke="{paper}" stroke-width="1.5"/>')
        letters = Letters(11, bold=True, anchor="middle", fill=text_colour(self.theme.accent))
        self.text((x, y + 4), str(number), letters)

    def rule(self, x: float, top: float, bottom: float) -> None:
        """A thin line down."""
        if bottom > top:
            self.path(
                f"M{_n(self.left + x)} {_n(self.top + top)}V{_n(self.top + bottom)}", Line(self.theme.accent, 1.2)
            )

    def path(self, d: str, line: Line) -> None:
        """A line; ``d`` is in whole coordinates."""
        dashes = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        self.parts.append(f'<path d="{d}" fill="none" stroke="{line.colour}" stroke-width="{_n(line.width)}"{dashes}/>')

    def curve(self, points: Iterable[Point], tip: Point, line: Line) -> None:
        """A B-spline's Bezier pieces with an arrow at its end."""
        placed = [(self.left + x, self.top + y) for x, y in points]
        head = (self.left + tip[0], self.top + tip[1])
        length = math.dist(placed[-1], head) or 1.0
        back = tuple(to + (at - to) / length * min(5.0, length) for at, to in zip(placed[-1], head, strict=True))
        first, rest = placed[0], placed[1:]
        self.path(f"M{_p(first)}C{' '.join(map(_p, rest))}L{_p((back[0], back[1]))}", line)
        self.arrow(placed[-1], head, line.colour)

    def arrow(self, base: Point, tip: Point, colour: str) -> None:
        """A slim arrow head, in whole coordinates."""
        dx, dy = tip[0] - base[0], tip[1] - base[1]
        length = math.hypot(dx, dy) or 1.0
        ux, uy = dx / length, dy / length
        back = (tip[0] - 7 * ux, tip[1] - 7 * uy)
        one, two = (back[0] - 3 * uy, back[1] + 3 * ux), (back[0] + 3 * uy, back[1] - 3 * ux)
        self.parts.append(f'<path d="M{_p(tip)}L{_p(one)} {_p(two)}Z" fill="{colour}"/>')

    def look(self, place: Place, look: Look, radius: float = 3.0) -> None:
        """A box of what is no ordinary number; colour never stands alone."""
        x, y, w, h = place
        if look == "nonfinite":
            self.rect(place, 0, f'fill="#000000" stroke="{_WARN}" stroke-width="2"')
        elif look == "zero":
            self.rect(place, radius, 'fill="#ffffff" stroke="#000000" stroke-width="1"')
            self.rect((x + 2.5, y + 2.5, w - 5, h - 5), max(radius - 2, 0),
                      'fill="none" stroke="#000000" stroke-width="1"')  # fmt: skip
        elif look == "outside_range":
            self.rect(place, radius, 'fill="#ffffff" stroke="#000000" stroke-width="2" stroke-dasharray="2 2"')
        else:
            self.rect(place, radius, f'fill="none" stroke="{self.theme.faint}" stroke-dasharray="4 3"')

    def filled(self, place: Place, radius: float, fill: str, *, striped: bool) -> None:
        """A box of an ordinary gradient."""
        edge = f'stroke="{self.theme.line}" stroke-width="0.8"'
        self.rect(place, radius, f'fill="{fill}" {edge}')
        if striped:
            self.rect(place, radius, 'fill="url(#above)"')

    def bar(self, place: Place) -> None:
        """What marks a rewritten gradient."""
        self.rect(place, 1, f'fill="{_BLUE}"')


def text_on(look: Look, fill: str, theme: Theme) -> str:
    """The colour of words in a box."""
    special: dict[Look, str] = {"nonfinite": "#ffffff", "zero": "#000000", "outside_range": "#000000"}
    if look == "measured":
        return text_colour(fill)
    return special.get(look, theme.faint)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _p(point: Point) -> str:
    return f"{_n(point[0])} {_n(point[1])}"
