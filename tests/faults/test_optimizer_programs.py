"""The faults of the optimizer, and the parameters that get exact zeros in every step, shown in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.catalogue import FAULTS
from tests.faults.program import SEEDS, Built, Program
from tests.faults.test_programs import named, of_victims

#: In the sweep: these check the programs themselves, which change when somebody changes them only.
pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]
HALF = (torch.float16, torch.bfloat16)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients_seen(built: Built) -> dict[str, list[Tensor]]:
    """What each backward pass of the run brings to each parameter."""
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in built.model.named_parameters()}
    for name, parameter in built.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: seen[name].append(gradient.detach().clone()))
    built.train(built.optimized())
    return seen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "stuck", "unfed", "cut", "single", "unrouted"))
def test_nothing_but_zeros_in_every_step_and_so_nothing_moves(program: Program, seed: int) -> None:
    built = program.build(seed)
    before = state_of(built.model)
    seen = gradients_seen(built)
    assert built.steps >= 14
    for name in of_victims(program, before):
        assert len(seen[name]) == built.steps or program.kind == "unrouted"
        assert not any(gradient.any() for gradient in seen[name]), name
        assert torch.equal(built.model.get_parameter(name), before[name])
    others = [name for name in before if not name.startswith(program.victims) and seen[name]]
    assert any(gradient.any() for name in others for gradient in seen[name])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "misses", "idle"))
def test_gradients_arrive_and_nothing_moves(program: Program, seed: int) -> None:
    built = program.build(seed)
    optimizer = built.optimized()  # may replace a part of the model
    start = state_of(built.model)
    arrived = dict.fromkeys(start, 0.0)
    for name, parameter in built.model.named_parameters():
        parameter.register_hook(lambda g, name=name: arrived.update({name: arrived[name] + float(g.float().norm())}))
    built.train(optimizer)
    for name in of_victims(program, start):
        assert arrived[name] != 0, name
        moved = float((built.model.get_parameter(name) - start[name]).norm())
        assert moved <= (1e-2 * float(start[name].norm()) + 1e-5 if "clipped" in program.name else 0.0), name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "uncleared"))
def test_what_a_step_used_is_still_there(program: Program, seed: int) -> None:
    built = program.build(seed)
    optimizer = built.optimized()
    left: list[float] = []
    parameter = next(built.model.head.parameters())
    parameter.register_hook(lambda _: left.append(0.0 if parameter.grad is None else float(parameter.grad.norm())))
    built.train(optimizer)
    assert left[0] == 0 and all(norm > 0 for norm in left[1:]) and len(left) == built.steps


def one_step(built: Built) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters before the first step, and the gradients that it takes."""
    optimizer: Any = built.optimized()
    before = state_of(built.model)
    built.loss_at(0).backward()
    gradients = {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}
    optimizer.step()
    return before, gradients


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "rounding"))
def test_most_entries_stay_as_they_are_though_their_gradient_is_not_zero(program: Program, seed: int) -> None:
    built = program.build(seed)
    before, gradients = one_step(built)
    lost = total = 0
    for name, parameter in built.model.named_parameters():
        assert parameter.dtype in HALF
        active = gradients[name] != 0
        lost += int((active & (parameter == before[name])).sum())
        total += int(active.sum())
    assert lost > 0.8 * total > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "decay"))
def test_the_decay_takes_the_weights(program: Program, seed: int) -> None:
    built = program.build(seed)
    before = state_of(built.model)
    built.train(built.optimized())
    sizes = [float(p.norm() / before[n].norm()) for n, p in built.model.named_parameters() if p.ndim > 1]
    assert max(sizes) < 0.6 and all(map(math.isfinite, sizes))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "spoilt"))
def test_finite_gradients_and_a_step_that_makes_nan(program: Program, seed: int) -> None:
    built = program.build(seed)
    before, gradients = one_step(built)
    assert all(value.isfinite().all() for value in (*before.values(), *gradients.values()))
    assert any(not p.isfinite().all() for p in built.model.parameters())
