"""``fxgrad log``: what a run file holds, in lines."""

from __future__ import annotations

import math

from fxgrad.render.lines import flow_line
from fxgrad.render.words import number, printable
from fxgrad.run_file import Run
from fxgrad.schema import Finding, Series

__all__ = ["log_text"]


def log_text(run: Run, last: int) -> str:
    """When it was written, what was found, what was noted, and the ``last`` steps."""
    count = len(run)
    steps = run.steps
    models = ", ".join(dict.fromkeys(session.model for session in run.sessions)) or "no model yet"
    size = f"{run.path.stat().st_size / 1e6:.1f} MB"
    where = f", steps {steps[0]} to {steps[-1]}" if steps else ""
    lines = [f"{run.path}: {count} flows of {models}{where} ({size})"]
    lines += [f"  written from step {session.first} on, {session.started}" for session in run.sessions]
    lines += _found(run.findings)
    notes = run.notes
    lines += ["", "noted:"] if notes else []
    lines += [_noted(series) for series in notes.values()]
    beside = {name: dict(zip(series.steps, series.values, strict=True)) for name, series in notes.items()}
    lines += ["", f"the last {min(last, count)} of {count} flows (l2_norm):"] if count and last else []
    for flow in run[max(0, count - last) :] if last else ():
        step = flow.event.backward
        told = [f"{name} {_number(found[step])}" for name, found in beside.items() if step in found]
        lines.append("  " + ", ".join([f"step {step}: {flow_line(flow)}", *told]))
    return "\n".join(map(printable, lines)) + "\n"


def _found(findings: tuple[Finding, ...]) -> list[str]:
    """A line for each finding, by place, with the step at which it came first."""
    known: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        known.setdefault((finding.rule, finding.place), finding)
    if not known:
        return ["", "nothing was found while it was written"]
    return ["", "found:", *(f"  step {finding.backward}: {finding}" for finding in known.values())]


def _noted(series: Series) -> str:
    finite = [value for value in series.values if value is not None and math.isfinite(value)]
    odd = len(series) - len(finite)
    words = [f"{number(finite[0])} at first, {number(finite[-1])} at last" if finite else "no finite number"]
    words += [f"from {number(min(finite))} to {number(max(finite))}"] if finite else []
    words += [f"{odd} of {len(series)} NaN or Inf"] if odd else []
    return f"  {series.name}: {', '.join(words)}"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value) if math.isfinite(value) else str(value)
