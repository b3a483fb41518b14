"""What may change from one forward call to the next: the native recorder sees it, and says what Python's would say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from tests.native.parity import acted

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]
Act = Callable[[nn.Module, int], Any]


class Net(nn.Module):
    """Blocks in the order that ``order`` says, with an optional branch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.order: list[int] = [0, 1, 2, 3]
        self.branch = False

    def forward(self, x: Tensor, scale: Any = None, shift: Any = None) -> Tensor:
        if scale is not None:
            x = x * scale + shift
        for number in self.order:
            x = x + self.blocks[number](x)
        if self.branch:
            x = torch.sin(x) * x.mean()
        return self.drop(self.norm(x))


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    model.zero_grad()
    out = model(*args, **kwargs)
    loss: Tensor = out.abs().float().square().mean()
    loss.backward()
    return loss.detach()


def orders(*found: list[int]) -> Act:
    def act(model: Any, step: int) -> Tensor:
        model.order = found[step % len(found)]
        return train(model, batch(step))

    return act


def branch(model: Any, step: int) -> Tensor:
    model.branch = step in (2, 3, 5)
    return train(model, batch(step))


def autocast(model: Any, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step in (2, 4)):
        return train(model, batch(step))


def modes(model: Any, step: int) -> Tensor:
    model.train(step not in (2, 4))
    return train(model, batch(step))


def frozen(model: Any, step: int) -> Tensor:
    model.blocks[1].requires_grad_(step not in (1, 3))
    return train(model, batch(step))


def new_data(model: Any, step: int) -> Tensor:
    model.blocks[0][0].weight.data = torch.full((6, 6), 0.1 * step)
    return train(model, batch(step))


def new_module(model: Any, step: int) -> Tensor:
    if step in (1, 3):
        model.blocks[2] = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    return train(model, batch(step))


def inputs_with_gradient(model: Any, step: int) -> Tensor:
    return train(model, batch(step).requires_grad_(step in (1, 3, 4)))


def keyword_order(model: Any, step: int) -> Tensor:
    given = {"scale": batch(1)[0].requires_grad_(), "shift": batch(2)[0].requires_grad_()}
    return train(model, batch(step), **(dict(reversed(given.items())) if step % 2 else given))


def twice_before(model: Any, step: int) -> Tensor:
    one, other = model(batch(step)), model(batch(step + 9))
    loss: Tensor = (one * other).mean()
    loss.backward()
    return loss.detach()


def raising(model: Any, step: int) -> Tensor:
    if step:
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 7))
    return train(model, batch(step))


def second_order(model: Any, step: int) -> Tensor:
    loss = model(batch(step)).square().mean()
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.stack([g.square().sum() for g in found]).sum().backward()
    return loss.detach()


def retained(model: Any, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def only_grad(model: Any, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().mean()
    torch.autograd.grad(loss, [model.blocks[1][0].weight])
    return loss.detach()


def hooked(model: Any, step: int) -> Tensor:
    handles = [model.blocks[2].register_full_backward_hook(lambda _, __, got: got)]
    if step:  # one that was there before the watch is seen in another order
        handles.append(model.blocks[0][0].weight.register_hook(lambda g: g * 2))
        handles.append(
            model.blocks[1].register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g * 3) and out)
        )
    result = train(model, batch(step))
    for handle in handles:
        handle.remove()
    return result


def functional(model: Any, step: int) -> Tensor:
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, state, (batch(step),))
    loss: Tensor = out.square().mean()
    loss.backward()
    return loss.detach()


ACTS: dict[str, Act] = {
    "reversed": orders([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0]),
    "left_out": orders([0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [1], []),
    "swapped": orders([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3]),
    "again": orders([0, 1], [0, 1], [0, 0, 1, 1, 1]),
    "autocast": autocast, "modes": modes, "frozen": frozen, "new_data": new_data, "new_module": new_module,
    "inputs_with_gradient": inputs_with_gradient, "keyword_order": keyword_order, "twice_before": twice_before,
    "raising": raising, "second_order": second_order, "retained": retained, "only_grad": only_grad,
    "hooked": hooked, "functional": functional,
}  # fmt: skip


@pytest.mark.parametrize("options", [
    {"sites": "node", "statistics": "norm"}, {"sites": "edge", "statistics": "full"},
], ids=["node-norm", "edge-full"])  # fmt: skip
@pytest.mark.parametrize("name", ACTS)
def test_what_changes_between_calls(name: str, options: dict[str, Any]) -> None:
    found, native = acted(Net, ACTS[name], **options)
    assert found == []
    assert "native" in native.recorders, native.reasons


def test_a_branch_that_was_never_seen_is_named_after_its_operators() -> None:
    found, native = acted(Net, branch, steps=6)
    assert native.recorders == ["python", "native", "native", "python", "python", "python"]
    assert found == []
    flow = native.flows[2]
    assert flow is not None
    assert {"/sin", "/mean", "/mul", "blocks.3.0"} <= {site.id for site in flow.sites}


# ---- kinds of models -----------------------------------------------------------------------------------------------


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class Custom(nn.Module):
    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.fc, self.head, self.last = nn.Linear(6, 6), nn.Linear(6, 6), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(Clip.apply(self.fc(x)))
        return Clip.apply(x) if self.last else x


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.head.weight[0]
        return self.head(checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=self.reentrant))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 3).long().clamp(max=9)).sum(1))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).matmul(self.weight).abs()


