"""How a watched model is held: its ``forward`` keeps its face, follows its class, and goes away without a trace."""

from __future__ import annotations

import functools
import gc
import inspect
import types
import typing
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxgrad
from fxgrad.errors import NoFlowError, WatchError
from tests.watched import WATCH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """What it does."""
        h = self.a(x).relu()
        return self.fc(h if mask is None else h * mask) * scale


def step(model: nn.Module, x: Tensor | None = None) -> Tensor:
    out = model(torch.ones(3, 4) if x is None else x)
    out.square().sum().backward()
    return out.detach()


def rewritten(model: nn.Module) -> Any:
    return fxgrad.rewrite(model, fxgrad.rules.scale(1.0, fxgrad.rules.nodes("fc")), capture="eager")


HELD = pytest.mark.parametrize(
    "hold", [lambda model: fxgrad.watch(model, **WATCH), rewritten], ids=["watch", "rewrite"]
)


# ---- the face ------------------------------------------------------------------------------------------------------


@HELD
def test_the_forward_looks_as_it_did(hold: Any) -> None:
    model = Net()
    plain = model.forward
    with hold(model):
        seen = model.forward
        assert inspect.signature(seen) == inspect.signature(plain)
        assert str(inspect.signature(seen)) == str(inspect.signature(plain))
        assert inspect.getfullargspec(seen) == inspect.getfullargspec(plain)
        assert inspect.signature(seen).bind(torch.ones(1), scale=2.0).arguments["scale"] == 2.0
        assert isinstance(seen, types.MethodType) and seen.__self__ is model
        assert isinstance(seen.__func__, types.FunctionType)
        assert inspect.signature(seen.__func__) == inspect.signature(Net.forward)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__kwdefaults__"):
            assert getattr(seen, name) == getattr(plain, name), name
        assert typing.get_type_hints(seen) == typing.get_type_hints(plain)
        assert not hasattr(seen, "__wrapped__")
        assert inspect.unwrap(seen) is seen
        assert model.forward is seen  # one object, as long as nobody replaces it
    assert "forward" not in vars(model)


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * forward(self, *args, **kwargs)

    wrapper.tag = "of the user"
    return wrapper


class Decorated(Net):
    @doubled
    def forward(self, x: Tensor, weight: float = 3.0) -> Tensor:
        return super().forward(x) * weight


def test_a_decorated_forward_keeps_what_its_decorator_left() -> None:
    model = Decorated()
    plain = model.forward
    with fxgrad.watch(model, **WATCH):
        assert inspect.signature(model.forward) == inspect.signature(plain)
        assert model.forward.tag == "of the user"
        assert model.forward.__wrapped__ is plain.__wrapped__  # a function, never a bound method
        assert not inspect.ismethod(inspect.unwrap(model.forward))


class Static(Net):
    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return x**power


class ByClass(Net):
    @classmethod
    def forward(cls, x: Tensor) -> Tensor:
        return x * len(cls.__name__)


def in_two_parts(self: Any, gain: float, x: Tensor) -> Tensor:
    return self.a(x) * gain


class Partial(Net):
    forward = functools.partialmethod(in_two_parts, 3.0)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Static, ByClass, Partial])
def test_every_kind_of_forward_in_a_class(kind: Any) -> None:
    model, x = kind(), torch.ones(3, 4, requires_grad=True)
    want, signature = model(x), inspect.signature(model.forward)
    with fxgrad.watch(model, **WATCH) as watch:
        assert inspect.signature(model.forward) == signature
        assert torch.equal(model(x), want)
        assert torch.equal(model.forward(x), want)
        step(model, x)
        assert watch.flow().sites
    assert "forward" not in vars(model)


@pytest.mark.parametrize("way", ["function", "partial", "bound to it", "bound to another"])
def test_a_forward_of_the_instance_keeps_its_kind(way: str) -> None:
    model, other = Net(), Net()
    own: Any = {
        "function": lambda x: other(x) + model.fc(model.a(x)),
        "partial": functools.partial(Net.forward, model, scale=2.0),
        "bound to it": types.MethodType(lambda self, x, extra=1: self.fc(self.a(x)) * extra, model),
        "bound to another": other.forward,
    }[way]
    model.forward = own
    x = torch.ones(3, 4)
    want, signature = model(x), inspect.signature(own)
    with fxgrad.watch(model, **WATCH) as watch:
        assert inspect.signature(model.forward) == signature
        assert inspect.ismethod(model.forward) == inspect.ismethod(own)
        assert getattr(model.forward, "__self__", None) is getattr(own, "__self__", None)
        assert torch.equal(step(model), want)
        assert len(watch.history) == 1
    assert vars(model)["forward"] is own


def test_a_forward_that_is_a_property_is_refused() -> None:
    class Odd(nn.Module):
        @property
        def forward(self) -> Any:
            return lambda x: x

    with pytest.raises(WatchError, match="property of its class"):
        fxgrad.watch(Odd(), **WATCH)


