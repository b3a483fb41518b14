"""``fxgrad diagnose`` and ``run --check``: findings on the screen, in files, and as an exit code.

Imports no torch, as judging a saved flow needs none.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fxgrad.command.outputs import check_paths, replace_all
from fxgrad.command.recorded import recorded
from fxgrad.diagnosis import diagnose
from fxgrad.errors import OptionError
from fxgrad.render.findings import plain_text
from fxgrad.render.findings_json import findings_json
from fxgrad.render.sarif import Origin, to_sarif
from fxgrad.run_file import Run
from fxgrad.schema import RULES, Diagnosis, Finding, FlowSeries, GradientFlow

__all__ = ["Format", "Judged", "Wanted", "judge", "load_findings", "load_flows"]

Format = Literal["text", "json", "sarif"]
_LATEST = 128  # flows of a run that are judged: as many as a watch has in memory
_SPREAD = 400  # flows of a run that are plotted


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to come of the findings.

    Attributes:
        form: how they are printed.
        files: where to write them, in the format of each suffix.
        fail_on: the checks whose warnings and errors count for the exit code; none for all.
    """

    form: Format = "text"
    files: Sequence[Path] = ()
    fail_on: Sequence[str] = ()

    def check(self, taken: Sequence[Path] = ()) -> None:
        """Find out before the work whether it makes sense; ``taken`` are the files of flows.

        Raises:
            OptionError: a file that cannot be written or holds a flow, or a check that does not exist.
        """
        check_paths(self.files, tuple(_BY_SUFFIX), "--findings")
        flows = {path.resolve() for path in taken}
        for path in self.files:
            if path.resolve() in flows:
                message = f"--findings {path}: this is the file of a flow. Name another"
                raise OptionError(message)
        for rule in self.fail_on:
            if rule not in RULES:
                near = difflib.get_close_matches(rule, RULES, n=3, cutoff=0.4) or list(RULES)
                message = f"--fail-on {rule}: there is no such check. Use one of {', '.join(near)}"
                raise OptionError(message)


@dataclass(frozen=True, slots=True)
class Judged:
    """Flows of one model, oldest first, and what the checks say of them."""

    flows: tuple[GradientFlow, ...]
    diagnosis: Diagnosis

    def text(self, form: Format) -> str:
        """The findings in this format, with a line's end."""
        return _FORMS[form](self)

    def write(self, files: Sequence[Path]) -> None:
        """Write each file in the format of its suffix, when all of them are ready.

        Raises:
            OptionError: a file cannot be written.
        """
        replace_all({path: self.text(_BY_SUFFIX[path.suffix]) for path in files}, "--findings")

    def fails(self, rules: Sequence[str] = ()) -> bool:
        """Whether there is a warning or an error; with ``rules``, one of these, be it explained by another or not."""
        if not rules:
            return not self.diagnosis.healthy
        found = [one for finding in self.diagnosis.findings for one in (finding, *finding.explained)]
        return any(one.rule in rules and one.severity != "info" for one in found)

    def unanswered(self, rules: Sequence[str]) -> list[str]:
        """A line for each of these checks that could not be checked, so that its silence is not taken for health."""
        lacking = {one.rule: one.reason for one in self.diagnosis.not_checked}
        return [f"--fail-on {rule}: was not checked: {lacking[rule]}" for rule in rules if rule in lacking]


def judge(flows: Sequence[GradientFlow], recorded_findings: Sequence[Finding] = ()) -> Judged:
    """What the checks say of one flow, or of a series; and, behind that, what was found while a run was written."""
    series = tuple(flows)
    found = diagnose(series[0] if len(series) == 1 else series)
    known = {(finding.rule, finding.place) for finding in found.findings}
    earlier = {(finding.rule, finding.place): finding for finding in reversed(recorded_findings)}
    more = [finding for key, finding in reversed(earlier.items()) if key not in known]
    return Judged(series, replace(found, findings=(*found.findings, *more)))


def load_findings(paths: Sequence[Path]) -> list[Finding]:
    """What was found while the run files among these were written."""
    runs = (found for path in paths if isinstance(found := recorded(path), Run))
    return [finding for run in runs for finding in run.findings]


def load_flows(paths: Sequence[Path], *, spread: bool = False) -> tuple[GradientFlow, ...]:
    """The flows of all files, in the order of the files; each is one flow, a saved series or a run.

    Of a long run the latest are taken, or with ``spread`` some over its whole length.

    Raises:
        FlowFileError, RunFileError: a file holds no flow.
        OptionError: the flows are of different models.
    """
    flows = tuple(flow for path in paths for flow in _flows_of(recorded(path), spread=spread))
    models = list(dict.fromkeys(flow.capture.model for flow in flows))
    if len(models) > 1:
        message = (
            f"{', '.join(map(str, paths))}: these are flows of different models ({', '.join(models)}), and no series. "
            "Diagnose them one by one"
        )
        raise OptionError(message)
    if not flows:
        message = f"{', '.join(map(str, paths))}: there is no flow yet: no backward pass was recorded"
        raise OptionError(message)
    return flows


def _flows_of(found: GradientFlow | FlowSeries, *, spread: bool) -> Sequence[GradientFlow]:
    if isinstance(found, GradientFlow):
        return [found]
    if not isinstance(found, Run):
        return found
    return found.sampled(_SPREAD) if spread else found[max(0, len(found) - _LATEST) :]


def _origin(flow: GradientFlow) -> Origin:
    """Lines for findings that have none: of the node that uses a parameter, or of the model's last operation."""
    known = [node for node in flow.nodes if node.source]
    parameters: dict[str, str] = {}
    for node in known:
        for name in node.parameters:
            parameters.setdefault(name, node.source or "")
    return Origin(parameters=parameters, model=known[-1].source if known else None, category=flow.capture.model)


_FORMS: Mapping[Format, Callable[[Judged], str]] = {
    "text": lambda judged: plain_text(judged.diagnosis) + "\n",
    "json": lambda judged: findings_json(judged.diagnosis),
    "sarif": lambda judged: to_sarif(judged.diagnosis, _origin(judged.flows[-1])),
}
_BY_SUFFIX: Mapping[str, Format] = {".txt": "text", ".json": "json", ".sarif": "sarif"}
