"""``fxgrad.watch`` in the training loops that people write."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import NoFlowError, OptionError, WatchError


class Net(nn.Module):
    """Functional and in-place calls, a fan-out, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn(self.a(x)), inplace=True)
        h = h + self.b(h)
        return self.head(F.dropout(h, 0.1, self.training))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """A plain loop; its final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_training_goes_on_bit_for_bit(capture: Any, statistics: Any) -> None:
    want = train(net())
    model = net()
    with fxgrad.watch(model, capture=capture, statistics=statistics) as watch:
        got = train(model)
    assert all(map(torch.equal, got, want))
    assert len(watch.history) == 3
    assert all(site.measured for site in watch.flow().sites if site.key != "input:x")


def test_removing_gives_the_model_back() -> None:
    model = net()
    before = dict(model.__dict__)
    watch = fxgrad.watch(model)
    train(model, 1)
    watch.remove()
    watch.remove()
    assert model.__dict__.keys() == before.keys()
    assert all(not p._backward_hooks for p in model.parameters())
    assert not watch.active
    assert watch.flow().sites  # what was recorded stays readable


def test_a_forward_of_the_users_own_comes_back() -> None:
    model = net()
    own = model.forward

    def forward(x: Tensor) -> Tensor:
        return own(x) * 2

    model.forward = forward
    with fxgrad.watch(model) as watch:
        train(model, 3)
    assert model.forward is forward
    assert watch.flow().capture.front_end == "eager"  # a replaced forward is never traced


def test_gradient_accumulation() -> None:
    model = net()
    with fxgrad.watch(model, statistics="full") as watch:
        for _ in range(2):
            model(torch.randn(6, 4)).square().mean().backward()
    first, second = watch.history
    assert (first.event.backward, second.event.backward) == (0, 1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    total = {
        r.name: r.statistics.sum + s.statistics.sum for r, s in zip(first.parameters, second.parameters, strict=True)
    }
    assert total["head.bias"] == pytest.approx(grads["head.bias"].sum().item(), rel=1e-5)


def test_several_forwards_before_one_backward() -> None:
    model = net().eval()
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    with fxgrad.watch(model) as watch:
        (model(x).square().mean() + 3 * model(y).square().mean()).backward()
    one, two = watch.history
    assert one.event.backward == two.event.backward == 0
    assert {one.event.forward, two.event.forward} == {0, 1}
    shapes = {flow.event.forward: flow.sites[1].shape for flow in watch.history}
    assert shapes == {0: (3, 8), 1: (5, 8)}
    alone = fxgrad.gradient_flow(model, x, loss=lambda out: out.square().mean(), statistics="norm")
    by_forward = {flow.event.forward: flow for flow in watch.history}
    for site, want in zip(by_forward[0].sites, alone.sites, strict=True):
        assert site.id == want.id
        assert site.l2_norm == pytest.approx(want.l2_norm, rel=1e-5) if want.measured else not site.measured
    assert one.parameters == two.parameters  # the parameters' gradients are the event's


def test_validation_without_gradients_is_not_recorded() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        train(model, 1)
        with torch.no_grad():
            model.eval()(torch.randn(2, 4))
        with torch.inference_mode():
            model(torch.randn(2, 4))
        train(model.train(), 1)
        assert len(watch.history) == 2


def test_an_exception_between_forward_and_backward() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        model(torch.randn(6, 4))  # the loop stops here, its graph is dropped
        with pytest.raises(NoFlowError, match="backward"):
            watch.flow()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(6, 5))
        train(model, 1)
        assert len(watch.history) == 1
        assert watch.flow().site("head").measured
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_leaf_that_raises_raises_only_its_own_error(capture: Any) -> None:
    model = net()
    with fxgrad.watch(model, capture=capture), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.randn(6, 5))
            train(model, 1)


def test_a_second_backward_through_a_retained_graph_is_a_second_event() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    one, two = watch.history
    assert (one.event.backward, two.event.backward) == (0, 1)
    assert two.site("head").l2_norm == pytest.approx(2 * one.site("head").l2_norm, rel=1e-5)


def test_two_losses_on_parts_of_the_graph() -> None:
    model = net().eval()
    with fxgrad.watch(model) as watch:
        out = model(torch.randn(6, 4))
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].sum().backward()
    assert [flow.event.backward for flow in watch.history] == [0, 1]


def test_frozen_then_thawed() -> None:
    model = net()
    model.a.requires_grad_(False)
    with fxgrad.watch(model) as watch:
        train(model, 2)
        assert [r.reason for r in watch.flow().parameters][:2] == ["frozen", "frozen"]
        model.a.requires_grad_(True)
        train(model, 2)
        assert all(r.measured for r in watch.flow().parameters)
        assert watch.flow().site("a").measured


def test_every_second_forward() -> None:
    model = net()
    with fxgrad.watch(model, every=2) as watch:
        train(model, 5)
    assert len(watch.history) == 3


def test_pause_and_resume() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        train(model, 1)
        watch.pause()
        train(model, 2)
        assert all(not p._backward_hooks for p in model.parameters())
        watch.resume()
        train(model, 1)
    assert len(watch.history) == 2


# ---- several watchers, threads, copies -----------------------------------------------------------------------------


def test_watching_twice_is_refused() -> None:
    model = net()
    with fxgrad.watch(model), pytest.raises(WatchError, match="watched already"):
        fxgrad.watch(model)
    fxgrad.watch(model).remove()


@pytest.mark.parametrize("thing", [object(), nn.Linear, lambda x: x])
def test_only_modules_can_be_watched(thing: Any) -> None:
    with pytest.raises(WatchError, match=r"torch\.nn\.Module"):
        fxgrad.watch(thing)


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="'norm', 'full'"):
        fxgrad.watch(net(), statistics="all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="every"):
        fxgrad.watch(net(), every=0)


def test_two_models_that_share_a_module() -> None:
    shared = nn.Linear(4, 4)
    one, two = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    with fxgrad.watch(one) as first, fxgrad.watch(two) as second:
        for _ in range(3):
            one(torch.randn(2, 4)).sum().backward()
            two(torch.randn(3, 4)).sum().backward()
    assert [site.id for site in first.flow().sites] == ["input:input", "0", "1"]
    assert first.flow().site("0").shape == (2, 4)
    assert second.flow().site("0").shape == (3, 4)


def test_a_watched_model_inside_of_a_watched_model() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(4, 1))
    with fxgrad.watch(inner) as one, fxgrad.watch(outer) as two:
        for _ in range(3):
            outer(torch.randn(2, 4)).sum().backward()
    assert one.flow().site("1").l2_norm == pytest.approx(two.flow().site("0.1").l2_norm)


def test_threads() -> None:
    want = train(net())
    results: dict[int, tuple[list[Tensor], int]] = {}

    def work(number: int, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        with fxgrad.watch(model) as watch:
            for _ in range(20):
                model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        results[number] = ([p.grad for p in model.parameters()], len(watch.history))

    models = [net().eval() for _ in range(4)]  # all are traced at their second step
    threads = [threading.Thread(target=work, args=(n, m)) for n, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(count == 20 for _, count in results.values())
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert want


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "nested"])
def test_copies_of_a_watched_model_are_plain(way: str) -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        train(model, 2)
        copied: nn.Module
        if way == "deepcopy":
            copied = copy.deepcopy(model)
        elif way == "pickle":
            data = pickle.dumps(model)
            assert b"fxgrad" not in data
            copied = pickle.loads(data)  # noqa: S301  # our own bytes
        elif way == "torch.save":
            file = io.BytesIO()
            torch.save(model, file)
            assert b"fxgrad" not in file.getvalue()
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        else:
            copied = pickle.loads(pickle.dumps(nn.Sequential(model)))[0]  # noqa: S301
        assert "forward" not in copied.__dict__
        count = len(watch.history)
        copied(torch.randn(6, 4)).sum().backward()
        assert len(watch.history) == count  # a copy does not write into the original's record
        train(model, 1)
        assert len(watch.history) == count + 1  # and the original is still watched
    assert copied.state_dict().keys() == model.state_dict().keys()


def test_saving_an_output_warns_of_no_hook_of_ours() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    x = torch.randn(2, 4, requires_grad=True)
    with fxgrad.watch(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        torch.save(x, io.BytesIO())
