"""The function engine: nothing changes, compiled or not, and the same norms as from tensor hooks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError, NoFlowError, OptionError
from tests import models
from tests.runs import assert_same_run, plain_run

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch.compile itself warns of
#: Small models that have an in-place op, a fan-out, several outputs, a dtype or a module of their own kind.
COMPILED = ("residual_cnn", "inplace_functional", "chunk", "complex_parts", "dict_output")
#: A value that is changed in place through a view: hooks can tell the gradient before it, a probe may not stand there.
UNPROBED = {"view_inplace": {"a"}}


def norms(flow: fxgrad.GradientFlow) -> dict[str, float | None]:
    return {site.id: site.l2_norm for site in flow.sites}


def hook_norms(case: models.Case) -> dict[str, float | None]:
    model, args, kwargs = case.build()
    with fxgrad.watch(model, capture="eager") as watch:
        for step in range(2):
            plain_run(model, args, kwargs, case.loss, seed=step)
        return norms(watch.flow())


def check(case: models.Case, backend: str | None) -> None:
    model, args, kwargs = case.build()
    plain, _, _ = case.build()
    module = fxgrad.instrument(model, engine="function")
    torch.compiler.reset()
    call: Any = module if backend is None else torch.compile(module, fullgraph=True, backend=backend)
    other: Any = plain if backend is None else torch.compile(plain, fullgraph=True, backend=backend)
    for step in range(2):
        want = plain_run(plain, args, kwargs, case.loss, seed=step, call=other)
        assert_same_run(plain_run(model, args, kwargs, case.loss, seed=step, call=call), want)
    got, expected = norms(module.flow()), hook_norms(case)
    assert got.keys() == expected.keys()
    unprobed = UNPROBED.get(case.id, set())
    # A compiled backward sends zeros, not nothing, into outputs that the loss does not use.
    unreached = {
        s for s in expected if expected[s] is None and not (backend in ("aot_eager", "inductor") and got[s] == 0)
    }
    assert {s for s in got if got[s] is None} == unreached | unprobed
    for site, value in expected.items():
        if value is not None and site not in unprobed:
            assert got[site] == pytest.approx(value, rel=1e-5 if backend is None else 1e-4), site


@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_without_a_compiler(case: models.Case) -> None:
    check(case, None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_one_graph(name: str, backend: str) -> None:
    check(models.MODELS[name], backend)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_every_model_compiled(case: models.Case, backend: str) -> None:
    check(case, backend)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)
        self.alpha = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.fc(x)))
        h = h * self.alpha
        h += x
        return self.head(F.dropout(h, 0.5, self.training))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def test_the_slots_are_nobodys_business() -> None:
    model = net()
    module = fxgrad.instrument(model, engine="function")
    module(torch.ones(3, 4)).sum().backward()
    assert list(module.state_dict()) == list(model.state_dict())
    assert [id(p) for p in module.parameters()] == [id(p) for p in model.parameters()]
    assert list(module.buffers()) == list(model.buffers())


def test_events_are_never_added_up() -> None:
    module = fxgrad.instrument(net(), engine="function")
    x = torch.ones(3, 4)
    for scale in (1.0, 2.0):
        (module(x).sum() * scale).backward()
    first, second = (flow.site("head").l2_norm for flow in module.history)
    assert second == pytest.approx(2 * first)
    loss = module(x).sum() + 3 * module(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [(f.event.backward, f.event.forward) for f in module.history[2:]] == [(2, 2), (2, 3), (3, 2), (3, 3)]
    assert module.history[3].site("head").l2_norm == pytest.approx(3 * first)
    assert module.history[5].site("head").l2_norm == pytest.approx(3 * first)


def test_parameters_are_recorded() -> None:
    module = fxgrad.instrument(net(), engine="function")
    module(torch.ones(3, 4)).sum().backward()
    record = next(p for p in module.flow().parameters if p.name == "head.weight")
    assert record.l2_norm == pytest.approx(module.get_parameter("head.weight").grad.norm().item())


def test_no_flow_before_a_backward_and_none_of_autograd_grad() -> None:
    module = fxgrad.instrument(net(), engine="function")
    with pytest.raises(NoFlowError, match="no gradient flow"):
        module.flow()
    torch.autograd.grad(module(torch.ones(3, 4)).sum(), list(module.parameters()))
    with pytest.raises(NoFlowError, match=r"autograd\.grad"):
        module.flow()


def test_a_zero_gradient_is_measured_and_a_cut_is_not_reached() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self_b = self.b(x)
            return self.a(x) * 0 + self_b.detach()

    module = fxgrad.instrument(Cut(), engine="function")
    module(torch.ones(1, 2)).sum().backward()
    flow = module.flow()
    assert flow.site("a").l2_norm == 0.0
    assert flow.site("b").l2_norm is None
    assert {spot.id: spot.reason for spot in flow.blind_spots}["b"] == "detached"


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle"])
def test_copies_have_slots_and_a_recorder_of_their_own(way: str) -> None:
    module = fxgrad.instrument(net(), engine="function")
    x = torch.ones(3, 4)
    module(x).sum().backward()
    ways = {"deepcopy": copy.deepcopy, "copy": copy.copy}
    made = ways[way](module) if way in ways else pickle.loads(pickle.dumps(module))  # noqa: S301  # our own bytes
    made(x).sum().backward()
    assert len(made.history) == len(module.history) == 1
    assert [s.id for s in made.flow().sites] == [s.id for s in module.flow().sites]
    made.remove()


def test_moving_and_casting_reach_the_slots() -> None:
    module = fxgrad.instrument(net(), engine="function").double()
    module(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    assert module.flow().site("fc").dtype == "float64"
    assert module.flow().site("head").measured


def test_mode_and_shapes_that_change_are_followed_under_the_compiler() -> None:
    torch.compiler.reset()
    model, plain = net(), net()
    module = fxgrad.instrument(model, engine="function")
    call, other = torch.compile(module, fullgraph=True, backend="eager"), torch.compile(plain, backend="eager")
    for step, rows in enumerate((3, 3, 5, 5)):
        if step == 3:
            module.eval()
            plain.eval()
        args = (torch.ones(rows, 4),)
        want = plain_run(plain, args, None, torch.sum, seed=step, call=other)
        assert_same_run(plain_run(model, args, None, torch.sum, seed=step, call=call), want)
        assert module.flow().site("fc").shape == (rows, 4)
    assert len(module.history) == 4


def test_module_compile_compiles_the_calls() -> None:
    graphs: list[int] = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(len(gm.graph.nodes))
        return gm.forward

    torch.compiler.reset()
    module = fxgrad.instrument(net(), engine="function")
    module.compile(backend=backend, fullgraph=True)
    module(torch.ones(3, 4)).sum().backward()
    assert len(graphs) == 1
    assert module.flow().site("fc").measured


def test_without_gradients_the_plain_model_runs() -> None:
    model = net().eval()
    module = fxgrad.instrument(model, engine="function")
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert module.history == ()


def test_an_error_of_the_models_own_backward_stays_one() -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.fc(x)).mul_(2)

    model = Saved()
    module = fxgrad.instrument(model, engine="function")
    x = torch.ones(1, 2)
    want = plain_run(model, (x,), None, torch.sum)
    assert want.error is not None
    got = plain_run(model, (x,), None, torch.sum, call=module)
    assert got.error == want.error


def test_an_output_that_is_changed_in_place_works_compiled_and_raises_without() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.ones(2, 3)
    module = fxgrad.instrument(model, engine="function")
    want = torch.autograd.grad(model(x).mul_(2).sum(), list(model.parameters()))
    torch.compile(module, fullgraph=True, backend="aot_eager")(x).mul_(2).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
    with pytest.raises(RuntimeError, match="modified inplace"):
        module(x).mul_(2)


class OtherName(nn.Module):
    """The base of a changed view is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        first = h[:, :2]
        first.mul_(2)
        return torch.tanh(h).sum()


