"""What observing costs in kernels and memory, and that what happens to a gradient after its hook does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.record.hooks import Hook
from tests.record.by_hand import check


def operators(run: Callable[[], Any]) -> Counter[str]:
    """The operators that run, without those inside of others.  A TorchDispatchMode would not see ours."""
    with profile(activities=[ProfilerActivity.CPU]) as report:
        run()
    found: Counter[str] = Counter()
    for event in report.events():
        outer = event.cpu_parent
        if event.name.startswith("aten::") and not (outer is not None and outer.name.startswith("aten::")):
            found[event.name.removeprefix("aten::")] += 1
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def extra_ops(statistics: Any, dtype: torch.dtype = torch.float32) -> tuple[Counter[str], fxgrad.GradientFlow]:
    """The operators that a watched backward runs besides those of the plain one."""
    model, x = net().to(dtype), torch.randn(3, 4, dtype=dtype)

    def backward() -> Counter[str]:
        loss = model(x).square().mean()
        return operators(loss.backward)

    backward()
    plain = backward()
    with fxgrad.watch(model, statistics=statistics) as watch:
        for _ in range(3):
            backward()
        return backward() - plain, watch.flow()


@pytest.mark.usefixtures("python_recorder")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_kernel_a_gradient_at_norm_and_a_copy_of_the_slots(dtype: torch.dtype) -> None:
    extra, flow = extra_ops("norm", dtype)
    measured = sum(s.measured for s in flow.sites) + sum(p.measured for p in flow.parameters)
    assert measured == 5 + 6
    assert extra == {"linalg_vector_norm": measured, "clone": 2}


@pytest.mark.usefixtures("python_recorder")
def test_one_copy_a_small_gradient_at_full_and_one_reduction_for_all() -> None:
    extra, flow = extra_ops("full")
    measured = sum(s.measured for s in flow.sites) + sum(p.measured for p in flow.parameters)
    assert extra["copy_"] == measured
    assert extra["stack"] == 1  # the columns of all gradients, in plain torch
    assert sum(count for name, count in extra.items() if name not in ("to", "slice")) < 50  # which compute nothing


class Twisted(nn.Module):
    """Hands on gradients that somebody changes in place after our hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.mul_(-3.0))
        return y.tanh()


@pytest.mark.parametrize("statistics", ["norm", "full"])
@pytest.mark.parametrize("capture", ["eager", "auto"])
def test_a_gradient_that_is_changed_later(statistics: Any, capture: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), Twisted()), torch.ones(2, 3)
    with fxgrad.watch(model, statistics=statistics, capture=capture) as watch:
        for step in range(4):
            given = torch.full((2, 3), 1.0 + step)
            model.zero_grad()
            model(x).backward(gradient=given)
            given.fill_(99)
            model[0].weight.grad.fill_(99)
            flow = watch.flow()
            assert flow.site("1/tanh").l2_norm == pytest.approx((1.0 + step) * 6**0.5)
            # Ours sees the gradient of the product before the user's hook changes it: -3 of that, 2 of the product.
            assert flow.site("0").l2_norm == pytest.approx(6 * flow.site("1/mul").l2_norm, rel=1e-6)


def test_full_is_what_the_gradients_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 600), nn.ReLU(), nn.Linear(600, 300), nn.Linear(300, 1))
    with fxgrad.watch(model, statistics="full") as watch:
        for rows in (3, 3, 50, 3):
            model.zero_grad()
            model(torch.randn(rows, 40)).square().mean().backward()
            for record, parameter in zip(watch.flow().parameters, model.parameters(), strict=True):
                assert parameter.grad is not None
                assert record.statistics is not None
                check(record.statistics, parameter.grad)


def test_gradients_of_several_dtypes_and_a_reentrant_backward() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            half = checkpoint(self.a, x.requires_grad_(), use_reentrant=True).bfloat16()
            return self.b(half.float().double()).sum()

    for statistics in ("norm", "full"):
        model = Mixed()
        with fxgrad.watch(model, statistics=statistics, capture="eager") as watch:  # type: ignore[arg-type]
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 3)).backward()
                for record, parameter in zip(watch.flow().parameters, model.parameters(), strict=True):
                    want = parameter.grad.double().norm().item()  # type: ignore[union-attr]
                    assert record.l2_norm == pytest.approx(want, rel=1e-6)


@pytest.mark.usefixtures("python_recorder")
def test_a_batch_that_cannot_be_reduced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        message = "out of luck"
        raise RuntimeError(message)

    monkeypatch.setattr("fxgrad.record.recorder.columns", broken)
    model = net()
    with fxgrad.watch(model, statistics="full") as watch:
        model(torch.randn(3, 4)).sum().backward()
        spots = {spot.key: spot for spot in watch.flow().blind_spots}
    assert spots["4"].reason == "statistic_failed"
    assert "out of luck" in spots["4"].detail


def test_a_hook_without_a_site_is_silent() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        for _ in range(2):
            loss = model(torch.randn(3, 4)).sum()
            silent = [watch.engine.recorder.hook(watch.engine._live[-1](), -1) for _ in range(2)]
            assert isinstance(silent[0], Hook)
            loss.register_hook(silent[0])
            loss.backward()
        assert watch.flow().site("4").measured


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_every_gradient_of_a_differentiated_backward(statistics: Any) -> None:
    model, x = net(), torch.randn(3, 4)
    with fxgrad.watch(model, statistics=statistics) as watch:
        for _ in range(3):
            out = model(x).square().sum()
            slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
            for record, slope in zip(watch.flow().parameters, slopes, strict=True):
                assert slope.grad_fn is not None
                assert record.l2_norm == pytest.approx(slope.norm().item(), rel=1e-6)
