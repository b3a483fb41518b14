"""``fxgrad.instrument``: the fx.GraphModule of the pass."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.errors import CaptureError, OptionError
from fxgrad.probes.probe import probe
from tests import models
from tests.runs import assert_same_run, plain_run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.body(x * self.scale + self.shift)
        if mask is not None:
            h = h * mask
        return nn.functional.dropout(h, 0.5, self.training).sum(-1)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def probes(module: fx.GraphModule) -> int:
    return sum(node.target is probe for node in module.graph.nodes)


def test_it_is_a_graph_module_that_shares_everything() -> None:
    model = net()
    module = fxgrad.instrument(model)
    assert isinstance(module, fx.GraphModule)
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    assert probes(module) >= 6
    module.graph.lint()
    assert "probe" in module.code


def test_without_a_call_the_graph_runs_anywhere() -> None:
    model = net().eval()
    x = torch.randn(3, 4)
    assert torch.equal(fx.Interpreter(fxgrad.instrument(model)).run(x), model(x))


@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_it_computes_what_the_model_computes(case: models.Case) -> None:
    model, args, kwargs = case.build()
    other, _, _ = case.build()
    try:
        module = fxgrad.instrument(other)
    except CaptureError as error:
        pytest.skip(str(error))  # needs real arguments, which watch sees
    for step in range(3):
        want = plain_run(model, args, kwargs, case.loss, seed=step)
        assert_same_run(plain_run(other, args, kwargs, case.loss, seed=step, call=module), want)
    assert module.flow().capture.front_end == "symbolic"


def test_other_arguments_and_modes_are_captured_anew() -> None:
    model, plain = net(), net()
    module = fxgrad.instrument(model)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for step in range(4):
        for args in ((torch.ones(2, 4),), (torch.ones(2, 4), mask)):
            want = plain_run(plain, args, None, torch.sum, seed=step)
            assert_same_run(plain_run(model, args, None, torch.sum, seed=step, call=module), want)
        module.train(step % 2 == 0)
        plain.train(step % 2 == 0)
    assert model.training == module.training == plain.training


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_keep_sites_and_probes_and_have_a_recorder_of_their_own(way: str) -> None:
    module = fxgrad.instrument(net())
    x = torch.randn(3, 4)
    module(x).sum().backward()
    before = len(module.history)
    if way == "deepcopy":
        made = copy.deepcopy(module)
    elif way == "copy":
        made = copy.copy(module)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(module))  # noqa: S301  # our own bytes
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    made(x).sum().backward()
    assert [s.id for s in made.flow().sites] == [s.id for s in module.flow().sites]
    assert probes(made) == probes(fxgrad.instrument(net()))
    assert len(module.history) == before
    assert made.state_dict().keys() == module.state_dict().keys()


def test_a_teacher_copy_does_not_write_into_the_student() -> None:
    student = fxgrad.instrument(net())
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
            a.mul_(0.9).add_(b, alpha=0.1)
    (student(torch.ones(2, 4)) - teacher(torch.ones(2, 4)).detach()).sum().backward()
    assert len(student.history) == 1
    assert len(teacher.history) == 0


def test_what_cannot_be_traced_is_refused_with_a_way_out() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="control flow"):
        fxgrad.instrument(Branch())
    with pytest.raises(OptionError, match=r"fxgrad\.watch"):
        fxgrad.instrument(net(), capture="eager")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'hook'"):
        fxgrad.instrument(net(), engine="other")  # type: ignore[arg-type]


def test_moving_and_casting_reach_the_model() -> None:
    model = net()
    module = fxgrad.instrument(model)
    module.double()
    assert model.scale.dtype == model.shift.dtype == torch.float64
    module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert module.flow().site("body.0").dtype == "float64"
