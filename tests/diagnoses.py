"""Findings made by hand, on the flows of ``tests.flows``, for whoever shows them."""

from __future__ import annotations

import math
from pathlib import Path

from fxgrad.schema import Diagnosis, Finding, Node, NotChecked
from tests import flows

HERE = Path("/home/user")  # the folder of the sources of ``flows.node``


def dead(key: str = "/op1", **changes) -> Finding:
    """A dead activation that explains what starves behind it."""
    node = flows.node(key)
    behind = Finding("zero", "warning", "the gradient of fc.weight is 0", "", parameter="fc.weight")
    first = Finding(
        "vanishing", "error", "nothing arrives", "", node=flows.node("/op0"), site="/op0", consequences=(behind,)
    )
    facts = dict(
        rule="dead",
        severity="error",
        message="16 of 16 units never fired",
        suggestion="Start the bias at 0.",
        node=node,
        site=key,
        evidence={"share": 1.0, "units": 16, "samples": 1024.0, "rms": 1.5e-7},
        path=(key, "/op0", "input:x"),
        affected=tuple(f"fc.{n}.weight" for n in range(6)),
        units=tuple(range(16)),
        consequences=(first,),
        backward=3,
        docs="findings/dead.md",
    )
    return Finding(**(facts | changes))  # type: ignore[arg-type]


def frozen() -> Finding:
    """Good to know, and no fault."""
    return Finding("frozen", "info", "fc.bias requires no gradient", "", parameter="fc.bias", confidence="exact")


def outside() -> Finding:
    """A fault outside of the model."""
    evidence = {"nan": math.nan, "inf": -math.inf}
    return Finding(
        "loss_seed", "warning", "the gradient was NaN when it entered", "Look at the loss.", evidence=evidence
    )


def diagnosis(*findings: Finding) -> Diagnosis:
    """These findings, and three checks that were not checked."""
    skipped = (
        NotChecked("spike", "needs several steps"),
        NotChecked("update_size", "no optimizer was given", "optimizer="),
        NotChecked("underflow", "needs several steps"),
    )
    return Diagnosis(findings, skipped)


def every() -> Diagnosis:
    """One finding of each severity."""
    return diagnosis(dead(), outside(), frozen())


def named(word: str) -> Diagnosis:
    """A finding in which everything that a user can name is called ``word``."""
    node = Node(f"m/{word}", word, "call_function", word, word, word, 0, f"{word}:3")
    inner = Finding(word, "info", word, word, node=node, site=word)
    finding = Finding(
        word, "warning", word, word, node=node, site=word, parameter=word, evidence={word: 1.0}, path=(word, word),
        affected=(word,), consequences=(inner,), docs=word,
    )  # fmt: skip
    lacking = (NotChecked(word, word, word),)
    return Diagnosis((finding, Finding(word, "error", word, word, parameter=word)), lacking)
