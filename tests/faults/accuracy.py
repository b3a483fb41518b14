"""Prints how accurate the findings are, per rule, and writes the tables into ``docs/findings/accuracy.md``.

Run ``python -m tests.faults.accuracy`` from the checkout; it takes a few minutes.  ``--seeds 0`` is a quick look that
writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.faults.catalogue import PROGRAMS, UNSEEN
from tests.faults.judge import Verdict, judge
from tests.faults.program import SEEDS, Form

PAGE = Path(__file__).parents[2] / "docs" / "findings" / "accuracy.md"
START, END = "<!-- accuracy: start -->", "<!-- accuracy: end -->"
FORMS: tuple[Form, ...] = ("one_shot", "history")
WORDS = {"one_shot": "One forward and backward", "history": "A short training run"}
HALVES = {"report": "The report half", "tune": "The tuning half", "unseen": "Written without a look at the checks"}
HEAD = "| check | programs | runs | found | right check | blamed right | false alarms |\n|---|---|---|---|---|---|---|"


def all_verdicts(seeds: Sequence[int], forms: Iterable[Form] = FORMS) -> list[Verdict]:
    """Every program in each form it is made for."""
    return [
        judge(program, seed, form)
        for form in forms
        for program in (*PROGRAMS, *UNSEEN)
        if form in program.forms
        for seed in seeds[: program.seeds]
    ]  # fmt: skip


def row(name: str, faulty: Sequence[Verdict], alarms: int) -> str:
    """A line of the table; ``alarms``: healthy runs in which this rule came first."""
    runs = len(faulty)
    shares = [sum(getattr(v, part) for v in faulty) for part in ("detected", "right_rule", "right_place")]
    cells = [f"{share} ({share / runs:.1%})" if runs else "" for share in shares]
    return f"| {name} | {len({v.program.name for v in faulty}) or ''} | {runs or ''} | {' | '.join(cells)} | {alarms} |"


def table(verdicts: Sequence[Verdict]) -> str:
    """Per best rule of the programs, and in total."""
    faulty = [v for v in verdicts if v.program.expect]
    healthy = [v for v in verdicts if not v.program.expect]
    alarmed = [v for v in healthy if v.first is not None]
    rules = sorted({v.program.expect[0] for v in faulty} | {v.first.rule for v in alarmed if v.first is not None})
    lines = [
        row(
            f"`{rule}`",
            [v for v in faulty if v.program.expect[0] == rule],
            sum(v.first is not None and v.first.rule == rule for v in alarmed),
        )
        for rule in rules
    ]
    total = row(f"all, and {len(healthy)} healthy runs", faulty, len(alarmed))
    return "\n".join([HEAD, *lines, total])


def tables(verdicts: Sequence[Verdict]) -> str:
    """The tables of both forms and both halves."""
    parts = []
    for form in FORMS:
        parts.append(f"## {WORDS[form]}")
        for half, words in HALVES.items():
            chosen = [v for v in verdicts if v.form == form and v.program.half == half]
            if chosen:
                parts += [f"### {words}, {form.replace('_', ' ')}", table(chosen)]
    return "\n\n".join(parts)


def written_into(page: str, text: str) -> str:
    """The page with this text between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        message = f"the page needs the lines {START} and {END}"
        raise ValueError(message)
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


def main() -> int:
    """Judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--form", choices=FORMS, help="only this one; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verdicts = all_verdicts(arguments.seeds, (arguments.form,) if arguments.form else FORMS)
    text = tables(verdicts)
    sys.stdout.write(text + "\n\n")
    for verdict in verdicts:
        ok = verdict.detected and verdict.right_rule and verdict.right_place
        if verdict.alarms if not verdict.program.expect else not ok:
            sys.stdout.write(verdict.line[:400] + "\n")
    if arguments.seeds == list(SEEDS) and not arguments.form:
        PAGE.write_text(written_into(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
