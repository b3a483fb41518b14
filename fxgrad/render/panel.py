"""The words beside the picture: what was measured, the verdict, the findings, and what the looks mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxgrad.render.findings import at
from fxgrad.render.lettering import wrapped
from fxgrad.render.scale import DECADES, Size, colour
from fxgrad.render.svg_text import Letters, Pen
from fxgrad.render.verdict import verdict
from fxgrad.render.words import Look, number, short_source
from fxgrad.schema import Finding, GradientFlow, NormWord

__all__ = ["PANEL", "Legend", "panel"]

PANEL = 292.0  # width
_FINDINGS = 3  # that are told whole
_MOST = 640  # characters of one
_LOOKS: dict[Look, str] = {
    "zero": "exactly zero",
    "nonfinite": "NaN or Inf",
    "outside_range": "0 or Inf in float32, measure with 'full'",
    "not_measured": "no gradient to measure",
}


@dataclass(frozen=True, slots=True)
class Legend:
    """What the picture shows, and so the legend explains.

    Attributes:
        norm: the norm behind numbers and colours.
        size: the scale.
        looks: of the boxes and cells.
        rewritten: whether rewrite rules stand somewhere.
        split: whether a line has a colour of the scale.
        way: whether the way of a fault is drawn.
        changed: whether colours mean what became of each gradient since another flow.
    """

    norm: NormWord
    size: Size
    looks: frozenset[Look]
    rewritten: bool
    split: bool
    way: bool
    changed: bool = False


def panel(pen: Pen, flow: GradientFlow, findings: Sequence[Finding], legend: Legend) -> float:
    """Write the panel at the pen's left edge; returns its height."""
    y = 20.0
    for line in wrapped(flow.capture.model, PANEL, 18, bold=True)[:2]:
        pen.text((0, y), line, Letters(18, bold=True))
        y += 22
    y = _lines(pen, y, verdict(flow, findings, legend.norm), Letters(13, bold=True))
    loss = f"loss: {flow.event.loss}"
    y = _lines(pen, y + 2, loss, Letters(11, faint=True)) + 8
    shown = [(n, one) for n, one in enumerate(findings, start=1) if one.severity != "info"]
    for place, finding in shown[:_FINDINGS]:
        y = _finding(pen, y, place, finding) + 8
    if len(shown) > _FINDINGS:
        y = _lines(pen, y, f"and {len(shown) - _FINDINGS} more: flow.diagnosis", Letters(11, faint=True)) + 8
    return _legend(pen, y + 6, legend)


def _lines(pen: Pen, y: float, words: str, letters: Letters) -> float:
    for line in wrapped(words, PANEL, letters.size, bold=letters.bold):
        pen.text((0, y), line, letters)
        y += letters.size * 1.3
    return y


def _finding(pen: Pen, y: float, place: int, finding: Finding) -> float:
    top = y - 12
    pen.badge(10, y - 3, place)
    indent = 26
    where = f" ({short_source(finding.source)})" if finding.source else ""
    for line in wrapped(
        f"{finding.severity.upper()} {finding.rule} {at(finding)}{where}", PANEL - indent, 12, bold=True
    ):
        pen.text((indent, y), line, Letters(12, bold=True))
        y += 15.5
    message = finding.message if len(finding.message) <= _MOST else f"{finding.message[:_MOST]} …"
    for words in (message, f"try: {finding.suggestion}" if finding.suggestion else ""):
        for line in wrapped(words, PANEL - indent, 11):
            pen.text((indent, y), line, Letters(11))
            y += 14
        y += 3
    pen.rule(10, top + 22, y - 10)
    return y


def _legend(pen: Pen, y: float, legend: Legend) -> float:
    name = legend.norm.replace("_", " ")
    about = f"colour: {name} of the gradient"
    about += " against that in the first flow" if legend.changed else ""
    about += f", against {number(legend.size.reference)} at the loss side" if legend.size.relative else ""
    y = _lines(pen, y, about, Letters(11)) + 4
    step = PANEL / (2 * DECADES + 1)
    for place in range(2 * DECADES + 1):
        decades = place - DECADES
        pen.swatch((place * step, y - 6, step, 14), colour(decades), striped=decades > 0)
    y += 20
    for decades in range(-DECADES, DECADES + 1, 2):
        pen.text(((decades + DECADES + 0.5) * step, y), _power(decades), Letters(9.5, faint=True, anchor="middle"))
    y += 13
    pen.text((0, y), "◂ smaller" if legend.changed else "◂ vanishing", Letters(10, faint=True))
    pen.text((PANEL, y), "larger ▸" if legend.changed else "exploding ▸", Letters(10, faint=True, anchor="end"))
    y += 16
    for look in (look for look in _LOOKS if look in legend.looks):
        pen.look((0, y - 9, 26, 12), look)
        pen.text((34, y), _LOOKS[look], Letters(11))
        y += 17
    notes: Iterable[tuple[bool, str]] = (
        (legend.rewritten, "blue bar at the left: rewritten by a rule"),
        (legend.split, "a coloured line: the part sent back over it"),
        (legend.way, "double line: the path of a finding"),
        (True, "forward runs along the arrows, the gradient against them; gain: norm passed back / norm received"),
    )
    for wanted, words in notes:
        if wanted:
            y = _lines(pen, y, words, Letters(10.5, faint=True)) + 3
    return y


def _power(decades: int) -> str:
    return "1" if decades == 0 else f"10{str(decades).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