def test_where_another_name_is_read_later_there_is_no_probe() -> None:
    model, plain = OtherName(), OtherName()
    plain.load_state_dict(model.state_dict())
    module = fxgrad.instrument(model, engine="function")
    args = (torch.ones(3, 4),)
    want = plain_run(plain, args, None, torch.sum)
    assert_same_run(plain_run(model, args, None, torch.sum, call=module), want)
    flow = module.flow()
    spots = {spot.id: spot for spot in flow.blind_spots}
    assert spots["fc"].reason == "no_probe"
    assert "other names of its memory" in spots["fc"].detail
    assert flow.site("/tanh").measured


def test_named_tuples_and_recurrent_modules_keep_their_types() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Any:
            y, (h, _) = self.lstm(x)
            top, _ = y.max(-1)
            first, _ = y.sort(-1)
            return top.sum() + h.sum() + first[0].sum()

    model = Several()
    module = fxgrad.instrument(model, engine="function")
    module(torch.randn(3, 2, 4)).backward()
    flow = module.flow()
    assert flow.site("lstm[0]").measured and flow.site("lstm[1][0]").measured
    assert flow.site("/max[0]").measured and flow.site("/sort[0]").measured


def test_what_cannot_be_traced_names_the_other_way() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    module = fxgrad.instrument(Branch(), engine="function")
    with pytest.raises(CaptureError, match="backend='fxgrad'"):
        module(torch.ones(2, requires_grad=True))


def test_options() -> None:
    with pytest.raises(OptionError, match="'function'"):
        fxgrad.instrument(net(), engine="other")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="only sums"):
        fxgrad.instrument(net(), engine="function", statistics="full")
    with pytest.raises(OptionError, match=r"fxgrad\.watch"):
        fxgrad.instrument(net(), engine="function", capture="eager")  # type: ignore[arg-type]


def test_after_remove_the_plain_model_runs() -> None:
    module = fxgrad.instrument(net(), engine="function")
    module(torch.ones(3, 4)).sum().backward()
    module.remove()
    module(torch.ones(3, 4)).sum().backward()
    assert len(module.history) == 1
    assert not any(p._backward_hooks for p in module.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "densenet121"])
def test_torchvision_compiled_as_one_graph(name: str, backend: str) -> None:
    make = getattr(pytest.importorskip("torchvision").models, name)
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    args = (torch.randn(2, 3, 64, 64),)
    torch.compiler.reset()
    module = fxgrad.instrument(model, engine="function")
    call, other = (torch.compile(m, fullgraph=True, backend=backend) for m in (module, plain))
    want = plain_run(plain, args, None, models.squares, call=other)
    assert_same_run(plain_run(model, args, None, models.squares, call=call), want)
    with fxgrad.watch(plain, capture="eager") as watch:
        plain_run(plain, args, None, models.squares)
    hooked = sum(site.measured for site in watch.flow().sites)
    assert sum(site.measured for site in module.flow().sites) >= 0.99 * hooked
