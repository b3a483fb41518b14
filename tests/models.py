"""All small models of the tests, gathered from ``tests/zoo``: ``MODELS`` by id, and the selections tests want.

@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_something(case):
    model, args, kwargs = case.build()
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.zoo import dynamic, feedforward, inplace, operations, structures
from tests.zoo.case import CASES, Case, squares

__all__ = ["EAGER_ONLY", "HEALTHY", "MODELS", "RAISING", "SYMBOLIC", "TWINS", "Case", "cases", "squares"]

ZOO = (feedforward, operations, inplace, structures, dynamic)
MODELS: dict[str, Case] = dict(CASES)
#: Models whose plain step runs through.
HEALTHY = [case for case in MODELS.values() if case.raises is None]
#: Models whose plain step raises; an instrumented one has to raise the same.
RAISING = [case for case in MODELS.values() if case.raises is not None]
#: Models that both front ends have to take.
SYMBOLIC = [case for case in HEALTHY if case.symbolic_ok]
#: Models that a trace cannot be right about.
EAGER_ONLY = [case for case in HEALTHY if case.eager_only]
#: Models with a hand-functionalised twin for the oracle.
TWINS = [case for case in HEALTHY if case.twin is not None]


def cases(selection: Iterable[Case]) -> list[object]:
    """The cases as pytest parameters that carry their ids."""
    return [pytest.param(case, id=case.id) for case in selection]
