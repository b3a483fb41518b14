"""What happens to a gradient while it waits for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.record import parked
from fxgrad.record.parked import BOUND, CHANGED, Norms, Parked
from tests.record.waiting import Rooms, Written, grads, mlp


class Changed(nn.Module):
    """Somebody changes the gradient in place after our hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient.mul_(-3.0))
        return y.tanh()


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_a_gradient_that_is_changed_has_no_number_and_is_not_kept_waiting_again(rooms: Rooms, statistics: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), Changed()), torch.ones(2, 3)
    with fxgrad.watch(model, statistics=statistics) as watch:
        for step in range(3):
            model(x).backward(gradient=torch.full((2, 3), 1.0))
            flow = watch.flow()
            spots = {spot.key: spot for spot in flow.blind_spots}
            if step == 0:
                assert spots["1/mul"].reason == "statistic_failed"
                assert CHANGED in spots["1/mul"].detail
            else:
                assert flow.site("0").l2_norm == pytest.approx(6 * flow.site("1/mul").l2_norm, rel=1e-6)
            assert flow.site("1/tanh").l2_norm == pytest.approx(6**0.5)
    assert len(rooms) == 3


def test_memory_that_was_freed_has_no_number() -> None:
    part, room = Written(), Parked(torch.device("cpu"), BOUND)
    kept, freed = torch.ones(4), torch.ones(4)
    for index, gradient in enumerate((kept, freed)):
        room.put(part, index, gradient, "norm")
    freed.untyped_storage().resize_(0)
    room.finish()
    assert list(part.failures) == [1]
    assert isinstance(part.readings[0][0], Norms)


def test_a_reduction_that_fails_says_so(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        message = "no such kernel"
        raise RuntimeError(message)

    monkeypatch.setattr(parked, "norms_of", broken)
    model, x = mlp()
    with fxgrad.watch(model) as watch:
        model(x).sum().backward()
        flow = watch.flow()
    assert rooms
    assert {record.reason for record in flow.parameters} == {"statistic_failed"}
    assert all("no such kernel" in spot.detail for spot in flow.blind_spots if spot.reason == "statistic_failed")


def test_a_value_with_several_consumers(rooms: Rooms) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) + self.b(y.tanh()) + y * y + y

    torch.manual_seed(0)
    model, x = Shared(), torch.randn(3, 4)
    model(x).square().sum().backward()
    want = grads(model)
    with fxgrad.watch(model) as watch:
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            assert all(map(torch.equal, grads(model), want))
            norms = [record.l2_norm for record in watch.flow().parameters]
            assert norms == pytest.approx([g.norm().item() for g in want], rel=2e-6)
    assert rooms


def test_autograd_grad_and_a_gradient_of_a_gradient(rooms: Rooms) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
    weights = list(model.parameters())
    want = torch.autograd.grad(model(x).sum(), weights)
    with fxgrad.watch(model) as watch:
        got = torch.autograd.grad(model(x).sum(), weights)
        assert all(map(torch.equal, got, want))
        assert [r.l2_norm for r in watch.flow().parameters] == pytest.approx([g.norm().item() for g in want], rel=2e-6)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert watch.flow().parameters[0].l2_norm == pytest.approx(weights[0].grad.norm().item(), rel=2e-6)
    assert rooms


def test_an_optimizer_in_the_backward(rooms: Rooms) -> None:
    model, x = mlp()
    seen: list[float] = []

    def step(parameter: Tensor) -> None:
        seen.append(parameter.grad.norm().item())
        with torch.no_grad():
            parameter.grad.data.mul_(7)  # torch counts no such change
            parameter.sub_(parameter.grad)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    with fxgrad.watch(model) as watch:
        for _ in range(2):
            seen.clear()
            model(x).square().mean().backward()
            got = [record.l2_norm for record in watch.flow().parameters]
            assert sorted(got) == pytest.approx(sorted(seen), rel=2e-6)
    for handle in handles:
        handle.remove()
    assert rooms


def test_a_site_whose_gradient_is_large_once(rooms: Rooms) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64))
    with fxgrad.watch(model):
        for rows in (5000, 2, 2):
            model(torch.randn(rows, 4)).square().mean().backward()
        assert len(rooms[1].batches) == 1
        assert [room.batches[0].result.numel() for room in rooms] == [4, 7, 7]


def test_parameters_of_the_function_engine(rooms: Rooms) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    module = fxgrad.instrument(model, engine="function")
    for _ in range(2):
        model.zero_grad()
        module(torch.randn(3, 4)).square().sum().backward()
        norms = [record.l2_norm for record in module.flow().parameters]
        assert norms == pytest.approx([p.grad.norm().item() for p in model.parameters()], rel=2e-6)
    assert rooms
