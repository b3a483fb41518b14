"""Options of a page, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.render.words import check_norm
from fxgrad.schema import Diagnosis, Finding, GradientFlow, NormWord, PageThemeWord, ScaleWord

__all__ = ["PageOptions", "page_options"]

_WORDS = {"scale": ("relative", "absolute"), "theme": ("auto", "light", "dark")}


@dataclass(frozen=True, slots=True)
class PageOptions:
    """What a page shows first; see ``fxgrad.schema.PageWords``."""

    norm: NormWord = "l2_norm"
    scale: ScaleWord = "relative"
    theme: PageThemeWord = "auto"
    source: bool = False


def page_options(flow: GradientFlow, options: Mapping[str, Any]) -> tuple[PageOptions, Diagnosis | None]:
    """Checked options, and the findings if some were given.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
    """
    given = dict(options)
    findings = given.pop("findings", None)
    known = [f.name for f in fields(PageOptions)]
    for name in given:
        if name not in known:
            message = f"pages have no option {name!r}; they have {', '.join([*known, 'findings'])}"
            raise OptionError(message)
    made = PageOptions(**given)
    check_norm(flow, made.norm)
    if not isinstance(made.source, bool):
        message = f"source must be True or False, but is {made.source!r}"
        raise OptionError(message)
    for name, words in _WORDS.items():
        if getattr(made, name) not in words:
            message = f"{name} must be {', '.join(map(repr, words))}, but is {getattr(made, name)!r}"
            raise OptionError(message)
    return made, _diagnosis(findings)


def _diagnosis(findings: Any) -> Diagnosis | None:
    if findings is None or isinstance(findings, Diagnosis):
        return findings
    found = tuple(findings)
    odd = next((one for one in found if not isinstance(one, Finding)), None)
    if odd is not None:
        message = f"findings must be findings, such as flow.findings, or a diagnosis, but holds {odd!r:.80}"
        raise OptionError(message)
    return Diagnosis(found)
