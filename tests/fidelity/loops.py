"""Whole training loops: each trains plain, and watched, and is compared after every step; the flows with plain torch.

A loop brings everything that training changes: models, optimizers, scalers, schedulers, averages.  What plain torch
says of its gradients is taken down in a run of its own, by a tensor hook on each parameter.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow
from tests.fidelity.harness import differences, snapshot, switches_kept

LOOPS: list[type[Loop]] = []
Found = list[tuple[str, Any]]
Norms = dict[str, list[float]]


class Loop:
    """A training loop.  What its ``__init__`` puts on ``self`` and has a ``state_dict``, or is a tensor, is compared.

    Attributes:
        steps: how many are run.
        events: how many backward events a step has, on each watched model; None where ``check`` counts them.
        by_parameter: whether a parameter's gradient comes whole, so that its hook in plain torch sees what we see.
        python_only: why the native recorder has no part in it, if so.
    """

    steps = 50
    events: int | None = 1
    by_parameter = True

    def __init__(self) -> None:
        self.model: nn.Module = small()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def watched(self) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        """The models that are watched, each with what its watch is told."""
        return {"model": (self.model, {"optimizer": self.optimizer})}

    def change(self, i: int) -> None:
        """Before step ``i``: what becomes another parameter, or begins to train."""

    def step(self, i: int) -> Any:
        """One step, and what is to be compared of it."""
        raise NotImplementedError

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        """What the flows have to say."""


def loop(kind: type[Loop]) -> type[Loop]:
    """Put a loop into the table."""
    LOOPS.append(kind)
    return kind


def small(dropout: float = 0.2) -> nn.Sequential:
    """A model with batch statistics and random numbers."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batch(i: int, *shape: int) -> Tensor:
    """The inputs of step ``i``; they draw nothing from the global stream."""
    return torch.randn(*(shape or (5, 6)), generator=torch.Generator().manual_seed(1000 + i))


@dataclass
class Trained:
    """What a run of a loop left behind.

    Attributes:
        found: after each step, what is compared.
        flows: of each watched model, all of them, also those that a history has let go.
        norms: of what arrived at each parameter, in order, in the run with hooks.
    """

    found: Found = field(default_factory=list)
    flows: dict[str, list[GradientFlow]] = field(default_factory=dict)
    norms: dict[str, Norms] = field(default_factory=dict)


def train(kind: type[Loop], options: Mapping[str, Any] | None, *, hooked: bool = False, steps: int = 0) -> Trained:
    """Run a loop plain, watched where there are ``options``, or with hooks of plain torch on its parameters."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    made = Trained()
    with switches_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, in either run
        this = kind()
        watches = {}
        if options is not None:
            watches = {name: fxgrad.watch(m, **told, **options) for name, (m, told) in this.watched().items()}
        seen: set[int] = set()
        for i in range(steps or kind.steps):
            this.change(i)
            if hooked:
                _hook(this, made.norms, seen)
            made.found += [(f"step {i}: {what}", value) for what, value in _one(this, i)]
            if i % 25 == 24 or i + 1 == (steps or kind.steps):
                for name, watch in watches.items():
                    _keep(made.flows.setdefault(name, []), watch.history)
        for watch in watches.values():
            watch.remove()
    return made


def _keep(kept: list[GradientFlow], history: Sequence[GradientFlow]) -> None:
    """Add the flows that are new; those of before are taken as they are known by now."""
    known = {(flow.event.backward, flow.event.forward): at for at, flow in enumerate(kept)}
    for flow in history:
        at = known.get((flow.event.backward, flow.event.forward))
        if at is None:
            kept.append(flow)
        else:
            kept[at] = flow


def _hook(this: Loop, norms: dict[str, Norms], seen: set[int]) -> None:
    for model_name, (model, _) in this.watched().items():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                own = norms.setdefault(model_name, {}).setdefault(name, [])
                parameter.register_hook(lambda g, own=own: own.append(_norm(g)))  # type: ignore[no-untyped-call]


def _norm(gradient: Tensor) -> float:
    dense = gradient.detach()
    return float(torch.linalg.vector_norm((dense.to_dense() if dense.is_sparse else dense).double()))


def _one(this: Loop, i: int) -> Found:
    found: Found = [("returned", snapshot(this.step(i)))]
    for name, value in vars(this).items():
        if isinstance(value, nn.Module):
            found += [(f"gradient of {name}.{n}", snapshot(p.grad)) for n, p in value.named_parameters()]
            found.append((f"flags of {name}", [p.requires_grad for p in value.parameters()]))
            found.append((f"modes of {name}", [module.training for module in value.modules()]))
        if hasattr(value, "state_dict"):
            found.append((name, snapshot(value.state_dict())))
        elif isinstance(value, (Tensor, list, int, float)):
            found.append((name, snapshot(value)))
    found.append(("switches", (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    streams = snapshot(torch.get_rng_state()), random.getstate(), snapshot(np.random.get_state())
    return [*found, ("random streams", streams)]


def assert_same_training(kind: type[Loop], options: Mapping[str, Any], steps: int = 0) -> Trained:
    """The same bits after every step; every backward an event of its own; norms as plain torch has them."""
    plain, watched = train(kind, None, steps=steps), train(kind, options, steps=steps)
    differ = differences(plain.found, watched.found)
    assert not differ[:5]
    count = steps or kind.steps
    for name, flows in watched.flows.items():
        assert [f.event.backward for f in flows] == sorted(f.event.backward for f in flows)
        if kind.events is not None:
            assert len(flows) == kind.events * count, name
    if kind.by_parameter:
        hooked = train(kind, None, hooked=True, steps=steps)
        for name, flows in watched.flows.items():
            _compare_norms(flows, hooked.norms[name], name)
    return watched


def _compare_norms(flows: Sequence[GradientFlow], want: Norms, model: str) -> None:
    got: Norms = {}
    for flow in {flow.event.backward: flow for flow in flows}.values():  # of several forward calls in a pass: one
        for record in flow.parameters:
            if record.statistics is not None:  # at ``full``, NaN and Inf are counted and left out of the norm
                norm = math.inf if record.statistics.nonfinite else record.statistics.l2_norm
                got.setdefault(record.name, []).append(norm)
    for name, arrived in want.items():
        mine, norms = got.get(name, []), [norm if math.isfinite(norm) else math.inf for norm in arrived]
        assert len(mine) == len(norms), f"{model}.{name}: {len(mine)} gradients recorded, {len(norms)} arrived"
        assert mine == pytest.approx(norms, rel=1e-3, abs=1e-12), f"{model}.{name}"
