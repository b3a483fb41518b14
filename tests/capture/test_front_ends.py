"""Both front ends on the zoo: nothing changes, and they say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError, OptionError
from tests import models, oracle
from tests.runs import assert_same_run, plain_run


def flow_of(case: models.Case, capture: Any) -> fxgrad.GradientFlow:
    model, args, kwargs = case.build()
    torch.manual_seed(0)
    return fxgrad.gradient_flow(
        model, args, kwargs, loss=case.loss, capture=capture, statistics="norm", sites="node", forward=False
    )


@pytest.mark.filterwarnings("ignore")  # what the models themselves make torch warn of
@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("case", models.cases(models.HEALTHY))
def test_nothing_changes(case: models.Case, capture: Any) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, capture=capture) as watch:
        for step in range(3):
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
        assert watch.flow().sites


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("case", models.cases(models.RAISING))
def test_what_raises_raises_the_same(case: models.Case, capture: Any) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, capture=capture):
        for step in range(2):
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
            assert want.error is not None


@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_keys_and_statistics_do_not_depend_on_the_front_end(case: models.Case) -> None:
    eager, symbolic = flow_of(case, "eager"), flow_of(case, "symbolic")
    assert {s.id: s.statistics for s in eager.sites} == {s.id: s.statistics for s in symbolic.sites}
    assert [s.id for s in eager.sites] == [s.id for s in symbolic.sites]
    assert set(eager.edges) == set(symbolic.edges)
    assert eager.calls == symbolic.calls
    assert eager.parameters == symbolic.parameters
    assert eager.blind_spots == symbolic.blind_spots


def test_at_least_thirty_models_are_compared() -> None:
    assert len(models.SYMBOLIC) >= 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", models.cases(models.EAGER_ONLY))
def test_what_a_trace_would_lose_is_refused(case: models.Case) -> None:
    model, args, kwargs = case.build()
    with pytest.raises(CaptureError, match=r"cannot be traced symbolically: .+"):
        fxgrad.gradient_flow(model, args, kwargs, loss=case.loss, capture="symbolic")


@pytest.mark.parametrize("capture", ["eager", "symbolic"])
@pytest.mark.parametrize("case", models.cases(models.TWINS))
def test_sites_equal_the_oracle(case: models.Case, capture: Any) -> None:
    if capture == "symbolic" and not case.symbolic_ok:
        pytest.skip("no trace of this model can be right")
    model, args, kwargs = case.build()
    assert case.twin is not None
    want = oracle.site_gradients(case.twin, model, args, case.loss, kwargs)
    flow = flow_of(case, capture)
    assert oracle.compare({s.id: s.l2_norm for s in flow.sites}, want, unmeasurable=case.unmeasurable) == []


def test_hooks_see_real_tensors_as_often_and_in_the_same_order() -> None:
    def run(capture: str | None) -> list[tuple[str, str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
        log: list[tuple[str, str]] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _m, _i, n=name: log.append((n, "pre")))
            module.register_forward_hook(lambda _m, _i, o, n=name: log.append((n, type(o).__name__)))
            module.register_full_backward_hook(lambda _m, g, _o, n=name: log.append((n, str(g[0] is None))))
        watch = fxgrad.watch(model, capture=capture) if capture else None  # type: ignore[arg-type]
        for _ in range(3):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        if watch is not None:
            watch.remove()
        return log

    want = run(None)
    assert run("auto") == want
    assert run("eager") == want


def test_every_node_has_a_line_of_the_users_code() -> None:
    class Here(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc(x))

    first = Here.forward.__code__.co_firstlineno
    for capture in ("eager", "symbolic"):
        flow = fxgrad.gradient_flow(Here(), torch.ones(1, 2), capture=capture)  # type: ignore[arg-type]
        sources = {node.key: node.source for node in flow.nodes}
        assert sources["fc"] == sources["/tanh"] == f"{__file__}:{first + 1}"


def test_the_report_says_which_recorder_ran_and_why() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    with fxgrad.watch(model, native=False) as watch:
        for _ in range(3):
            model(x).sum().backward()
            capture = watch.flow().capture
            assert (capture.front_end, capture.recorder, capture.reason) == ("eager", "python", "native=False")
    assert fxgrad.gradient_flow(model, x, capture="eager").capture.reason == "asked for"
    module = fxgrad.instrument(model)
    module(x).sum().backward()
    assert module.flow().capture.front_end == "symbolic"
    assert "same calls, with the same constants" in module.flow().capture.reason


@pytest.mark.parametrize(
    "act", [fxgrad.watch, lambda m, **o: fxgrad.rewrite(m, fxgrad.rules.scale(2.0, fxgrad.rules.nodes()), **o)]
)
def test_a_trace_never_runs_in_place_of_the_model(act: Any) -> None:
    with pytest.raises(OptionError, match=r"fxgrad\.instrument.*fxgrad\.gradient_flow.*'symbolic'"):
        act(nn.Linear(2, 2), capture="symbolic")


def test_nothing_runs_twice() -> None:
    calls: list[int] = []

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, Tensor):
                calls.append(1)
            return x * 2

    model = nn.Sequential(nn.Linear(2, 2), Once())
    with fxgrad.watch(model):
        model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 1
    fxgrad.gradient_flow(model, torch.ones(1, 2))
    assert len(calls) == 2


def test_a_lightning_module() -> None:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    flow = fxgrad.gradient_flow(Lit(), torch.randn(2, 4))
    assert flow.site("net.1").measured


@pytest.mark.filterwarnings("ignore")
def test_a_ddp_wrapped_module(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        wrapped = nn.parallel.DistributedDataParallel(inner)
        x = torch.randn(3, 4)
        with fxgrad.watch(wrapped) as watch:
            for _ in range(3):
                wrapped.zero_grad()
                wrapped(x).sum().backward()
        plain(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), inner.parameters(), strict=True))
        assert watch.flow().site("module.1").measured
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_what_no_front_end_can_see_is_one_external_node_whose_inside_is_blind() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(self.script(x)).sum()

    flow = fxgrad.gradient_flow(Outer(), torch.randn(2, 4))
    external = [node.key for node in flow.nodes if node.op == "external"]
    assert external == ["script", "/Double"]
    assert flow.site("/Double").measured
    assert flow.site("script").l2_norm == pytest.approx(2 * flow.site("/Double").l2_norm)
    assert {spot.key for spot in flow.blind_spots if spot.reason == "inside_leaf"} == set(external)
