"""What a watch knows of each step: what it found in ``.grad``, what was carried over, who is in no group."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import StepFacts
from fxgrad.store import from_json


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return (model(x).float() - 1).square().mean()


def joint(model: nn.Module) -> float:
    """L2 norm over everything in ``.grad``."""
    return math.hypot(*(float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None))


def only(flow: fxgrad.GradientFlow) -> StepFacts:
    (step,) = flow.optimizer.steps
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_a_step_found_and_what_was_carried(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}], 0.01
    )
    want = []
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        for seed in range(4):
            carried = joint(model) if seed else 0.0
            if seed == 2:
                optimizer.zero_grad()
                carried = 0.0
            loss_of(model, seed).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            want.append((carried, joint(model)))
            optimizer.step()
    for flow, (carried, used) in zip(watch.history, want, strict=True):
        step = only(flow)
        assert step.gradient_norm == pytest.approx(used, rel=1e-3)
        assert step.carried_norm == pytest.approx(carried, rel=1e-3)
        assert (step.optimizer, step.place, step.parameters, step.learning_rates) == ("SGD", 0, 4, (0.01, 0.02))
        assert from_json(flow.to_json()) == flow


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_without_gradients_is_known(to_none: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
        step = only(watch.flow())
    assert (step.number, step.parameters, step.gradient_norm) == (0, 0 if to_none else 4, 0.0)
    assert watch.flow().optimizer.step == 0


def test_what_is_cleared_between_the_backward_passes_of_a_step_is_not_carried() -> None:
    """As by optimizers that take turns: each clears its own before its own backward pass."""
    model = net()
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.1)
    with fxgrad.watch(model, optimizer=[first, second]) as watch:
        for turn in range(6):
            optimizer = (first, second)[turn % 2]
            optimizer.zero_grad()
            loss_of(model, turn).backward()
            optimizer.step()
    steps = {(step.place, step.number): step for flow in watch.history for step in flow.optimizer.steps}
    assert sorted(steps) == [(place, number) for place in (0, 1) for number in range(3)]
    assert all(step.carried_norm == 0 for step in steps.values())


def test_gradients_that_are_assigned_are_not_carried() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        for seed in range(3):
            found = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert [only(flow).carried_norm for flow in watch.history] == [0.0] * 3


def test_who_is_in_no_group_and_who_moves_all_the_same() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    model[2].bias.requires_grad_(False)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
        facts = watch.flow().optimizer
        assert (facts.missing, facts.moved) == (("2.weight",), ())
        with torch.no_grad():
            model[2].weight.sub_(0.1)
        loss_of(model, 1).backward()
        optimizer.step()
        assert watch.flow().optimizer.moved == ("2.weight",)
        optimizer.add_param_group({"params": [model[2].weight]})
        assert watch.flow().optimizer.missing == ()


def test_groups_are_remembered_when_the_optimizer_is_gone() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    assert watch.flow().optimizer.missing == ("2.weight", "2.bias")


def test_another_tensor_under_the_name_is_not_moved() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        for seed in range(3):
            loss_of(model, seed).backward()
            optimizer.step()
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        assert watch.flow().optimizer.moved == ()
        assert "2.weight" in watch.flow().optimizer.missing


def test_an_optimizer_of_a_copy_misses_everything() -> None:
    model = net()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
        assert watch.flow().optimizer.missing == tuple(name for name, _ in model.named_parameters())
        assert only(watch.flow()).parameters == 0


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, 0.1, weight_decay=1.0),
    lambda p: torch.optim.AdamW(p, 0.1, weight_decay=2.0),
    lambda p: torch.optim.SGD(p, torch.tensor(0.1), weight_decay=0.5),
])  # fmt: skip
def test_along_the_weights(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make(model.parameters())
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
    for record in watch.flow().parameters:
        old = before[record.name].flatten().double()
        gone = old - model.get_parameter(record.name).detach().flatten().double()
        assert record.update.shrink == pytest.approx(float(F.cosine_similarity(gone, old, dim=0)), abs=1e-4)
        assert record.update.weight_decay == optimizer.param_groups[0]["weight_decay"]


def test_a_weak_decay_is_not_measured() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=1e-3)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
    assert {record.update.shrink for record in watch.flow().parameters} == {None}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_entries_that_a_step_leaves_as_they_were(dtype: torch.dtype) -> None:
    model = net(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        active = {name: p.grad != 0 for name, p in model.named_parameters()}
        optimizer.step()
    for record in watch.flow().parameters:
        if dtype is torch.float32:
            assert record.update.lost is None
            continue
        kept = (model.get_parameter(record.name) == before[record.name]) & active[record.name]
        assert record.update.lost == pytest.approx(float(kept.sum() / active[record.name].sum()))


def test_without_a_gradient_nothing_can_be_lost() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        (0 * loss_of(model, 0)).backward()
        optimizer.step()
    assert {record.update.lost for record in watch.flow().parameters} == {None}


@pytest.mark.parametrize("every", [1, 2])
def test_a_backward_through_a_gradient_is_marked(every: int) -> None:
    model = net()
    with fxgrad.watch(model, every=every) as watch:
        x = torch.randn(4, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert watch.flow().event.differentiated
    with fxgrad.watch(model) as watch:
        loss_of(model, 0).backward()
        assert not watch.flow().event.differentiated


@pytest.mark.parametrize(("margin", "met"), [(0.1, True), (1e6, False)])
def test_margins_that_are_met(margin: float, met: bool) -> None:
    near = torch.randn(4, 3)
    x = torch.cat([near, near, near + 100])

    def loss(out: Tensor) -> Tensor:
        return F.triplet_margin_loss(*out.chunk(3), margin=margin)

    torch.manual_seed(0)
    assert fxgrad.gradient_flow(nn.Linear(3, 5), x, loss=loss).event.margins_met is met
    assert not fxgrad.gradient_flow(nn.Linear(3, 5), x, loss=lambda out: 0 * out.sum()).event.margins_met
