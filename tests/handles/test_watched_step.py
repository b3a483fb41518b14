"""What a watched step costs and keeps, and gradients of unusual kinds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxgrad
from fxgrad.errors import NoFlowError
from tests.handles.test_watching import net, train

# ---- nothing in the step waits for the device, and no gradient is kept --------------------------------------------


def events_of_a_step(model: nn.Module, x: Tensor) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as report:
        model(x).square().mean().backward()
    return [event.name for event in report.events()]


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_no_host_sync_in_the_step(statistics: Any) -> None:
    model, x = net(), torch.randn(6, 4)
    plain = events_of_a_step(model, x)
    with fxgrad.watch(model, statistics=statistics):
        for _ in range(2):
            events_of_a_step(model, x)
        watched = events_of_a_step(model, x)
    for sync in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal"):
        assert watched.count(sync) == plain.count(sync), sync


@pytest.mark.usefixtures("python_recorder")
def test_one_reduction_per_site_and_no_other_kernel_at_level_norm() -> None:
    model, x = net(), torch.randn(6, 4)
    plain = events_of_a_step(model, x)
    with fxgrad.watch(model) as watch:
        for _ in range(2):
            events_of_a_step(model, x)
        watched = events_of_a_step(model, x)
    flow = watch.flow()
    probed = sum(s.measured and s.derived_from is None for s in flow.sites)
    measured = probed + sum(p.measured for p in flow.parameters)
    assert watched.count("aten::linalg_vector_norm") - plain.count("aten::linalg_vector_norm") == measured
    # At the end of the event the two small slot buffers (sites, parameters) are copied on the device.
    assert watched.count("aten::clone") - plain.count("aten::clone") == 2


def test_reading_copies_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    copies: list[str] = []
    original = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "cpu" in map(str, args):
            copies.append(str(self.shape))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    with fxgrad.watch(model, statistics="full") as watch:
        train(model, 2)
        assert copies == []
        watch.flow()
        assert len(copies) == 1
        watch.flow()
        assert len(copies) == 1


def test_no_gradient_outlives_its_hook() -> None:
    seen: list[weakref.ref[Tensor]] = []
    model = net()

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda g: seen.append(weakref.ref(g)))
            return x

    model.b = nn.Sequential(model.b, Spy())
    with fxgrad.watch(model, statistics="full"):
        train(model, 2)
        gc.collect()
        assert seen
        assert all(reference() is None for reference in seen)


def test_the_graph_is_freed_after_the_backward() -> None:
    model = net()
    with fxgrad.watch(model):
        out = model(torch.randn(6, 4))
        reference = weakref.ref(out)
        out.sum().backward()
        del out
        gc.collect()
        assert reference() is None


# ---- gradients of unusual kinds ------------------------------------------------------------------------------------


def test_create_graph_and_a_gradient_penalty() -> None:
    model, x = net().eval(), torch.randn(6, 4, requires_grad=True)

    def penalty(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (slope.square().sum() + out.square().mean()).backward()
        return [p.grad.clone() for p in m.parameters()]

    want = penalty(model)
    with fxgrad.watch(model) as watch:
        assert all(map(torch.equal, penalty(model), want))
    assert [flow.event.backward for flow in watch.history] == [0, 1]
    module = fxgrad.instrument(model)
    for number in (1, 2):
        assert all(map(torch.equal, penalty(module), want))
        assert len(module.history) == 2 * number
    module.remove()
    assert not x._backward_hooks


def test_sparse_embedding_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    ids = torch.tensor([[1, 1, 4]])
    for statistics in ("norm", "full"):
        with fxgrad.watch(model, statistics=statistics) as watch:  # type: ignore[arg-type]
            model.zero_grad()
            model(ids).square().sum().backward()
        record = watch.flow().parameters[0]
        dense = model[0].weight.grad.to_dense()
        assert record.l2_norm == pytest.approx(dense.norm().item(), rel=1e-6)
        if statistics == "full":
            assert record.zero_count == (dense == 0).sum().item()
            assert record.statistics.numel == 30


def test_functional_transforms_run_plainly() -> None:
    model, x = net().eval(), torch.randn(5, 4)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (row[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    want = per_sample(parameters, x)
    with fxgrad.watch(model) as watch:
        got = per_sample(parameters, x)
        assert all(torch.equal(got[name], want[name]) for name in want)
        with pytest.raises(NoFlowError):
            watch.flow()


def test_functional_call_with_other_parameters() -> None:
    model, x = net().eval(), torch.randn(5, 4)
    other = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
    want = torch.func.functional_call(model, other, (x,))
    with fxgrad.watch(model) as watch:
        for _ in range(3):
            got = torch.func.functional_call(model, other, (x,))
            assert torch.equal(got, want)
            got.sum().backward()
        assert watch.flow().site("head").measured


@pytest.mark.usefixtures("python_recorder")
def test_a_gradient_that_cannot_be_reduced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()

    def broken(*_: Any) -> None:
        message = "no such kernel"
        raise RuntimeError(message)

    monkeypatch.setattr("fxgrad.record.staging.Page.put", broken)
    with fxgrad.watch(model, statistics="full") as watch:
        train(model, 1)
    spots = {spot.key: spot for spot in watch.flow().blind_spots}
    assert spots["head"].reason == "statistic_failed"
    assert "no such kernel" in spots["head"].detail
    assert {record.reason for record in watch.flow().parameters} == {"statistic_failed"}


# ---- norms that the accumulator cannot hold ------------------------------------------------------------------------


def test_what_norm_cannot_tell_is_measured_in_full_next_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with fxgrad.watch(model) as watch:
        for scale in (1e-30, 1e-30):
            (model(torch.randn(3, 4)).sum() * scale).backward()
            flow = watch.flow()
            if flow.event.backward == 0:
                assert flow.site("1").statistics.outside_range
    site = watch.flow().site("1")
    assert site.statistics.level == "full"
    assert site.l2_norm == pytest.approx(1e-30 * 3**0.5, rel=1e-5)
    record = next(r for r in watch.flow().parameters if r.name == "1.bias")
    assert record.l2_norm == pytest.approx(3e-30, rel=1e-5)
