"""The dynamo front end: the backend changes nothing, and its keys are those of the other front ends."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError, NoFlowError, OptionError
from fxgrad.handles.dynamo_backend import Observer, backend
from tests import models
from tests.runs import assert_same_run, plain_run

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch.compile itself warns of
#: Sites that dynamo has no node for: it drops identities and leaves recurrent modules to Python.
ABSENT = {"two_names": {"acts.1"}}
UNPROBED = {"view_inplace": {"a"}}
LEFT_TO_PYTHON = {"lstm", "gru"}
TAKEN = [case for case in models.SYMBOLIC if case.id not in LEFT_TO_PYTHON]


def check(case: models.Case, inner: str) -> None:
    model, args, kwargs = case.build()
    plain, _, _ = case.build()
    watched, _, _ = case.build()
    torch.compiler.reset()
    observer = Observer(inner)
    call = torch.compile(model, backend=observer)
    other: Any = plain if inner == "eager" else torch.compile(plain, backend=inner)
    for step in range(2):
        want = plain_run(plain, args, kwargs, case.loss, seed=step, call=other)
        assert_same_run(plain_run(model, args, kwargs, case.loss, seed=step, call=call), want)
    assert observer.unobserved == []
    got = observer.flows(model)[-1]
    with fxgrad.watch(watched, capture="eager") as watch:
        for step in range(2):
            plain_run(watched, args, kwargs, case.loss, seed=step)
        expected = watch.flow()
    absent, unprobed = ABSENT.get(case.id, set()), UNPROBED.get(case.id, set())
    norms = {site.id: site.l2_norm for site in got.sites}
    assert [site.id for site in got.sites] == [site.id for site in expected.sites if site.id not in absent]
    for site in expected.sites:
        if site.l2_norm is not None and site.id not in absent | unprobed:
            assert norms[site.id] == pytest.approx(site.l2_norm, rel=1e-4), site.id
    between = {(edge.producer, edge.consumer.key) for edge in got.edges}
    wanted = {(e.producer, e.consumer.key) for e in expected.edges if not {e.producer, e.consumer.key} & absent}
    assert wanted <= between


@pytest.mark.parametrize("case", models.cases(TAKEN[::3]))
def test_keys_and_norms_are_those_of_eager(case: models.Case) -> None:
    check(case, "eager")


@pytest.mark.sweep
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", models.cases(TAKEN))
def test_every_model(case: models.Case, inner: str) -> None:
    check(case, inner)


class Broken(nn.Module):
    """A graph break in the middle, for a branch that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h * 2 if h.sum() > 1e9 else h * 3
        return self.last(h).relu()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_graph_breaks_are_joined(inner: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Broken()
    call = torch.compile(model, backend=backend, options={"inner": inner})
    x = torch.randn(3, 4)
    for _ in range(2):
        call(x).sum().backward()
    flow = fxgrad.flow_of(call)
    eager = fxgrad.gradient_flow(model, x, loss=torch.sum, capture="eager", sites="node")
    assert [s.id for s in flow.sites] == [s.id for s in eager.sites]
    assert {s.id: s.l2_norm for s in flow.sites} == {
        s.id: s.l2_norm if s.l2_norm is None else pytest.approx(s.l2_norm) for s in eager.sites
    }
    assert set(flow.edges) == set(eager.edges)
    assert "2 graph(s)" in flow.capture.reason
    assert flow.capture.front_end == "dynamo"


def test_shapes_and_modes_that_change_make_new_graphs() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    observer = Observer()
    call = torch.compile(model, backend=observer)
    for step, rows in enumerate((2, 3, 5, 5)):
        model.train(step < 3)
        args = (torch.ones(rows, 4),)
        want = plain_run(model, args, None, torch.sum, seed=step)
        assert_same_run(plain_run(model, args, None, torch.sum, seed=step, call=call), want)
        flow = observer.flows(model, latest=True)[-1]
        assert flow.site("2").rms == pytest.approx(1.0)
        assert flow.site("2").shape == (rows, 1)
    assert len(observer.flows(model)) == 4


def test_models_of_one_step_are_told_apart() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    made = torch.compile(generator, backend=backend)
    judged = torch.compile(critic, backend=backend)
    judged(made(torch.ones(3, 2))).sum().backward()
    assert [s.id for s in fxgrad.flow_of(generator).sites] == ["input:input", "0", "1"]
    assert [s.id for s in fxgrad.flow_of(judged).sites] == ["input:input", "0", "1"]
    assert all(s.measured for s in fxgrad.flow_of(judged).sites)


def test_two_forwards_have_two_flows() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(2, 1))
    observer = Observer()
    call = torch.compile(model, backend=observer)
    (call(torch.ones(1, 2)) + 2 * call(torch.zeros(1, 2))).sum().backward()
    assert [flow.site("0").l2_norm for flow in observer.flows(model)] == [1.0, 2.0]


