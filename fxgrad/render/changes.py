"""What became of the gradient in each box since another flow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxgrad.render.boxes import Box
from fxgrad.render.cards import PAD, WORD_SIZE, Card, Cell
from fxgrad.render.lettering import wide
from fxgrad.render.scale import joint
from fxgrad.render.words import look_of, number
from fxgrad.schema import GradientFlow, NormWord, Site

__all__ = ["Changes"]


class Changes:
    """Cards whose value is the gradient's norm over that in an earlier flow."""

    def __init__(self, before: GradientFlow, norm: NormWord) -> None:
        self._sites = {site.id: site for site in before.sites}
        self._norm: NormWord = norm

    def card(self, card: Card, box: Box) -> Card:
        """The card with ratios for values."""
        cells = tuple(self._cell(cell, block) for cell, block in zip(card.cells, box.blocks, strict=True))
        if cells:
            ends = f"first {cells[0].words} · last {cells[-1].words}"
            return _with(card, ends, cells=cells)
        ratio, words = self._ratio(box.outputs)
        if card.plain or not words:
            return card
        return replace(_with(card, words), value=ratio)

    def _cell(self, cell: Cell, block: Box) -> Cell:
        ratio, words = self._ratio(block.outputs)
        return replace(cell, value=ratio, words=words or cell.words)

    def _ratio(self, outputs: Sequence[Site]) -> tuple[float | None, str]:
        """After over before, and both in words; None where there is no such number."""
        known = [self._sites[site.id] for site in outputs if site.id in self._sites]
        two = joint(outputs, self._norm)
        if two is None:
            return None, ""
        if not known:
            return None, f"new: {number(two)}"
        one = joint(known, self._norm)
        plain = all(look_of(site.statistics) == "measured" for site in (*known, *outputs) if site.measured)
        if one and two and plain and math.isfinite(one) and math.isfinite(two):
            return two / one, f"{number(one)} → {number(two)}, x{number(two / one)}"
        return None, f"{number(one)} → {number(two)}"


def _with(card: Card, words: str, cells: tuple[Cell, ...] = ()) -> Card:
    """The card with other words in its last line, and room for them."""
    return replace(
        card, lines=(*card.lines[:1], words), cells=cells, width=max(card.width, wide(words, WORD_SIZE) + 2 * PAD)
    )  # fmt: skip