class Inner(nn.Module):
    """A backward pass inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.fc(x).square().sum(), x, create_graph=True)
        return self.head(slope + x)


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2)).to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.dtype))


MAKES: dict[str, Callable[[], nn.Module]] = {
    "custom": lambda: Custom(last=False), "custom_last": lambda: Custom(last=True),
    "checkpoint": lambda: Checkpointed(reentrant=False), "reentrant": lambda: Checkpointed(reentrant=True),
    "sparse": Sparse, "shared": Shared, "complex": Complex, "inner_backward": Inner,
    "float64": lambda: Typed(torch.float64), "bfloat16": lambda: Typed(torch.bfloat16),
    "float16": lambda: Typed(torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("options", [
    {"sites": "node", "statistics": "norm"}, {"sites": "edge", "statistics": "histogram"},
], ids=["node-norm", "edge-histogram"])  # fmt: skip
@pytest.mark.parametrize("name", MAKES)
def test_kinds_of_models(name: str, options: dict[str, Any]) -> None:
    found, native = acted(MAKES[name], lambda model, step: train(model, batch(step)), steps=4, **options)
    assert found == []
    if not name.startswith(("checkpoint", "reentrant")):
        assert native.recorders[1:] == ["native"] * 3, native.reasons


# ---- hooks, memory -------------------------------------------------------------------------------------------------


def test_a_parameter_whose_hook_torch_cleared_is_told() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with fxgrad.watch(model) as watch:
        train(model, batch(0))
        loss = model(batch(1)).mean()
        model[1].weight.register_hook(lambda gradient: gradient)
        loss.backward()
        found = {record.name: record.reason for record in watch.flow().parameters}
        assert found == {"0.weight": None, "0.bias": None, "1.weight": "statistic_failed", "1.bias": None}
        train(model, batch(2))
        assert all(record.measured for record in watch.flow().parameters)


def test_nothing_is_kept_alive() -> None:
    model = Net()
    with fxgrad.watch(model) as watch:
        for step in range(3):
            train(model, batch(step))
        assert watch.flow().capture.recorder == "native"
        out = model(batch(3))
        value = weakref.ref(out)
        out.mean().backward()
        del out
        gc.collect()
        assert value() is None
    gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, watch
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []


def test_a_watched_model_inside_of_another() -> None:
    model = Net()
    with fxgrad.watch(model) as outer, fxgrad.watch(model.blocks[1]) as inner:
        for step in range(4):
            train(model, batch(step))
        flows = outer.flow(), inner.flow()
    assert [flow.capture.recorder for flow in flows] == ["native", "native"]
    assert flows[0].site("blocks.1.0").l2_norm == pytest.approx(flows[1].site("0").l2_norm, rel=1e-5)


def test_parameters_can_be_swapped_while_they_are_watched() -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with fxgrad.watch(model) as watch:
            for step in range(5):
                if step == 2:
                    model.double()
                weight = model[0].weight
                model.zero_grad()
                model(torch.randn(3, 4, dtype=weight.dtype)).sum().backward()
                record = watch.flow().parameters[0]
                assert record.l2_norm == pytest.approx(weight.grad.norm().item(), rel=1e-5)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_a_hook_of_the_users_on_a_value_changed_by_item_assignment() -> None:
    """The place of such a value is first seen where it is used; what arrives there is measured, not what it becomes."""

    class Assigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).clone()
            h[:, :2] = x[:, 2:4]
            h.register_hook(lambda gradient: gradient * 0.5)
            return h.flip(1).cumsum(1)

    found, native = acted(Assigned, lambda model, step: train(model, batch(step)))
    assert found == []
    assert native.recorders[1:] == ["native"] * 4


def test_kept_calls_share_what_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with fxgrad.watch(model) as watch:
        for batch in (2, 2, 2, 2, 5, 5, 2):
            model(torch.randn(batch, 4)).square().mean().backward()
        kept = [event_record.forward_record.sizes for event_record in watch.engine.recorder.history]
        assert [one is two for one, two in pairwise(kept[1:])] == [True, True, False, True, False]
        assert [flow.site("0").shape for flow in watch.history] == [(n, 3) for n in (2, 2, 2, 2, 5, 5, 2)]
