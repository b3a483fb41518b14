"""How wide words are, and how they are made to fit.

Viewers have different fonts, so widths are those of a wide one (DejaVu Sans): in any other the words take less room.
"""

from __future__ import annotations

import textwrap

__all__ = ["middle", "wide", "wrapped"]

_NARROW = frozenset("iljI|!.,:;'`")
_SLIM = frozenset('ftr()[]{}/\\"- *')
_WIDE = frozenset("mwMWOQGCDHN@%&_#+=<>~×→")
_BOLD = 1.1
_ASCII = 127


def wide(text: str, size: float, *, bold: bool = False) -> float:
    """Width of a line of text in points, at this font size; rather too much than too little."""
    return sum(map(_share, text)) * size * (_BOLD if bold else 1.0)


def _share(letter: str) -> float:
    if letter in _NARROW:
        return 0.34
    if letter in _SLIM:
        return 0.42
    if letter in _WIDE:
        return 0.86 if letter not in "mwMW@%" else 0.98
    if ord(letter) > _ASCII:
        return 1.0 if letter not in "…·" else 0.5
    return 0.70 if letter.isupper() else 0.62


def middle(text: str, room: float, size: float, *, bold: bool = False) -> str:
    """``text``, or its beginning and its end where it does not fit."""
    if wide(text, size, bold=bold) <= room:
        return text
    keep = len(text) - 1
    while keep > 2 and wide(_cut(text, keep), size, bold=bold) > room:  # noqa: PLR2004  # a letter on either side
        keep -= 1
    return _cut(text, keep)


def _cut(text: str, keep: int) -> str:
    """The end of a name says more than its beginning."""
    head = keep * 2 // 5
    return f"{text[:head]}…{text[len(text) - (keep - head) :]}"


def wrapped(text: str, room: float, size: float, *, bold: bool = False) -> list[str]:
    """The lines of a text, none of them wider than ``room``; a word that is too long is broken."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and wide(joined, size, bold=bold) <= room:
            lines[-1] = joined
            continue
        if wide(word, size, bold=bold) <= room:
            lines.append(word)
            continue
        letters = max(1, int(room / (wide(word, size, bold=bold) / len(word))) - 1)
        lines += textwrap.wrap(word, letters, break_on_hyphens=False)
    return lines
