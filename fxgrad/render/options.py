"""Options of a picture, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.render.marks import findings_from
from fxgrad.render.words import check_norm
from fxgrad.schema import DirectionWord, Finding, GradientFlow, NormWord, ScaleWord, ThemeWord

__all__ = ["PictureOptions", "options_from"]

_WORDS = {"scale": ("relative", "absolute"), "theme": ("light", "dark"), "direction": ("down", "right")}


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """What a picture shows; see ``fxgrad.schema.PictureWords``."""

    norm: NormWord = "l2_norm"
    depth: int | None = None
    fold: bool = True
    findings: tuple[Finding, ...] = ()
    scale: ScaleWord = "relative"
    theme: ThemeWord = "light"
    direction: DirectionWord = "down"


def options_from(flow: GradientFlow, options: Mapping[str, Any]) -> PictureOptions:
    """Checked options.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
    """
    known = [f.name for f in fields(PictureOptions)]
    for name in options:
        if name not in known:
            message = f"pictures have no option {name!r}; they have {', '.join(known)}"
            raise OptionError(message)
    made = PictureOptions(**{**options, "findings": findings_from(options.get("findings"))})
    check_norm(flow, made.norm)
    whole = isinstance(made.depth, int) and not isinstance(made.depth, bool) and made.depth >= 0
    if made.depth is not None and not whole:
        message = f"depth must be None or a whole number of at least 0, but is {made.depth!r}"
        raise OptionError(message)
    if not isinstance(made.fold, bool):
        message = f"fold must be True or False, but is {made.fold!r}"
        raise OptionError(message)
    for name, words in _WORDS.items():
        if getattr(made, name) not in words:
            message = f"{name} must be {' or '.join(map(repr, words))}, but is {getattr(made, name)!r}"
            raise OptionError(message)
    return made
