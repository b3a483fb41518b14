"""The one-shot call: losses, arguments, errors, and the model given back as it was."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import InputError, ModelError, OptionError, WatchError
from tests import models, oracle


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))


class Returning(nn.Module):
    """Returns whatever ``make`` makes of its one linear map's output."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.fc(x))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda h: h.sum(), "the scalar that the model returned"),
        (lambda h: Output(h.sum(), h), "the loss that the model returned"),
        (lambda h: {"loss": h.sum(), "logits": h}, "the loss that the model returned"),
    ],
)
def test_a_loss_that_the_model_returns_is_used(make: Any, said: str) -> None:
    flow = fxgrad.gradient_flow(Returning(make), torch.ones(3, 4))
    assert flow.event.loss == said
    assert flow.site("fc").max_abs == pytest.approx(1.0)


@pytest.mark.parametrize("make", [lambda h: h, lambda h: (h, {"twice": h * 2}), lambda h: torch.complex(h, h)])
def test_otherwise_a_seeded_direction_of_norm_one_is(make: Any) -> None:
    one = fxgrad.gradient_flow(Returning(make), torch.ones(3, 4))
    assert "random direction of norm 1" in one.event.loss
    model = Returning(make)
    state = torch.get_rng_state()
    two = fxgrad.gradient_flow(model, torch.ones(3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert [s.l2_norm is not None for s in one.sites] == [s.l2_norm is not None for s in two.sites]


def test_the_direction_has_norm_one() -> None:
    assert fxgrad.gradient_flow(Returning(lambda h: h), torch.ones(3, 4)).site("fc").l2_norm == pytest.approx(1.0)


def test_a_loss_function_is_named() -> None:
    def my_loss(out: Tensor) -> Tensor:
        return out.square().mean()

    flow = fxgrad.gradient_flow(net(), torch.ones(3, 4), loss=my_loss)
    assert "my_loss" in flow.event.loss


# ---- the arguments ---------------------------------------------------------------------------------------------------


def test_ways_to_give_arguments() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, scale: Tensor) -> Tensor:
            return (x * scale + sum(rest)).sum()

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    flow = fxgrad.gradient_flow(Two(), (x, y), {"scale": torch.tensor(3.0, requires_grad=True)})
    assert [s.id for s in flow.sites][:3] == ["input:x", "input:args[0]", "input:scale"]
    assert flow.site("input:scale").l2_norm == pytest.approx(2.0)
    assert fxgrad.gradient_flow(net(), torch.ones(3, 4)).sites == fxgrad.gradient_flow(net(), [torch.ones(3, 4)]).sites
    assert x.grad is None
    assert not x._backward_hooks


def test_kwargs_must_be_a_mapping() -> None:
    with pytest.raises(InputError, match="kwargs must map"):
        fxgrad.gradient_flow(net(), torch.ones(3, 4), ["x"])  # type: ignore[arg-type]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_that_raises() -> None:
    with pytest.raises(ModelError, match=r"Sequential raised RuntimeError .*\(3, 5\)") as error:
        fxgrad.gradient_flow(net(), torch.ones(3, 5))
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("make", "loss", "said"),
    [
        (lambda h: h.argmax(), None, "no tensor that can be differentiated"),
        (lambda _: "text", None, "no tensor that can be differentiated"),
        (lambda h: h.detach(), None, "detached"),
        (lambda h: h, lambda out: out, r"shape \(3, 2\)"),
        (lambda h: h, lambda _: 1.0, "tensor with one value"),
        (lambda h: h, lambda out: out.detach().sum(), "requires a gradient"),
        (lambda h: h, lambda out: out.nothing, "the loss raised AttributeError"),
    ],
)
def test_nothing_to_differentiate(make: Any, loss: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        fxgrad.gradient_flow(Returning(make), torch.ones(3, 4), loss=loss)


def test_a_backward_that_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.exp(self.w * x)
            h.mul_(2)
            return h.sum()

    with pytest.raises(ModelError, match="the backward pass of Broken raised RuntimeError"):
        fxgrad.gradient_flow(Broken(), torch.ones(3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning", "ignore::DeprecationWarning")
def test_bad_options_and_things() -> None:
    with pytest.raises(OptionError, match="'auto', 'symbolic', 'eager'"):
        fxgrad.gradient_flow(net(), torch.ones(3, 4), capture="fx")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="sites='leaf'"):
        fxgrad.gradient_flow(net(), torch.ones(3, 4), sites="leaf")  # type: ignore[arg-type]
    with pytest.raises(WatchError, match="scripted"):
        fxgrad.gradient_flow(torch.jit.script(nn.Linear(2, 2)), torch.ones(1, 2))
    with pytest.raises(WatchError, match="Module"):
        fxgrad.gradient_flow("model", torch.ones(1, 2))  # type: ignore[arg-type]


# ---- the model is given back -----------------------------------------------------------------------------------------


class Messy(nn.Module):
    """Writes everything that a forward can write."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: list[int] = []
        self.named = {"last": 0}
        self.register_buffer("state", torch.zeros(2))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.named["last"] = self.calls
        self.state = self.state + 1
        self.made = torch.ones(1)
        self.fc.register_forward_hook(lambda *_: None)
        random.random()  # noqa: S311  # a draw from the stream
        x = nn.functional.dropout(self.bn(self.fc(x)))
        if self.fail:
            message = "half way"
            raise ValueError(message)
        return x


@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_as_before(fail: bool) -> None:
    model = Messy()
    model(torch.randn(3, 4)).sum().backward()
    model.fc._forward_hooks.clear()
    model.fail = fail
    model.bn.eval()
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    seen, named = list(model.seen), dict(model.named)
    streams = torch.get_rng_state(), random.getstate()
    if fail:
        with pytest.raises(ModelError, match="half way"):
            fxgrad.gradient_flow(model, torch.randn(3, 4))
    else:
        fxgrad.gradient_flow(model, torch.randn(3, 4))
    streams_after = torch.get_rng_state(), random.getstate()
    assert streams[1] == streams_after[1]
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is value for key, value in attributes[name].items() if key != "_buffers")
        assert not module._forward_hooks
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0]
        assert torch.equal(p.grad, grads[name][1])
        assert not p._backward_hooks
    for name, b in model.named_buffers():
        assert b is buffers[name][0]
        assert torch.equal(b, buffers[name][1])
    assert (model.seen, model.named) == (seen, named)
    assert not model.bn.training
    assert not torch.nn.modules.module._global_forward_hooks


def test_the_random_stream_is_as_before() -> None:
    torch.manual_seed(5)
    fxgrad.gradient_flow(net(), torch.ones(3, 4))  # net() seeds with 0
    torch.manual_seed(0)
    net()
    want = torch.rand(1)
    model = net()
    fxgrad.gradient_flow(model, torch.ones(3, 4))
    assert torch.equal(torch.rand(1), want)


def test_it_runs_under_no_grad_too() -> None:
    with torch.no_grad():
        assert fxgrad.gradient_flow(net(), torch.ones(3, 4)).site("0").measured
        assert not torch.is_grad_enabled()


def test_an_optimizer_that_steps_in_the_backward_does_not() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.detach().clone() for p in model.parameters()]
    flow = fxgrad.gradient_flow(model, torch.randn(3, 4))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(record.measured for record in flow.parameters)


def test_a_forward_that_writes_parameters_is_reported() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.w.mul_(0.5)
            return (self.w * x).sum()

    with pytest.warns(UserWarning, match="writes into its own parameters when it runs \\(w\\)"):
        fxgrad.gradient_flow(Writes(), torch.ones(2))


def test_a_look_inside_of_a_watched_loop_is_no_event_of_the_loop() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        model(torch.randn(3, 4)).sum().backward()
        flow = fxgrad.gradient_flow(model, torch.randn(3, 4))
        assert flow.site("0").measured
        model(torch.randn(3, 4)).sum().backward()
        assert len(watch.history) == 2


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["l2_norm", "rms", "max_abs"])
@pytest.mark.parametrize("case", models.cases(models.TWINS))
def test_every_norm_equals_the_oracle(case: models.Case, norm: Any) -> None:
    model, args, kwargs = case.build()
    want = oracle.site_gradients(case.twin, model, args, case.loss, kwargs)  # type: ignore[arg-type]
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(model, args, kwargs, loss=case.loss)
    measured = {site.id: getattr(site, norm) for site in flow.sites}
    assert oracle.compare(measured, want, norm, unmeasurable=case.unmeasurable) == []


def test_parameters_are_the_plain_gradients() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: out.square().mean())
    model(x).square().mean().backward()
    for record, (name, p) in zip(flow.parameters, model.named_parameters(), strict=True):
        assert record.name == name
        assert record.l2_norm == pytest.approx(p.grad.norm().item(), rel=1e-5)
        assert record.max_abs == pytest.approx(p.grad.abs().max().item())


def test_tied_weights_are_one_record() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    records = fxgrad.gradient_flow(model, torch.randn(2, 4)).parameters
    assert [(r.name, r.aliases) for r in records] == [("0.weight", ("1.weight",)), ("0.bias", ()), ("1.bias", ())]
