"""Each training loop of the tables, plain and watched, for fifty steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fidelity import loops_of_precision, loops_of_steps  # noqa: F401  # each fills the table
from tests.fidelity.loops import LOOPS, Loop, assert_same_training

HOW: dict[str, dict[str, Any]] = {
    "native": {},
    "python": {"native": False},
    "everything": {"statistics": "histogram", "sites": "edge", "forward": True},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_watched_training_ends_in_the_same_bits_and_each_backward_is_an_event(kind: type[Loop], how: str) -> None:
    watched = assert_same_training(kind, HOW[how])
    kind.check(kind(), watched.flows)