def test_parameters_are_recorded() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observer = Observer()
    torch.compile(model, backend=observer)(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert observer.flows(model)[0].parameters[0].l2_norm == 5.0


def test_gradient_flow_takes_dynamo_and_gives_the_model_back(tmp_path: Path) -> None:
    model, x = Broken(), torch.randn(3, 4)
    flow = fxgrad.gradient_flow(model, x, loss=torch.sum, capture="dynamo", statistics="norm")
    assert flow.event.loss.endswith("sum")
    file = tmp_path / "flow.json"
    flow.to_json(file)
    assert fxgrad.load(file) == flow
    assert flow.site("first").measured
    assert all(p.grad is None for p in model.parameters())


def test_a_custom_function_is_one_external_node() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(self.fc(x)).tanh()

    flow = fxgrad.gradient_flow(Net(), torch.randn(3, 2), capture="dynamo", statistics="norm")
    assert [node.op for node in flow.nodes if node.key not in ("input:x", "fc", "/tanh", "output")] == ["external"]
    assert flow.site("fc").measured


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="capture='eager'"):
        fxgrad.gradient_flow(kind(2, 2), torch.randn(3, 1, 2), capture="dynamo", statistics="norm")


def test_reentrant_checkpointing_is_refused_and_runs_unobserved() -> None:
    case = models.MODELS["checkpoint_reentrant"]
    model, args, kwargs = case.build()
    with pytest.raises(CaptureError, match="reentrant"):
        fxgrad.gradient_flow(model, args, kwargs, loss=case.loss, capture="dynamo", statistics="norm")


def test_what_dynamo_leaves_to_python_as_a_whole_is_refused() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.fc(x))
                if x.sum() > 1e9:
                    break
            return x

    with pytest.raises(CaptureError, match="capture='eager'"):
        fxgrad.gradient_flow(Loop(), torch.randn(2, 4), loss=torch.sum, capture="dynamo", statistics="norm")


def test_options() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="flow_of"):
        fxgrad.watch(model, capture="dynamo")
    with pytest.raises(OptionError, match="takes no forward=True"):
        fxgrad.gradient_flow(model, torch.ones(1, 2), capture="dynamo", statistics="norm", forward=True)
    with pytest.raises(OptionError, match="only sums"):
        fxgrad.gradient_flow(model, torch.ones(1, 2), capture="dynamo")
    with pytest.raises(OptionError, match="inner"):
        backend(None, [], options={"outer": 1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no-such"):
        Observer("no-such")(None, [])  # type: ignore[arg-type]


def test_a_backend_can_be_copied_with_the_options_of_a_compiled_model() -> None:
    made = copy.deepcopy({"backend": Observer("aot_eager")})["backend"]
    assert made.inner == "aot_eager"


def test_no_flow_yet() -> None:
    with pytest.raises(NoFlowError, match="backend='fxgrad'"):
        fxgrad.flow_of(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="no parameters"):
        fxgrad.flow_of(nn.ReLU())


def test_the_entry_point_leads_to_the_backend() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    line = text.partition("[project.entry-points.torch_dynamo_backends]")[2].splitlines()[1]
    module, _, name = line.partition('"')[2].rstrip('"').partition(":")
    assert getattr(importlib.import_module(module), name) is backend
