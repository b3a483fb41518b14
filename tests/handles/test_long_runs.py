"""A long training run: no more tensors, objects and open files after many steps than after a few."""

from __future__ import annotations

import collections
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxgrad
from tests.fidelity.loops import Loop
from tests.fidelity.loops_of_precision import AccumulatedScaled, Single
from tests.fidelity.loops_of_recomputing import Checkpointed
from tests.fidelity.loops_of_steps import (
    Alternating,
    GradientPenalty,
    InBackward,
    Raising,
    SeveralBackwards,
    ShapesChange,
)

KINDS = [
    Single, AccumulatedScaled, Checkpointed, Alternating, GradientPenalty, InBackward, Raising, SeveralBackwards,
    ShapesChange,
]  # fmt: skip
WARM = 300  # until a history of 128 is full
WARM_OF: dict[type[Loop], int] = {Raising: 800}  # one optimizer's step in six
HANDLES = Path("/proc/self/fd")


class Count:
    """What is there now."""

    def __init__(self) -> None:
        gc.collect()
        objects = gc.get_objects()
        self.tensors = sum(issubclass(type(one), Tensor) for one in objects)
        self.ours = collections.Counter(
            type(one).__qualname__ for one in objects if str(type(one).__module__).startswith("fxgrad")
        )
        self.all = len(objects)
        self.handles = len(os.listdir(HANDLES)) if HANDLES.exists() else 0  # noqa: PTH208  # a file that is gone meanwhile


def grown(kind: type[Loop], steps: int, options: dict[str, Any]) -> None:
    """Train for so many steps behind the first ones; nothing is more than before."""
    torch.manual_seed(0)
    loop = kind()
    watches = [fxgrad.watch(model, **told, **options) for model, told in loop.watched().values()]
    try:
        warm = WARM_OF.get(kind, WARM)
        for i in range(warm):
            loop.step(i)
        before = Count()
        for i in range(steps):
            loop.step(warm + i)
        after = Count()
    finally:
        for watch in watches:
            watch.remove()
    assert all(len(watch.history) >= 100 for watch in watches)
    more = after.ours - before.ours
    assert sum(more.values()) <= SLACK, more
    assert after.tensors <= before.tensors + SLACK
    assert after.handles <= before.handles
    assert after.all <= before.all + 200  # Python's own go up and down by as many


SLACK = 30  # what is alive differs by an event or two from step to step; one tensor a step would be hundreds


@pytest.mark.parametrize("options", [{}, {"native": False}], ids=["native", "python"])
@pytest.mark.parametrize("kind", [Single])
def test_nothing_grows_in_three_hundred_steps(kind: type[Loop], options: dict[str, Any]) -> None:
    grown(kind, 300, options)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"native": False}, {"statistics": "full", "forward": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows_in_two_thousand_steps(kind: type[Loop], options: dict[str, Any]) -> None:
    grown(kind, 2000, options)
