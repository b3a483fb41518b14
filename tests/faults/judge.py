"""Runs the library over a program and compares what it says with the right answer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fxgrad
from fxgrad.diagnosis import diagnose
from fxgrad.schema import Diagnosis, Finding
from tests.faults.program import Built, Form, Program


@dataclass(frozen=True)
class Verdict:
    """How an answer compares with the right one.

    Attributes:
        program, seed, form: what was run.
        first: the finding that is judged: the first error or warning, else the first information that the program
            allows; None where there is neither.
        alarms: how many errors and warnings there are, consequences left out.
        detected: whether there is a finding to judge.
        right_rule, right_place: whether its rule, and what it blames, are among those expected.
        right_words: whether it says one of the words that the program asks for.
    """

    program: Program
    seed: int
    form: Form
    first: Finding | None
    alarms: int
    detected: bool
    right_rule: bool
    right_place: bool
    right_words: bool

    @property
    def line(self) -> str:
        """The verdict in a line, for a failed assertion."""
        said = "nothing" if self.first is None else f"{self.first.rule} at {self.first.place}: {self.first.message}"
        want = f"{'/'.join(self.program.expect) or 'nothing'} at {self.program.culprits or 'outside'}"
        return f"{self.program.kind}.{self.program.name} seed {self.seed} {self.form}: said {said}; right is {want}"


def one_shot(built: Built) -> Diagnosis:
    """What is said of one forward and backward with default options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of the faults itself
        return diagnose(fxgrad.gradient_flow(built.model, built.args, built.kwargs, loss=built.loss))


def history(built: Built) -> Diagnosis:
    """What is said of a short training run."""
    optimizer = built.optimized()
    options: dict[str, Any] = {"statistics": "full", "sites": "edge", "forward": True, "scaler": built.scaler}
    if built.known:
        options["optimizer"] = optimizer
    with warnings.catch_warnings(), fxgrad.watch(built.model, **options) as watch:
        warnings.simplefilter("ignore")
        built.train(optimizer)
        return diagnose(watch.history)


def judge(program: Program, seed: int, form: Form) -> Verdict:
    """The verdict on one run."""
    built = program.build(seed)
    torch.manual_seed(program.seed_offsets[1] + seed)
    diagnosis = one_shot(built) if form == "one_shot" else history(built)
    broken = [one for one in diagnosis.not_checked if one.reason.startswith("the check raised")]
    if broken:
        raise AssertionError(broken)
    alarms = [finding for finding in diagnosis.findings if finding.severity != "info"]
    allowed = [f for f in diagnosis.findings if program.info_ok and f.rule in program.expect]
    first = (alarms or allowed or [None])[0]
    return Verdict(
        program, seed, form, first, len(alarms), first is not None,
        first is not None and first.rule in program.expect, first is not None and right_place(program, first),
        first is not None and _says(program, first),
    )  # fmt: skip


def right_place(program: Program, finding: Finding) -> bool:
    """Whether the finding blames what is to blame."""
    node = finding.node
    if program.places:
        names = {finding.place, finding.parameter, node and node.key} - {None}
        bare = [name.split("[")[0] if name.endswith("]") else name for name in names]
        return any(re.fullmatch(place, name) for place in program.places for name in bare)
    if program.outside:
        return node is None or node.op == "placeholder"
    if node is None:
        return finding.parameter is not None and program.blames(finding.parameter)
    return program.blames(node.key, node.name, node.target, node.module_path)


def _says(program: Program, finding: Finding) -> bool:
    said = f"{finding.message} {finding.suggestion}"
    return not program.says or any(word in said for word in program.says)


def rates(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Shares of detected, right rules and right places among faulty runs; count of alarms on healthy ones."""
    faulty = [verdict for verdict in verdicts if verdict.program.expect]
    total = max(len(faulty), 1)
    return {
        "detected": sum(v.detected for v in faulty) / total,
        "right_rule": sum(v.right_rule for v in faulty) / total,
        "right_place": sum(v.detected and v.right_place for v in faulty) / total,
        "false_alarms": sum(v.alarms > 0 for v in verdicts if not v.program.expect),
    }
