"""Each training loop of the tables, plain and watched, for fifty steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fidelity import loops_of_precision, loops_of_recomputing, loops_of_steps  # noqa: F401  # fill the table
from tests.fidelity.loops import LOOPS, Loop, assert_same_training, train
from tests.fidelity.loops_of_recomputing import Checkpointed, WithoutCheckpoint

HOW: dict[str, dict[str, Any]] = {
    "native": {},
    "python": {"native": False},
    "everything": {"statistics": "histogram", "sites": "edge", "forward": True},
}


@pytest.mark.parametrize("how", ["native", "python", pytest.param("everything", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_watched_training_ends_in_the_same_bits_and_each_backward_is_an_event(kind: type[Loop], how: str) -> None:
    watched = assert_same_training(kind, HOW[how])
    kind.check(kind(), watched.flows)


@pytest.mark.parametrize("how", HOW)
def test_checkpointing_saves_as_much_memory_as_without_a_watch(how: str) -> None:
    """Bytes of the blocks' values that are there when the forward has returned; the loops compare them step by step."""
    saved = {kind: train(kind, HOW[how], steps=4).found for kind in (WithoutCheckpoint, Checkpointed)}
    kept, less = ([value[2] for where, value in found if "returned" in where] for found in saved.values())
    assert all(a > 3 * b for a, b in zip(kept, less, strict=True)), (kept, less)
