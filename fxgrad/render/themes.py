"""Paper, ink and lines of a picture, on light and on dark ground.  What colours mean is the same on both."""

from __future__ import annotations

from dataclasses import dataclass

from fxgrad.schema import ThemeWord

__all__ = ["THEMES", "Theme"]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of everything that shows no gradient.

    Attributes:
        paper, ink, faint: ground, words, and words that matter less.
        line: ordinary edges and borders.
        frame, ground: border and ground of a module's frame.
        accent: what a finding marks.
    """

    paper: str
    ink: str
    faint: str
    line: str
    frame: str
    ground: str
    accent: str


THEMES: dict[ThemeWord, Theme] = {
    "light": Theme("#ffffff", "#1d2430", "#566070", "#5d6675", "#ccd3dc", "#f6f8fa", "#b0007c"),
    "dark": Theme("#12161c", "#e9edf2", "#a3adba", "#9aa5b3", "#3a4552", "#1a2028", "#ff5fc4"),
}
