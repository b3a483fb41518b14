"""``fxgrad.watch(scaler=)``: the loss scale of a backward pass, and the steps that a scaler skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxgrad
from fxgrad.errors import OptionError
from tests.engine.test_training_facts import OPTIMIZERS, loss_of, net, state_of, update_of


def scaled_training(watched: bool, kind: str = "sgd", bad: tuple[int, ...] = (), **options: Any) -> tuple[Any, ...]:
    """Six steps under a scaler; the losses of the steps in ``bad`` are Inf."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    watch = fxgrad.watch(model, optimizer=optimizer, scaler=scaler) if watched else None
    scales = []
    for step in range(6):
        optimizer.zero_grad(**options)
        loss = loss_of(model, step)
        scaler.scale(loss * torch.inf if step in bad else loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    return state_of(model), scaler.state_dict(), scales, watch


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adam fused"])
@pytest.mark.parametrize("options", [{}, {"set_to_none": False}])
def test_scales_and_skipped_steps(kind: str, options: dict[str, Any]) -> None:
    want, state, scales, _ = scaled_training(False, kind, (0, 2), **options)
    got, state_watched, _, watch = scaled_training(True, kind, (0, 2), **options)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert state_watched == state
    history = watch.history
    assert [flow.event.loss_scale for flow in history] == scales
    assert [flow.optimizer.step for flow in history] == [None, 0, None, 1, 2, 3]
    assert [flow.optimizer.skipped for flow in history] == [1, 1, 2, 2, 2, 2]
    assert [update_of(flow) is None for flow in history] == [True, False, True, False, False, False]


def test_skipped_steps_are_counted_among_the_last_hundred() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with fxgrad.watch(model, optimizer=optimizer, scaler=scaler, every=2) as watch:
        for step in range(130):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss * torch.inf if step in (0, 1, 2, 60, 61) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 90:
                assert watch.flow().optimizer.skipped == 5
    assert watch.flow().optimizer.skipped == 2


def test_a_scaler_is_never_set_up_by_us() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    with fxgrad.watch(model, scaler=scaler) as watch:
        loss_of(model, 0).backward()  # not scaled
        assert watch.flow().event.loss_scale is None
        assert watch.flow().optimizer is None
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.update()


def test_a_scaler_that_is_switched_off_multiplies_by_one() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with fxgrad.watch(model, scaler=scaler) as watch:
        scaler.scale(loss_of(model, 0)).backward()
    assert watch.flow().event.loss_scale == 1.0


def test_without_a_scaler_the_scale_is_unknown() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        loss_of(model, 0).backward()
    assert watch.flow().event.loss_scale is None
    assert watch.flow().optimizer is None


def test_only_scalers() -> None:
    with pytest.raises(OptionError, match=r"torch\.amp\.GradScaler"):
        fxgrad.watch(net(), scaler=2.0**16)  # type: ignore[arg-type]
