"""``fxgrad.watch(optimizer=, scaler=)``: what steps did, which steps there were, and the loss scale."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.store import from_json


class Net(nn.Module):
    """Three layers of which one is frozen, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.b.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(torch.tanh(self.a(x)))))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-6),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, generator=generator).to(next(model.parameters()).dtype)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, micro: int = 1
) -> list[dict[str, Tensor]]:
    """A plain loop; all parameters before each step and after the last."""
    seen = [state_of(model)]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss_of(model, step * micro + part).backward()
        optimizer.step()
        seen.append(state_of(model))
    return seen


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def update_of(flow: fxgrad.GradientFlow, name: str = "a.weight") -> Any:
    return next(record.update for record in flow.parameters if record.name == name)


def check(
    flow: fxgrad.GradientFlow, before: dict[str, Tensor], after: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """The updates of a flow are the differences of the parameters."""
    for record in flow.parameters:
        if not record.measured:
            assert record.update is None
            continue
        old, new = before[record.name].double(), after[record.name].double()
        assert record.update.l2_norm == pytest.approx(float((new - old).norm()), rel=tolerance)
        assert record.update.weight_norm == pytest.approx(float(old.norm()), rel=tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_what_the_step_did_and_training_is_the_same(kind: str) -> None:
    plain = net()
    want = train(plain, OPTIMIZERS[kind](plain.parameters()))
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        got = train(model, optimizer)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(got, want, strict=True) for name in one)
    assert len(watch.history) == 4
    for number, flow in enumerate(watch.history):
        check(flow, want[number], want[number + 1])
        facts = flow.optimizer
        assert (facts.type, facts.step, facts.skipped) == (type(optimizer).__name__, number, 0)
        update = update_of(flow)
        assert update.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"])
        assert update.epsilon == {"adamw": 1e-6, "adafactor": None}.get(kind, optimizer.param_groups[0].get("eps"))
    assert {record.name for record in watch.flow().parameters if record.update is None} == {
        "b.weight",
        "b.bias",
        "unused",
    }
    assert from_json(watch.flow().to_json()) == watch.flow()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.randn(4, 3, dtype=dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        model(x).abs().square().mean().backward()
        optimizer.step()
    for record in watch.flow().parameters:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        old, new = before[record.name].to(wide), model.get_parameter(record.name).detach().to(wide)
        assert record.update.l2_norm == pytest.approx(float((new - old).norm()), rel=1e-5)
        assert record.update.weight_norm == pytest.approx(float(old.norm()), rel=1e-5)


def test_a_flow_has_its_step_once_it_was_taken() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        early = watch.flow()
        assert early.optimizer == fxgrad.schema.OptimizerFacts("SGD", None, 0)
        assert all(record.update is None for record in early.parameters)
        assert watch.flow() is early
        optimizer.step()
        late = watch.flow()
        assert late.optimizer.step == 0
        assert update_of(late) is not None
        assert watch.flow() is late
        assert update_of(early) is None
    assert watch.flow() is late  # readable when the watch is over


def test_accumulation_gives_the_step_to_each_backward_pass() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        seen = train(model, optimizer, steps=2, micro=3)
        loss_of(model, 9).backward()
    history = watch.history
    assert [flow.optimizer.step for flow in history] == [0, 0, 0, 1, 1, 1, None]
    assert [flow.event.accumulating for flow in history] == [False, True, True, False, True, True, True]
    check(history[0], seen[0], seen[1])
    assert history[0].parameters[0].update == history[2].parameters[0].update
    check(history[5], seen[1], seen[2])


def test_gradients_that_were_thrown_away_have_no_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        train(model, optimizer, steps=1)
    assert [flow.optimizer.step for flow in watch.history] == [None, 0]


def test_only_observed_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies: list[Any] = []
    original, parameters = Tensor.clone, list(model.parameters())

    def clone(self: Tensor, **options: Any) -> Tensor:
        copies.extend(p for p in parameters if p.data_ptr() == self.data_ptr())
        return original(self, **options)

    with fxgrad.watch(model, optimizer=optimizer, every=3) as watch:
        for step in range(7):
            loss_of(model, step).backward()
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "clone", clone)
                optimizer.step()
        assert len(copies) == 3 * 4
        watch.pause()
        loss_of(model, 7).backward()
        optimizer.step()
        watch.resume()
    assert [flow.optimizer.step for flow in watch.history] == [0, 3, 6]
    assert len(copies) == 3 * 4


def test_the_copies_are_gone_after_the_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        train(model, optimizer, steps=2)
        (updates,) = watch.engine.training._optimizers
        assert updates._copies == []
        assert all(buffer.numel() == 20 for step in updates.steps for _, buffer in step.measured)


class Seen(TorchDispatchMode):
    """The names of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05), foreach=False, capturable=False)
    scaler = torch.amp.GradScaler("cpu")
    with fxgrad.watch(model, optimizer=optimizer, scaler=scaler) as watch:
        loss = scaler.scale(loss_of(model, 0))
        updates = watch.engine.training._optimizers[0]

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError

        with monkeypatch.context() as patch, Seen() as seen:
            for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu"):
                patch.setattr(Tensor, name, refuse)
            loss.backward()
            updates._before(optimizer, (optimizer,), {})
            updates._after(optimizer, (optimizer,), {})
        assert "aten.linalg_vector_norm.out" in seen.names
        assert not any("_local_scalar_dense" in name or "nonzero" in name for name in seen.names)
        assert update_of(watch.flow()).learning_rate == pytest.approx(0.05)
        assert watch.flow().event.loss_scale == 65536.0


def test_the_learning_rate_is_that_of_the_step_also_if_it_is_a_tensor() -> None:
    model = net()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(
        [{"params": model.a.parameters(), "lr": rate}, {"params": model.head.parameters(), "lr": 0.25}], lr=1.0
    )
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.step()
        rate.fill_(7.0)
    rates = {record.name: record.update.learning_rate for record in watch.flow().parameters if record.update}
    assert rates == {"a.weight": 0.5, "a.bias": 0.5, "head.weight": 0.25, "head.bias": 0.25}


def test_several_optimizers() -> None:
    model = net()
    one = torch.optim.SGD(model.a.parameters(), lr=0.1)
    two = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    with fxgrad.watch(model, optimizer=[one, two]) as watch:
        before = state_of(model)
        loss_of(model, 0).backward()
        one.step()
        assert update_of(watch.flow()) is not None
        assert update_of(watch.flow(), "head.weight") is None
        two.step()
        check(watch.flow(), before, state_of(model))
    assert watch.flow().optimizer.type == "SGD + AdamW"


def test_a_closure_may_run_the_model_inside_of_the_step() -> None:
    def run(model: Net, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
        seen = [state_of(model)]
        for step in range(2):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            seen.append(state_of(model))
        return seen

    def make(model: Net) -> torch.optim.Optimizer:
        del model.unused
        return torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], max_iter=3)

    plain, model = net(), net()
    want = run(plain, make(plain))
    optimizer = make(model)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        got = run(model, optimizer)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(got, want, strict=True) for name in one)
    steps = [flow.optimizer.step for flow in watch.history]
    assert set(steps) == {0, 1}
    assert steps == sorted(steps)
    check(watch.history[0], want[0], want[1])
    check(watch.flow(), want[1], want[2])


def test_an_optimizer_that_steps_inside_of_the_backward_pass() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    with fxgrad.watch(model, optimizer=list(optimizers.values())) as watch:
        for number in range(2):
            before = state_of(model)
            loss_of(model, number).backward()
            check(watch.flow(), before, state_of(model))
            assert watch.flow().optimizer.step == number


def test_removing_takes_the_hooks_off_and_copies_have_none() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fxgrad.watch(model, optimizer=optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    assert not copy.deepcopy(optimizer)._optimizer_step_pre_hooks
    watch.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_that_raises_raises_its_own_error_and_leaves_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        loss_of(model, 0).backward()
        optimizer.param_groups[0]["lr"] = "nonsense"
        with pytest.raises((TypeError, RuntimeError)):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, steps=1)
        assert update_of(watch.flow()) is not None
        assert watch.engine.training._optimizers[0]._copies == []


def test_parameters_without_a_norm_do_not_stop_the_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, optimizer=optimizer) as watch, pytest.MonkeyPatch.context() as patch:
        model(torch.ones(1, 2)).sum().backward()
        patch.setattr("fxgrad.record.changes.write_norm", lambda *_: 1 / 0)
        with pytest.warns(RuntimeWarning, match="cannot measure what SGD does"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert all(record.update is None for record in watch.flow().parameters)


def test_rules_of_a_rewrite_act_before_the_step_is_measured() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = fxgrad.rules.zero_out(fxgrad.rules.parameters("a.*"))
    with fxgrad.watch(model, optimizer=optimizer) as watch, fxgrad.rewrite(model, rule):
        train(model, optimizer, steps=1)
    moved = {record.name: record.update.l2_norm for record in watch.flow().parameters if record.update}
    assert moved["a.weight"] == moved["a.bias"] == 0.0
    assert moved["head.weight"] > 0


class Wrapper(torch.optim.Optimizer):
    """As libraries write them: an optimizer inside, and no hooks of its own."""

    def __init__(self) -> None:
        self.optimizer = None


@pytest.mark.parametrize("given", ["adam", object(), [torch.optim.SGD], nn.Linear(1, 1), Wrapper()])
def test_only_optimizers(given: Any) -> None:
    with pytest.raises(OptionError, match=r"torch\.optim\.Optimizer"):
        fxgrad.watch(net(), optimizer=given)
