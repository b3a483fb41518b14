"""Each program of the tables, plain and watched."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fidelity import (  # noqa: F401  # each fills the table
    programs_of_autograd,
    programs_of_hooks,
    programs_of_objects,
    programs_of_state,
    programs_of_structure,
    programs_of_surroundings,
    programs_of_switches,
)
from tests.fidelity.harness import PROGRAMS, Program, calls, differences, run
from tests.watched import WATCH

HOW: dict[str, dict[str, Any]] = {
    "usual": WATCH,
    "everything": {**WATCH, "statistics": "full", "sites": "edge", "forward": True, "channels": True},
}


TABLE = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=kind.__name__, marks=[pytest.mark.xfail(strict=True, reason=kind.differs)] if kind.differs else []
        )
        for kind in PROGRAMS
    ],
)


@pytest.mark.parametrize("how", HOW)
@TABLE
def test_watched_training_ends_in_the_same_bits(kind: type[Program], how: str) -> None:
    assert not differences(run(kind, None), run(kind, HOW[how]))


@pytest.mark.parametrize("how", HOW)
@TABLE
def test_nothing_of_the_users_is_called_more_often(kind: type[Program], how: str) -> None:
    assert calls(kind, HOW[how]) == calls(kind, None)


def test_the_comparison_sees_a_difference() -> None:
    one = run(PROGRAMS[0], None)
    other = [(where, value) for where, value in one]
    assert not differences(one, other)
    other[0] = (other[0][0], "changed")
    assert differences(one, other) == [other[0][0]]
    assert any("gradient of a.weight" in where for where, _ in one)
