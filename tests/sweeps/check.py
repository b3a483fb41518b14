"""One model of a collection: watched equals plain over two steps, and what the flow says of it."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass, field

import torch

import fxgrad
from tests.runs import assert_same_run, plain_run
from tests.sweeps.collections import Built


@dataclass
class Row:
    """What a sweep notes of a model; ``recorder`` is what observed the second step, for a ``reason``."""

    name: str
    recorder: str
    sites: int
    measured: int
    blind: dict[str, int] = field(default_factory=dict)
    reason: str = ""


def seeded(step: int) -> None:
    """Seed every stream that models draw from; ``plain_run`` seeds torch itself."""
    random.seed(step)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(step)  # noqa: NPY002  # the stream that libraries draw from


def check(name: str, built: Built, steps: int = 2) -> Row:
    """Run ``steps`` plain and watched steps and compare them bit for bit.

    Raises:
        AssertionError: they differ, or a site of the loss path was not measured although a gradient came by.
    """
    model, args, kwargs, loss = built
    watched = copy.deepcopy(model)
    with fxgrad.watch(watched) as watch:
        for step in range(steps):
            seeded(step)
            want = plain_run(model, args, kwargs, loss, seed=step)
            assert want.error is None, f"{name} itself raises {want.error}"
            seeded(step)
            assert_same_run(plain_run(watched, args, kwargs, loss, seed=step), want)
        flow = watch.flow()
    silent = {record.name for record in flow.parameters if not record.measured}
    assert silent == {n for n, p in watched.named_parameters(remove_duplicate=True) if p.grad is None}
    assert not any(spot.reason == "statistic_failed" for spot in flow.blind_spots)
    blind = Counter(spot.reason for spot in flow.blind_spots)
    found, reason = flow.capture.recorder, flow.capture.reason
    row = Row(name, found, len(flow.sites), sum(s.measured for s in flow.sites), dict(blind), reason)
    assert row.measured > 0
    del want, watched, model
    torch.manual_seed(0)
    return row
