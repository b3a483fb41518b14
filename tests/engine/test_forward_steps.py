"""Forward statistics in a step: they change nothing, wait for nothing, and are refused where they cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxgrad
from fxgrad.errors import OptionError
from tests import models
from tests.engine.test_forward_values import assert_value
from tests.handles.test_watched_step import events_of_a_step
from tests.handles.test_watching import net, train
from tests.runs import assert_same_run, plain_run

# ---- nothing changes ---------------------------------------------------------------------------------------------


def near(measured: Any) -> Any:
    """The norm of a site or edge, to the error of a float32 sum."""
    statistics = measured.statistics
    return statistics and (statistics.numel, pytest.approx(statistics.l2_norm, rel=1e-5, abs=1e-20, nan_ok=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("case", models.cases(models.HEALTHY))
def test_nothing_changes(case: models.Case, capture: Any) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, capture=capture, forward=True, sites="edge", channels=True) as watch:
        for step in range(3):
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
        flow = watch.flow()
    plain, _, _ = case.build()
    with fxgrad.watch(plain, capture=capture, sites="edge") as without:
        for step in range(3):
            plain_run(plain, args, kwargs, case.loss, seed=step)
        other = without.flow()
    # With the native library the two runs are measured by two recorders, which add up in another order.
    assert {s.id: near(s) for s in flow} == {s.id: near(s) for s in other}
    assert {(e.producer, e.output_position, e.consumer): near(e) for e in flow.edges} == {
        (e.producer, e.output_position, e.consumer): near(e) for e in other.edges
    }
    assert flow.blind_spots == other.blind_spots
    assert [s.derived_from for s in flow] == [s.derived_from for s in other]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", models.cases(models.RAISING))
def test_what_raises_raises_the_same(case: models.Case) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, forward=True):
        for step in range(2):
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
            assert want.error is not None


@pytest.mark.usefixtures("python_recorder")
def test_a_value_that_cannot_be_reduced_does_not_stop_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net().eval(), torch.randn(6, 4)
    want = model(x)

    def broken(*_: Any) -> None:
        message = "no such kernel"
        raise RuntimeError(message)

    monkeypatch.setattr("fxgrad.record.staging.Page.put", broken)
    with fxgrad.watch(model, forward=True) as watch:
        got = model(x)
        got.sum().backward()
    assert torch.equal(got, want)
    flow = watch.flow()
    assert flow.event.values
    assert all(site.value is None for site in flow)
    assert all(site.measured for site in flow if site.id != "input:x")
    assert flow.buffers == ()


class Spy(TorchFunctionMode):
    """The functions that somebody else's mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_another_mode_does_not_see_what_is_measured(capture: Any) -> None:
    model, x = net(), torch.randn(6, 4)

    def seen(*, forward: bool) -> list[str]:
        with fxgrad.watch(model, capture=capture, forward=forward):
            for _ in range(2):
                model(x).sum().backward()
            with Spy() as spy:
                model(x)
        return spy.seen

    assert seen(forward=True) == seen(forward=False)


def test_inference_mode_and_autocast_inside_of_forward() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = x.abs().max() * 1.0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.fc(x)
            return h.float() / float(scale)

    model, x = Regions(), torch.randn(2, 4)
    with fxgrad.watch(model, forward=True) as watch:
        for _ in range(3):
            model(x).sum().backward()
        flow = watch.flow()
    assert_value(flow.site("/max").value, x.abs().max(), "max")
    assert flow.site("fc").dtype == "bfloat16"
    value = flow.site("/float").value
    assert value is not None
    assert value.l2_norm == pytest.approx(model.fc(x).norm().item(), rel=1e-2)


def test_nothing_is_measured_under_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model, x = nn.Linear(2, 2), torch.ones(1, 2)
        with fxgrad.watch(model, forward=True):
            assert model(x).shape == (1, 2)
    real = nn.Linear(2, 2)
    with fxgrad.watch(real, forward=True) as watch:
        real(torch.ones(1, 2)).sum().backward()
    assert watch.flow().site("input:input").value is not None


# ---- the cost ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["eager", "auto"])
def test_no_host_sync_in_the_step(capture: Any) -> None:
    model, x = nn.Sequential(net(), nn.GELU(), nn.Linear(2, 2), nn.Sigmoid()), torch.randn(6, 4)
    plain = events_of_a_step(model, x)
    with fxgrad.watch(model, forward=True, capture=capture, channels=True):
        for _ in range(3):
            events_of_a_step(model, x)
        watched = events_of_a_step(model, x)
    for sync in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal"):
        assert watched.count(sync) == plain.count(sync), sync


def test_reading_copies_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    copies: list[str] = []
    original = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "cpu" in map(str, args):
            copies.append(str(self.shape))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    with fxgrad.watch(model, forward=True, sites="edge") as watch:
        train(model, 2)
        assert copies == []
        flow = watch.flow()
        assert len(copies) == 1
        watch.flow()
        assert len(copies) == 1
    assert any(site.activity is not None for site in flow)


def test_without_asking_nothing_is_measured() -> None:
    model, x = net(), torch.randn(6, 4)
    with fxgrad.watch(model) as watch:
        model(x).sum().backward()
        flow = watch.flow()
    for other in (
        flow,
        fxgrad.gradient_flow(model, x, forward=False),
        fxgrad.gradient_flow(model, x, statistics="norm"),
    ):
        assert not other.event.values
        assert all(site.value is None and site.activity is None for site in other)
        assert all(record.value is None for record in other.parameters)
        assert other.buffers == ()


# ---- the options -------------------------------------------------------------------------------------------------


def test_where_it_cannot_be_it_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"engine='function' takes no forward=True"):
        fxgrad.instrument(model, engine="function", forward=True)
    with pytest.raises(OptionError, match=r"forward='yes' is not known"):
        fxgrad.watch(model, forward="yes")  # type: ignore[arg-type]


def test_instrument_measures_values() -> None:
    model, x = net(), torch.randn(6, 4)
    made = fxgrad.instrument(model, forward=True)
    for _ in range(2):
        made(x).sum().backward()
    assert_value(made.flow().site("input:x").value, x, "x")


def test_a_flow_with_values_survives_a_file(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    x[0, 0] = math.inf
    flow = fxgrad.gradient_flow(net(), x)
    assert any(site.activity is not None for site in flow)
    flow.to_json(tmp_path / "flow.json")
    assert fxgrad.load(tmp_path / "flow.json") == flow
