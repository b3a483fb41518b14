"""A comparison of two flows, in words and as a picture of the difference."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxgrad.render.findings import at
from fxgrad.render.profile import short_middle
from fxgrad.render.report import text_width
from fxgrad.render.svg import to_svg as draw_to
from fxgrad.render.verdict import verdict
from fxgrad.render.words import number, printable, short_source
from fxgrad.schema import Change, Comparison, Finding

__all__ = ["comparison_text", "to_svg"]

_CHANGES = 15  # values that are listed
_NUMBERS = 10  # columns of each
_SEEN = 0.05  # decades from which a change is one


def comparison_text(comparison: Comparison, width: int | None = None) -> str:
    """Findings that are gone, new and left, and then the values that changed most."""
    width = width or text_width()
    lines: list[str] = []
    for word, flow in (("before: ", comparison.before), ("after:  ", comparison.after)):
        lines += textwrap.wrap(
            verdict(flow, flow.findings, comparison.norm), width, initial_indent=word, subsequent_indent="        "
        )
    for word, listed in (("gone", comparison.gone), ("new", comparison.new), ("still there", comparison.left)):
        lines += [f"{_name(one)}: {word}" for one in listed]
    moved = [change for change in comparison.changes if _moved(change)]
    same = len(comparison.changes) - len(moved)
    if moved:
        lines += ["", f"{comparison.norm} of the gradient, what changed most first"]
        lines += [_row(change, width) for change in moved[:_CHANGES]]
    if len(moved) > _CHANGES:
        lines.append(f"and {len(moved) - _CHANGES} more")
    lines += ["", f"{same} of {len(comparison.changes)} values as before"]
    for word, ids in (("only before", comparison.removed), ("only after", comparison.added)):
        if ids:
            lines.append(f"{len(ids)} {word}: {', '.join(ids[:3])}{' ...' if len(ids) > 3 else ''}")  # noqa: PLR2004
    return "\n".join(_fitted(printable(line), width) for line in lines)


def to_svg(comparison: Comparison, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The second flow, coloured by the ratio of each gradient to that in the first; as of ``GradientFlow.to_svg``."""
    given = options.get("findings")
    words = {"norm": comparison.norm, **options}
    words["findings"] = comparison.after.findings if given is None else given
    return draw_to(comparison.after, path, words, before=comparison.before)


def _name(finding: Finding) -> str:
    return f"{finding.severity.upper()} {finding.rule} {at(finding)}"


def _moved(change: Change) -> bool:
    if change.ratio is not None:
        return abs(math.log10(change.ratio)) >= _SEEN
    one, two = (math.nan if value is None else value for value in (change.before, change.after))
    return not (one == two or (math.isnan(one) and math.isnan(two)))


def _row(change: Change, width: int) -> str:
    ratio = f"x{number(change.ratio)}" if change.ratio is not None else ""
    words = f"{number(change.before):>{_NUMBERS}} -> {number(change.after):<{_NUMBERS}} {ratio:<{_NUMBERS}}"
    source = short_source(change.source)
    room = max(8, min(44, width - len(words) - 1))
    line = f"{short_middle(change.id, room):<{room}} {words}"
    return f"{line} {source}".rstrip() if len(line) + 1 + len(source) <= width else line.rstrip()


def _fitted(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
