"""What pictures and tables can be asked for, as keyword arguments that editors complete and type checkers check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

from fxgrad.schema.findings import Diagnosis, Finding
from fxgrad.schema.words import NormWord

ScaleWord = Literal["relative", "absolute"]
ThemeWord = Literal["light", "dark"]
PageThemeWord = Literal["auto", "light", "dark"]
DirectionWord = Literal["down", "right"]


class PictureWords(TypedDict, total=False):
    """Options of a picture.

    ``norm``: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``, the number in the boxes and behind the colours.
    ``depth``: module levels drawn as frames, deeper modules collapse into a box; None: as deep as fits on one screen.
    ``fold``: whether runs of equal blocks become one box, and values that pass their gradient on fold away.
    ``findings``: whose culprits are marked; a ``Diagnosis`` does as well, None stands for those of the flow.
    ``scale``: colours by the gradient against that at the loss side (``"relative"``), or by the norm itself.
    ``theme``: ``"light"`` or ``"dark"``.  ``direction``: where the forward pass runs to, ``"down"`` or ``"right"``.
    """

    norm: NormWord
    depth: int | None
    fold: bool
    findings: Iterable[Finding] | Diagnosis | None
    scale: ScaleWord
    theme: ThemeWord
    direction: DirectionWord


class PageWords(TypedDict, total=False):
    """Options of a page; all but ``source`` can be changed in the page.

    ``norm``: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``, the number in the boxes and behind the colours.
    ``scale``: colours by the gradient against that at the loss side (``"relative"``), or by the norm itself.
    ``theme``: ``"light"``, ``"dark"``, or ``"auto"``, as the reader's system is set.
    ``source``: whether the lines of code around each call are put into the file.
    ``findings``: those that are listed; a ``Diagnosis`` does as well, None stands for those of the flow.
    """

    norm: NormWord
    scale: ScaleWord
    theme: PageThemeWord
    source: bool
    findings: Iterable[Finding] | Diagnosis | None


class TableWords(TypedDict, total=False):
    """Options of a table.

    ``norm``: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``.
    ``limit``: rows of values at most, None for all; the largest drops, culprits and what is special stay.
    ``findings``: whose culprits are marked; a ``Diagnosis`` does as well, None stands for those of the flow.
    """

    norm: NormWord
    limit: int | None
    findings: Iterable[Finding] | Diagnosis | None
