"""A graph module of ``fxgrad.instrument`` is one like any other: its graph is what runs, edited, compiled, copied."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxgrad
from fxgrad import rules
from fxgrad.errors import CaptureError
from fxgrad.probes.probe import probe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.alpha = 2.0
        self.plain = torch.ones(4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.relu(self.fc(x) * self.alpha)
        if mask is not None:
            h = h * mask
        h = F.dropout(h, 0.5, self.training)
        return self.head(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def to_tanh(module: Any) -> Any:
    next(node for node in module.graph.nodes if node.target is torch.relu).target = torch.tanh
    module.recompile()
    return module


def expected(model: Net, x: Tensor) -> Tensor:
    return model.head(torch.tanh(model.fc(x) * 2.0))


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda module: module,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301  # our own bytes
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_an_edit_is_what_runs_and_what_is_observed(way: str, before: bool, capture: Any) -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module: Any = fxgrad.instrument(model, capture=capture)
    if not before:
        for _ in range(2):
            module(x).sum().backward()
    module = WAYS[way](to_tanh(module))
    assert "torch.tanh" in module.code
    want = expected(model, x)
    for _ in range(3):
        out = module(x)
        assert torch.equal(out, want)
        (seen,) = torch.autograd.grad(out.sum(), next(iter(module.parameters())))
    assert torch.equal(seen, torch.autograd.grad(want.sum(), model.fc.weight)[0])
    with torch.no_grad():
        assert torch.equal(module(x), want)
    flow = module.flow()
    assert flow.site("/tanh").measured
    assert "edited" in flow.capture.reason
    module.remove()
    assert torch.equal(module(x), want)


def test_a_new_node_and_a_removed_probe() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module = fxgrad.instrument(model)
    assert isinstance(module, fx.GraphModule)
    graph = module.graph
    (old,) = [node for node in graph.nodes if node.target is probe and node.args[0].target is torch.relu]
    old.replace_all_uses_with(old.args[0])
    graph.erase_node(old)
    relu = next(node for node in graph.nodes if node.target is torch.relu)
    with graph.inserting_after(relu):
        new = graph.call_function(torch.sin, (relu,))
    relu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    graph.lint()
    module.recompile()
    want = model.head(torch.sin(torch.relu(model.fc(x) * 2.0)))
    for _ in range(3):
        out = module(x)
        assert torch.equal(out, want)
        out.sum().backward()
        flow = module.flow()
        reasons = {spot.id: spot.reason for spot in flow.blind_spots}
        assert reasons["/relu"] == reasons["/sin"] == "no_probe"
        assert flow.site("/mul").measured
        assert flow.site("head").measured


def test_an_added_module_and_an_assigned_graph() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module: Any = fxgrad.instrument(model)
    module(x).sum().backward()
    module.add_submodule("last", nn.Sigmoid())
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    returned = graph.graph_copy(module.graph, values)
    graph.output(graph.call_module("last", (returned,)))
    module.graph = graph
    for _ in range(3):
        out = module(x)
        assert torch.equal(out, torch.sigmoid(model(x)))
        out.sum().backward()
    assert module.flow().site("fc").measured


def test_train_and_eval_each_have_a_graph_and_both_can_be_edited() -> None:
    model, x = net(), torch.randn(3, 4)
    module: Any = fxgrad.instrument(model)
    assert "training = True" in module.code
    module.eval()
    assert "training = False" in module.code
    to_tanh(module)
    assert torch.equal(module(x), expected(model, x))
    module.train()
    assert "training = True" in module.code
    torch.manual_seed(1)
    want = model(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), want)
    module.eval()
    assert torch.equal(module(x), expected(model, x))


def test_arguments_by_name_are_the_same_kind_of_call() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module: Any = to_tanh(fxgrad.instrument(model))
    assert list(inspect.signature(module.forward).parameters) == ["x", "mask"]
    assert torch.equal(module(x=x), expected(model, x))
    assert torch.equal(module(x, mask=torch.ones(4)), model(x, torch.ones(4)))


def test_python_state_is_baked_in_and_says_so() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module: Any = fxgrad.instrument(model)
    want = model(x)
    for step in range(4):
        if step == 2:
            model.alpha = 5.0
        assert torch.equal(module(x), want)
        module(x).sum().backward()
    assert "Python state is baked in" in str(module)
    assert "Python state is baked in" in repr(module)
    assert "baked in" in str(fxgrad.instrument.__doc__)


class Changing(nn.Module):
    """Its first trace is no longer right when it is first called."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_graph_that_differs_from_the_models_own_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fxgrad.instrument(Changing())
    monkeypatch.setattr(Changing, "scale", 3.0)
    with pytest.raises(CaptureError, match=r"1\.0\) in the trace, .*3\.0\) in the model's own.*fxgrad\.watch"):
        module(torch.ones(2, requires_grad=True))


@pytest.mark.filterwarnings("ignore")
def test_it_runs_under_torch_compile() -> None:
    torch.compiler.reset()
    model, x = net().eval(), torch.randn(3, 4)
    module = fxgrad.instrument(model)
    compiled = torch.compile(module, backend="eager")
    for _ in range(3):
        out = compiled(x)
        assert torch.equal(out, model(x))
        out.sum().backward()
    assert len(module.history) == 3
    assert torch.equal(torch.compile(to_tanh(module), backend="eager")(x), expected(model, x))


def test_no_grad_around_a_graph_with_a_no_grad_region() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.fc(x) - target

    module, x = fxgrad.instrument(Teacher()), torch.ones(2, 4)
    for _ in range(3):
        module(x).sum().backward()
        with torch.no_grad():
            assert not module(x).requires_grad
            assert not torch.is_grad_enabled()
    assert len(module.history) == 3
    assert module._engine.model.teacher.weight.grad is None


def test_rules_on_the_model_act_in_the_graph_module() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    module = fxgrad.instrument(model)
    module(x).sum().backward()
    want = model.fc.weight.grad.clone()
    with fxgrad.rewrite(model, rules.scale(3.0, rules.nodes("/mul"))):
        for _ in range(2):
            model.zero_grad()
            module(x).sum().backward()
            torch.testing.assert_close(model.fc.weight.grad, 3 * want)


class Rebinding(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x * self.count


def test_a_buffer_that_is_rebound_is_refused_and_one_changed_in_place_is_right() -> None:
    with pytest.raises(CaptureError, match=r"writes into the model: 'count' of the model"):
        fxgrad.instrument(Rebinding(in_place=False))
    model = Rebinding(in_place=True)
    module, x = fxgrad.instrument(model), torch.ones(1, requires_grad=True)
    assert [float(module(x).detach()) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert type(model.count) is Tensor


def test_a_saved_edit_is_loaded_with_its_model() -> None:
    module: Any = to_tanh(fxgrad.instrument(net().eval()))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(3, 4)
    assert torch.equal(torch.load(file, weights_only=False)(x), module(x))


class Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_swapped_inlined_module_is_traced_anew_and_a_rebound_buffer_is_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(2.0))
    model.register_buffer("shift", torch.zeros(4))
    module, x = fxgrad.instrument(model), torch.randn(3, 4)
    for step in range(6):
        if step == 3:
            model[1] = Block(5.0)
        model.shift = torch.ones(4) * step
        out = module(x)
        assert torch.equal(out, model[0](x) * (2.0 if step < 3 else 5.0))
        out.sum().backward()
    assert len(module.history) == 6
