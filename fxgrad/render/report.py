"""A flow in words, the answer first: the verdict, the findings, the profile, and what there is to know besides."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.text import Text

from fxgrad.render.findings import at, finding_lines, rich_text
from fxgrad.render.profile import profile
from fxgrad.render.ranks import rank_lines
from fxgrad.render.verdict import verdict
from fxgrad.render.words import blind_counts, printable, rewritten_counts
from fxgrad.schema import Diagnosis, Finding, GradientFlow, NormWord

__all__ = ["Report", "report_text", "text_width"]

_WHOLE = 5  # errors and warnings that are told
_NOTES = 3  # other findings that are named
_WIDTH = 80  # columns where nothing says how many there are


def text_width() -> int:
    """Columns to write in: those of the terminal, or of ``COLUMNS``, or else 80."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns


@dataclass(frozen=True, slots=True)
class Report:
    """What rich prints for a flow; it fits any width.

    Attributes:
        flow: what was measured.
        findings: what the checks say of it.
        norm: which norm numbers and colours mean.
        more, more_findings: how one gets to see every value, and all that is said of findings.
        diagnosis: where it is given, its findings are told with all their evidence.
    """

    flow: GradientFlow
    findings: tuple[Finding, ...]
    norm: NormWord = "l2_norm"
    more: str = "flow.table()"
    more_findings: str = "flow.diagnosis"
    diagnosis: Diagnosis | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The parts, top to bottom."""
        flow = self.flow
        yield Text(printable(f"{flow.capture.model}: {verdict(flow, self.findings, self.norm)}"), "bold")
        yield from self._findings_lines()
        rows = profile(flow, self.findings, options.max_width, self.norm)
        if rows:
            yield Text()
            scale = flow.event.loss_scale
            times = f" times the loss scale {scale:g}" if scale not in (None, 1.0) else ""
            yield Text(f"{self.norm} of the gradient{times}, inputs first (▅ as at the loss, lower is less)", "dim")
            yield from rows
        yield Text()
        for line in _facts(flow):
            yield Text(printable(line), "dim")
        yield Text(f"{len(flow.sites)} values: {self.more}", "dim")

    def _findings_lines(self) -> Iterator[RenderableType]:
        if self.diagnosis is not None:
            yield rich_text(self.diagnosis)
            return
        numbered = list(enumerate(self.findings, start=1))
        faults = [(place, one) for place, one in numbered if one.severity != "info"]
        for place, finding in faults[:_WHOLE]:
            head, *body = finding_lines(finding)
            yield Text(printable(f"{place}. {head}"), "bold red" if finding.severity == "error" else "bold yellow")
            yield from (Padding(Text(printable(line)), (0, 0, 0, 3), expand=False) for line in body)
        if len(faults) > _WHOLE:
            yield Text(f"and {len(faults) - _WHOLE} more: {self.more_findings}", "dim")
        notes = [f"{one.rule} {at(one)}" for _, one in numbered if one.severity == "info"]
        if notes:
            more = f" and {len(notes) - _NOTES} more" if len(notes) > _NOTES else ""
            words = f"good to know: {', '.join(notes[:_NOTES])}{more} ({self.more_findings})"
            yield Text(printable(words), "dim")


def report_text(report: Report, width: int | None = None) -> str:
    """The report without colour, none of its lines wider than ``width`` columns (those of the terminal)."""
    buffer = StringIO()
    Console(file=buffer, width=width or text_width(), color_system=None, emoji=False).print(report)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _facts(flow: GradientFlow) -> Sequence[str]:
    lines = [f"loss: {flow.event.loss}", *rank_lines(flow)]
    blind = blind_counts(flow)
    if blind:
        lines.append(f"without a gradient: {blind}")
    if rewritten_counts(flow):
        lines.append(f"rewritten besides values: {rewritten_counts(flow)}")
    if flow.capture.front_end == "symbolic" or flow.event.level != "full":
        lines.append(f"front end: {flow.capture.front_end}; statistics: {flow.event.level}")
    return lines
