"""Findings in words: the same on a terminal, in a file, in a notebook and in the report of a test."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fxgrad.render.words import number, printable
from fxgrad.schema import RULES, Diagnosis, Finding

__all__ = ["at", "finding_lines", "html_text", "one_line", "plain_text", "rich_text", "severity_counts", "shown_source"]

_NAMES = 4  # parameters, nodes or consequences that a line lists
_NUMBERS = 6  # figures of evidence
_UNITS = 8
_WHOLE = 1e6  # below it a whole number is written as one
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One finding in words: its severity, what stands behind that in the first line, and the lines below it."""

    severity: str
    head: str
    body: tuple[str, ...]


def plain_text(diagnosis: Diagnosis) -> str:
    """The ranked findings, what could have been checked and was not, and how many checks ran; no line wrapped."""
    lines = []
    for place, entry in enumerate(map(_entry, diagnosis.findings), start=1):
        lines.append(f"{place}. {entry.severity.upper()} {entry.head}")
        lines += [f"   {line}" for line in entry.body]
    return "\n".join(map(printable, [*lines, *_closing(diagnosis)]))


def rich_text(diagnosis: Diagnosis) -> Group:
    """The words of ``plain_text``, with coloured severities and hanging indents."""
    shown: list[RenderableType] = []
    for place, entry in enumerate(map(_entry, diagnosis.findings), start=1):
        # Text and not str, so that no name is taken for markup.
        head = Text.assemble(f"{place}. ", (entry.severity.upper(), _STYLES[entry.severity]), " ")
        shown.append(head.append(printable(entry.head), "bold"))
        shown += [Padding(Text(printable(line)), (0, 0, 0, 3), expand=False) for line in entry.body]
    return Group(*shown, *(Text(printable(line)) for line in _closing(diagnosis)))


def html_text(diagnosis: Diagnosis) -> str:
    """The words of ``plain_text`` as HTML without script or style sheet."""
    items = []
    for entry in map(_entry, diagnosis.findings):
        lines = [f"<b>{entry.severity.upper()} {_safe(entry.head)}</b>", *map(_safe, entry.body)]
        items.append(f"<li>{'<br>'.join(lines)}</li>")
    listed = f"<ol>{''.join(items)}</ol>" if items else ""
    return listed + "".join(f"<p>{_safe(line)}</p>" for line in _closing(diagnosis))


def _safe(words: str) -> str:
    return html.escape(printable(words))


def one_line(finding: Finding) -> str:
    """``ERROR dead at /relu (net.py:12): message``."""
    return printable(f"{finding.severity.upper()} {_head(finding)}: {finding.message}")


def finding_lines(finding: Finding) -> list[str]:
    """The finding's head, its cause, and what to try: a line each."""
    lines = [f"{finding.severity.upper()} {_head(finding)}", finding.message]
    return [*lines, f"try: {finding.suggestion}"] if finding.suggestion else lines


def severity_counts(findings: Iterable[Finding]) -> str:
    """``1 error, 2 warnings, 1 info``; empty for none."""
    counts: Counter[str] = Counter(finding.severity for finding in findings)
    plural = {"error": "errors", "warning": "warnings", "info": "info"}
    return ", ".join(f"{n} {word if n == 1 else plural[word]}" for word in plural if (n := counts[word]))


def shown_source(source: str) -> str:
    """``file:line`` as seen from the working folder, where the file lies below it; else as it is."""
    file, colon, line = source.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}{colon}{line}"
    except (ValueError, OSError):  # elsewhere, relative already, or the working folder is gone
        return source


def at(finding: Finding) -> str:
    """``at /relu``, or ``outside the model``."""
    inside = finding.site or finding.node is not None or finding.parameter
    return f"at {finding.place}" if inside else finding.place


def _head(finding: Finding) -> str:
    where = f" ({shown_source(finding.source)})" if finding.source else ""
    return f"{finding.rule} {at(finding)}{where}"


def _entry(finding: Finding) -> _Entry:
    """What is said of a finding, most important first."""
    body = [finding.message]
    if finding.suggestion:
        body.append(f"try: {finding.suggestion}")
    numbers = _some([f"{name} {_figure(value)}" for name, value in finding.evidence.items()], _NUMBERS)
    body.append(f"measured ({finding.confidence}): {numbers}" if numbers else f"confidence: {finding.confidence}")
    if finding.affected:
        body.append(f"affected parameters: {_some(finding.affected, _NAMES)}")
    if finding.units:
        body.append(f"units: {_some([str(unit) for unit in finding.units], _UNITS)}")
    if len(finding.path) > 1:
        body.append(f"path: {_way(finding.path)}")
    explained = [f"{one.rule} {at(one)}" for one in finding.explained]
    if explained:
        body.append(f"explains {len(explained)} more: {_some(explained, _NAMES)}")
    if finding.rule in RULES and finding.docs == f"findings/{finding.rule}.md":
        body.append(f"more: fxgrad explain {finding.rule}")
    return _Entry(finding.severity, _head(finding), tuple(body))


def _closing(diagnosis: Diagnosis) -> list[str]:
    """What was not checked and could have been, in one line, and the sum."""
    missing: dict[str, list[str]] = {}
    lines = []
    for one in diagnosis.not_checked:
        if one.give:
            missing.setdefault(one.give, []).append(one.rule)
        elif one.give is not None:
            lines.append(f"not checked: {one.rule}: {one.reason}")
    if missing:
        parts = (f"{', '.join(dict.fromkeys(rules))} (give {option})" for option, rules in missing.items())
        lines.append(f"not checked: {'; '.join(parts)}")
    checked = f"{len(diagnosis.checked)} of {len(diagnosis.rules)} checks ran"
    found = severity_counts(diagnosis.findings)
    return [*lines, f"{found}; {checked}" if found else f"no findings; {checked}"]


def _some(words: Sequence[str], count: int) -> str:
    listed = ", ".join(words[:count])
    return f"{listed} and {len(words) - count} more" if len(words) > count else listed


def _way(path: Sequence[str]) -> str:
    """Both ends of the way; the picture shows all of it."""
    if len(path) <= _NAMES:
        return " -> ".join(path)
    return f"{path[0]} -> {path[1]} -> ... {len(path) - 3} more ... -> {path[-1]}"


def _figure(value: float) -> str:
    """A count as it is, any other number with three digits."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return f"{value:.0f}" if whole and abs(value) < _WHOLE else number(value)
