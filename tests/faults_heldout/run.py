"""``python -m tests.faults_heldout.run [--group G] [--json FILE] [names ...]``: try the programs and print a table."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import fxgrad
from tests.faults_heldout import load
from tests.faults_heldout.program import PROGRAMS, Case, Program, plain_step, scalar, trains


@dataclass
class Row:
    """What came of one program under one seed."""

    name: str
    group: str
    kind: str
    seed: int
    real: bool = False
    detected: bool = False
    rule_right: bool = False
    node_right: bool = False
    alarms: int = 0
    alarm_rules: list[str] = field(default_factory=list)
    sites: int = 0
    said: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def findings(case: Case, program: Program) -> tuple[Any, int]:
    """The diagnosis, and the number of sites."""
    if program.steps is None:
        flow = fxgrad.gradient_flow(case.model, case.args, case.kwargs, loss=case.loss)
        return (flow.findings, ()), len(flow.sites)
    opt = torch.optim.SGD(case.model.parameters(), lr=1e-3)
    with fxgrad.watch(case.model, statistics="full", sites="edge", forward=True) as watch:
        for step in range(program.steps):
            case_now = program.each(case, step) if program.each else case
            opt.zero_grad()
            scalar(case_now, case_now.model(*case_now.args, **case_now.kwargs)).backward()
            opt.step()
        from fxgrad.diagnosis import diagnose

        result = diagnose(watch.history)
        return (result.findings, result.not_checked), len(watch.flow().sites)


def fits(finding: Any, program: Program) -> bool:
    """Whether the blamed place is acceptable."""
    names = {finding.place, finding.parameter or ""} | ({finding.node.key} if finding.node else set())
    return any(re.fullmatch(p, n.split("[")[0] if n.endswith("]") else n) for p in program.places for n in names if n)


def attempt(program: Program, seed: int) -> Row:
    """One program, one seed."""
    row = Row(program.name, program.group, program.kind, seed)
    start = time.perf_counter()
    try:
        torch.manual_seed(seed)
        case = program.make()
        torch.manual_seed(seed + 77)
        plain = plain_step(case)
        row.real = (
            plain.finite if program.group in ("healthy", "zoo") else bool(program.real is None or program.real(plain))
        )
        torch.manual_seed(seed + 77)
        (found, lacking), row.sites = findings(case, program)
        row.not_checked = [f"{n.rule}: {n.reason}" for n in lacking]
        row.said = [
            f"{f.rule} {f.severity} {f.place} | {f.message} | {len(f.consequences)} consequences" for f in found
        ]
        loud = [f for f in found if f.severity != "info"]
        row.alarms, row.alarm_rules = len(loud), [f.rule for f in loud]
        ours = [f for f in found if f.rule in program.rules]
        quiet = {"frozen", "starved", "unused", "symmetry", "loss_seed"} & set(program.rules)
        row.detected = bool(loud) or bool(quiet and ours)
        first = loud[0] if loud else ours[0] if quiet and ours else None
        if first is not None:
            row.rule_right = first.rule in program.rules
            row.node_right = row.rule_right and fits(first, program)
        if program.group == "healthy" and case.trains:
            row.real = row.real and trains(case)
    except Exception:  # noqa: BLE001
        row.error = traceback.format_exc(limit=-4)
    row.seconds = time.perf_counter() - start
    return row


def table(rows: list[Row]) -> str:
    """Counts by group and kind."""
    lines = ["group    kind             runs real detect rule node alarms errors"]
    for key in sorted({(r.group, r.kind) for r in rows}) + [(g, "*") for g in sorted({r.group for r in rows})]:
        of = [r for r in rows if r.group == key[0] and key[1] in ("*", r.kind)]
        lines.append(
            f"{key[0]:8} {key[1]:16} {len(of):4} {sum(r.real for r in of):4} {sum(r.detected for r in of):6} "
            f"{sum(r.rule_right for r in of):4} {sum(r.node_right for r in of):4} "
            f"{sum(r.alarms > 0 for r in of):6} {sum(bool(r.error) for r in of):6}"
        )
    return "\n".join(lines)


def complaint(row: Row) -> str | None:
    """What is wrong with a row, if something is."""
    if row.error:
        return "ERROR " + row.error.strip().splitlines()[-1]
    if not row.real:
        return "NOT REAL"
    if row.group in ("healthy", "zoo"):
        return "FALSE ALARM" if row.alarms else None
    if not row.detected:
        return "MISSED"
    return None if row.node_right else ("WRONG NODE" if row.rule_right else "WRONG RULE")


def main() -> int:
    """Run, print, and return the number of complaints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--group")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file has already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load()
    rows = [Row(**r) for r in json.loads(Path(options.json).read_text())] if options.resume else []
    done = {(r.name, r.seed) for r in rows}
    for program in PROGRAMS.values():
        if (options.names and program.name not in options.names) or (options.group and program.group != options.group):
            continue
        for seed in range(min(options.seeds, program.seeds)):
            if (program.name, seed) in done:
                continue
            row = attempt(program, seed)
            rows.append(row)
            what = complaint(row)
            if what:
                print(f"{what}: {row.name} seed {row.seed}", *row.said[:3], sep="\n    ", flush=True)  # noqa: T201
            if options.json:
                Path(options.json).write_text(json.dumps([asdict(r) for r in rows], indent=1))
    print(table(rows))  # noqa: T201
    return sum(complaint(r) is not None for r in rows)


if __name__ == "__main__":
    sys.exit(min(main(), 99))
