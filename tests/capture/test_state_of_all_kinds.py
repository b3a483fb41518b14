"""Python state that a trace could bake in, of the kinds that are easily missed; each was silently wrong once."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError
from tests.runs import assert_same_run, plain_run

numpy = pytest.importorskip("numpy")
CONFIG = OrderedDict(scale=2.0)


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Reading(nn.Module):
    """Multiplies by whatever ``read`` reads off it."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.act = nn.LeakyReLU(0.1)
        self.read = read
        self.array = numpy.array([2.0])
        self.slotted = Slotted()
        self.queue = deque([2.0])
        self.space = SimpleNamespace(deep=SimpleNamespace(value=2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.read(self)


def set_array(m: Any) -> None:
    m.array[0] = 5.0


def set_slot(m: Any) -> None:
    m.slotted.value = 5.0


def set_queue(m: Any) -> None:
    m.queue[0] = 5.0


def set_deep(m: Any) -> None:
    m.space.deep.value = 5.0


def set_config(_: Any) -> None:
    CONFIG["scale"] = 5.0


@pytest.fixture(autouse=True)
def _config() -> Any:
    yield
    CONFIG["scale"] = 2.0


def follow(
    make: Callable[[], nn.Module],
    change: Callable[[Any], None] = lambda _: None,
    args: Callable[[int], tuple[Any, ...]] = lambda _: (torch.ones(2, 3),),
    steps: int = 7,
) -> None:
    """Train a plain and a watched model beside each other; ``change`` comes before step 4."""
    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = make()
        watch = fxgrad.watch(model) if watched else None
        results = []
        for step in range(steps):
            if step == 4:
                change(model)
            given = args(step)
            results.append(plain_run(model, given, None, lambda out: out.square().sum(), seed=step))
        runs.append(results)
        CONFIG["scale"] = 2.0
        if watch is not None:
            assert watch.flow().sites
            watch.remove()
    for plain, seen in zip(*runs, strict=True):
        assert_same_run(seen, plain)


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda m: float(m.array[0]), set_array),
        (lambda m: m.slotted.value, set_slot),
        (lambda m: m.queue[0], set_queue),
        (lambda m: m.space.deep.value, set_deep),
        (lambda _: CONFIG["scale"], set_config),
    ],
    ids=["numpy array", "slots", "deque", "namespace", "OrderedDict"],
)
def test_state_that_changes_in_place(read: Callable[[Any], float], change: Callable[[Any], None]) -> None:
    follow(lambda: Reading(read), change)


class Drawing(nn.Module):
    """Takes a constant from a stream of its own: the next one must come at the next step."""

    def __init__(self, stream: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.stream = stream
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1.0 if self.take(self.stream) < 0.8 else 2.0)


@pytest.mark.parametrize(
    ("stream", "take"),
    [
        (lambda: random.Random(0), lambda r: r.random()),  # noqa: S311  # no secret
        (lambda: numpy.random.default_rng(0), lambda r: r.random()),
        (lambda: iter([0.0] * 4 + [1.0] * 30), next),
    ],
    ids=["random.Random", "numpy Generator", "iterator"],
)
def test_streams_of_the_models_own(stream: Callable[[], Any], take: Callable[[Any], float]) -> None:
    follow(lambda: Drawing(stream(), take), steps=20)


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.scale = scale

    def adjusted(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.adjusted(self.fc(x)) * self.scale


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def swap(m: Any) -> None:
    torch.manual_seed(9)
    m.blocks[1] = Block(7.0)


def append(m: Any) -> None:
    torch.manual_seed(9)
    m.blocks.append(Block(7.0))


@pytest.mark.parametrize("change", [swap, append])
def test_containers_that_are_entered_without_a_call(change: Callable[[Any], None]) -> None:
    follow(Listed, change)


def test_a_method_patched_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(_: Any) -> None:
        monkeypatch.setattr(Block, "adjusted", lambda _self, x: x * 3)

    torch.manual_seed(0)
    want, got = Listed(), None
    results: list[list[Tensor]] = []
    for watched in (False, True):
        monkeypatch.undo()
        torch.manual_seed(0)
        got = Listed()
        watch = fxgrad.watch(got) if watched else None
        results.append([])
        for step in range(6):
            if step == 4:
                patch(got)
            out = got(torch.ones(2, 3))
            out.sum().backward()
            results[-1].append(out.detach())
        if watch is not None:
            watch.remove()
    assert want is not None
    assert all(map(torch.equal, *results))


class ReadsLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.fc(x), self.act.negative_slope)


def steepen(m: Any) -> None:
    m.act.negative_slope = 0.9


def test_an_attribute_of_a_leaf_that_is_read_and_not_called() -> None:
    follow(ReadsLeaf, steepen)


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(a) + (b * 2 if a is b else b)


def one_or_two(step: int) -> tuple[Tensor, Tensor]:
    x = torch.ones(2, 3)
    return (x, x) if step >= 3 else (x, torch.ones(2, 3))


def test_one_tensor_given_twice() -> None:
    torch.manual_seed(0)
    plain = Identity()
    torch.manual_seed(0)
    watched = Identity()
    with fxgrad.watch(watched):
        for step in range(6):
            assert torch.equal(plain(*one_or_two(step)), watched(*one_or_two(step)))


class Leafy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1.0 if x.grad_fn is None else 2.0)


class Casting(Leafy):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (3.0 if torch.is_autocast_enabled("cpu") else 2.0)


def test_what_may_be_none_on_a_tensor() -> None:
    torch.manual_seed(0)
    plain = Leafy()
    torch.manual_seed(0)
    watched = Leafy()
    with fxgrad.watch(watched):
        for step in range(6):
            x = torch.ones(2, 3, requires_grad=True)
            x = x if step >= 3 else x * 1
            assert torch.equal(plain(x), watched(x))


def test_the_callers_autocast() -> None:
    torch.manual_seed(0)
    plain = Casting()
    torch.manual_seed(0)
    watched = Casting()
    with fxgrad.watch(watched):
        for step in range(6):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step >= 3):
                assert torch.equal(plain(torch.ones(2, 3)), watched(torch.ones(2, 3)))


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        h = self.fc(x)
        found.append(h)
        return h


def test_a_list_that_forward_fills() -> None:
    model = Collecting()
    with fxgrad.watch(model):
        for _ in range(4):
            found: list[Tensor] = []
            out = model(torch.ones(2, 3), found)
            assert len(found) == 1
            assert found[0] is out
    found = []
    with pytest.raises(CaptureError, match="list or dict that it was given"):
        fxgrad.gradient_flow(model, (torch.ones(2, 3), found), capture="symbolic")
    assert found == []


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Any) -> Tensor:
        return self.fc(x) * 2 if isinstance(x, Tensor) else self.fc(x)


def test_a_question_that_a_proxy_answers_wrongly_is_refused_where_nothing_checks_it() -> None:
    model = Asking()
    with pytest.raises(CaptureError, match="whether a value is a tensor"):
        fxgrad.gradient_flow(model, torch.ones(2, 3), capture="symbolic")
    with pytest.raises(CaptureError, match="watch takes any model"):
        fxgrad.instrument(model)(torch.ones(2, 3))
    follow(Asking)


def test_the_users_profiler_stays() -> None:
    def mine(*_: object) -> None:
        return None

    before = sys.getprofile()
    sys.setprofile(mine)
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        with fxgrad.watch(model):
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(before)
