"""Prints how many programs there are of each kind: ``python -m tests.faults.counts``."""

from __future__ import annotations

import sys
from collections import Counter

from tests.faults.catalogue import HEALTHY, PROGRAMS, UNSEEN
from tests.faults.program import Program

#: Kinds of advice, by a word that it must have.
_ADVICE = {
    "eps": "epsilon in half precision", "loss scale": "loss scale", "use_reentrant=False": "reentrant checkpoint",
    "enable_input_require_grads": "reentrant checkpoint", "running_var": "running variance of zero",
    "orthogonal": "recurrence", "fewer steps": "recurrence", "clip": "recurrence", "forget-gate": "recurrence",
    "sqrt(d)": "scores of an attention", "scores": "scores of an attention", "weight norm": "weight norm of zero",
    "sum or mean": "sum of what is normalised", "operations": "uniform chain", "reduction": "sum over the batch",
    "temperature": "temperature", "ignore_index": "labels ignored", "single logit": "one logit",
    "labels": "odd labels", "the input": "odd inputs", "learning rate": "rate that moves nothing",
}  # fmt: skip


def kind_of(program: Program) -> str:
    """The kind, and of advice which one."""
    advice = next((_ADVICE[word] for word in program.says if word in _ADVICE), None)
    advice = advice or next((_ADVICE["operations"] for word in program.says if word.endswith("operations")), None)
    if program.kind == "causes" and advice is None:
        advice = "exploding at the first step" if program.expect == ("exploding",) else "normalised over one entry"
    return program.kind if advice is None else f"advice: {advice}"


def counted() -> Counter[str]:
    """Faults of each kind; programs as they happen at work are of many kinds, one each."""
    return Counter(kind_of(program) for program in PROGRAMS if program.expect)


def main() -> int:
    """Print the table."""
    for kind, count in sorted(counted().items()):
        sys.stdout.write(f"{kind:45s} {count:4d}\n")
    sys.stdout.write(
        f"{'healthy':45s} {len(HEALTHY):4d}\n{'written without a look at the checks':45s} {len(UNSEEN):4d}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