# ---- what changes while it is watched ------------------------------------------------------------------------------


def test_direct_calls_of_forward_are_observed() -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        model.forward(torch.ones(3, 4)).sum().backward()
        step(model)
        assert len(watch.history) == 2


def test_a_patched_class_takes_effect_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), torch.ones(3, 4)
    plain = model(x)
    with fxgrad.watch(model, **WATCH) as watch:
        step(model)
        with monkeypatch.context() as patch:
            patch.setattr(Net, "forward", lambda self, x, gain=5.0: self.fc(self.a(x).tanh()) * gain)
            assert list(inspect.signature(model.forward).parameters) == ["x", "gain"]
            assert torch.equal(step(model), model.fc(model.a(x).tanh()) * 5)
            assert any(site.key == "/tanh" for site in watch.flow().sites)
        assert torch.equal(step(model), plain)
        assert any(site.key == "/relu" for site in watch.flow().sites)


def test_another_class_takes_effect_at_the_next_call() -> None:
    model, x = Net(), torch.ones(3, 4)
    with fxgrad.watch(model, **WATCH) as watch:
        step(model)
        model.__class__ = Decorated
        assert list(inspect.signature(model.forward).parameters) == ["x", "weight"]
        assert torch.equal(step(model), Net.forward(model, x) * 6)
        assert len(watch.history) == 2
    assert type(model) is Decorated and "forward" not in vars(model)


@pytest.mark.parametrize("first", ["watch", "user"])
@pytest.mark.parametrize("back", ["set", "deleted"])
def test_a_forward_set_on_top_is_taken_off_in_any_order(first: str, back: str) -> None:
    model, x = Net(), torch.ones(3, 4)
    before, plain = dict(vars(model)), model(x)
    watch = fxgrad.watch(model, **WATCH)
    under = model.forward
    model.forward = lambda x: under(x) * 2  # type: ignore[method-assign]
    assert torch.equal(step(model), plain * 2)
    assert len(watch.history) == 1  # it calls what it found
    if first == "watch":
        watch.remove()
        assert torch.equal(model(x), plain * 2)
    if back == "set":
        model.forward = under  # type: ignore[method-assign]
    else:
        del model.forward
    assert torch.equal(model(x), plain)
    if first == "user":
        watch.remove()
    model(x)
    assert vars(model).keys() == before.keys()


def test_a_deleted_forward_is_noticed_when_the_flow_is_read() -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        step(model)
        model.forward = lambda x: model.fc(model.a(x))  # type: ignore[method-assign]
        del model.forward
        watch.flow()
        step(model)
        assert len(watch.history) == 2


def test_a_forward_that_leads_past_the_watch_is_said() -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        model.forward = lambda x: model.fc(model.a(x))  # type: ignore[method-assign]
        step(model)
        with pytest.raises(NoFlowError, match="was replaced while it was watched"):
            watch.flow()
    assert vars(model)["forward"].__name__ == "<lambda>"


class LazyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("make", [LazyInside, lambda: nn.LazyLinear(3)])
def test_lazy_modules(make: Any, forward: bool) -> None:
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        watch = fxgrad.watch(model, forward=forward, **WATCH) if watched else None
        outputs = [step(model, torch.randn(5, 4)) for _ in range(3)]
        if watch is not None:
            assert [all(p.measured for p in flow.parameters) for flow in watch.history] == [True] * 3
            watch.remove()
            assert "forward" not in vars(model)
        return [*outputs, *(p.grad for p in model.parameters()), *model.buffers()]

    assert all(map(torch.equal, run(False), run(True)))


def test_a_replaced_layer_is_not_kept_alive() -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        for _ in range(3):
            step(model)
        old = weakref.ref(model.fc)
        model.fc = nn.Linear(8, 2)
        step(model)
        gc.collect()
        assert old() is None
        assert watch.flow().site("fc").measured


def test_a_model_that_is_watched_no_more_is_not_kept_alive() -> None:
    model = Net()
    watch = fxgrad.watch(model, **WATCH)
    step(model)
    watch.remove()
    gone = weakref.ref(model)
    del model, watch
    gc.collect()
    assert gone() is None


class Twice(TorchFunctionMode):
    """Doubles every ``tanh``, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.calls.append(getattr(func, "__name__", ""))
        return result * 2 if self.calls[-1] == "tanh" else result


def test_a_torch_function_mode_of_the_user_acts_once() -> None:
    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x).exp()

    def run(watched: bool) -> tuple[list[Tensor], int]:
        model, x = Tanh(), torch.ones(2, requires_grad=True)
        watch = fxgrad.watch(model, **WATCH) if watched else None
        with Twice() as mode:
            outputs = [model(x) for _ in range(6)]
        if watch is not None:
            watch.remove()
        return outputs, mode.calls.count("tanh")

    plain, watched = run(False), run(True)
    assert plain[1] == watched[1] == 6
    assert all(map(torch.equal, plain[0], watched[0]))
