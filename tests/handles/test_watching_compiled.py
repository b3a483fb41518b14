"""``fxgrad.watch`` on a model that is compiled: its own compiler makes the code, with the statistics in it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxgrad
from fxgrad.errors import NoFlowError, OptionError, WatchError
from fxgrad.handles import dynamo_backend
from fxgrad.handles.watching import Watch
from tests.fidelity.harness import differences, snapshot
from tests.fidelity.loops import batch, small

HOW = {
    "wrapped": torch.compile,
    "in place": lambda model, **options: (model.compile(**options), model)[1],
}
WAYS = pytest.mark.parametrize("how", HOW)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    dynamo_backend._observers.clear()
    yield
    torch._dynamo.reset()
    dynamo_backend._observers.clear()


def graphs() -> int:
    """How many graphs dynamo has made."""
    return int(counters["stats"]["unique_graphs"])


def trained(how: str, backend: str, *, watched: bool, steps: int = 50, **options: Any) -> tuple[list[Any], Any, int]:
    """Fifty steps with validation in between; what is compared, the watch, and the graphs made after step 20."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = small(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net: Any = HOW[how](model, backend=backend)
    watch = fxgrad.watch(net, optimizer=optimizer, **options) if watched else None
    found: list[tuple[str, Any]] = []
    early = 0
    for i in range(steps):
        optimizer.zero_grad()
        loss = net(batch(i)).square().mean()
        loss.backward()
        optimizer.step()
        if i % 10 == 9:
            net.eval()
            with torch.no_grad():
                loss = net(batch(i)).mean()
            net.train()
        early = graphs() if i == 20 else early
        state = [loss, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
        found.append((f"step {i}", snapshot(state)))
    return found, watch, graphs() - early


@WAYS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fifty_steps_end_in_the_same_bits_and_nothing_is_compiled_again(how: str, backend: str) -> None:
    plain, _, again = trained(how, backend, watched=False)
    watched, watch, again_watched = trained(how, backend, watched=True)
    assert differences(plain, watched) == []
    assert again == again_watched == 0
    assert [flow.event.backward for flow in watch.history] == list(range(50))
    assert [flow.optimizer.step for flow in watch.history] == list(range(50))
    assert watch.flow().capture.front_end == "dynamo"
    assert all(record.update is not None for record in watch.flow().parameters)
    assert isinstance(watch, Watch)


@pytest.mark.sweep
@WAYS
def test_the_same_under_inductor(how: str) -> None:
    plain, _, _ = trained(how, "inductor", watched=False)
    watched, watch, again = trained(how, "inductor", watched=True)
    assert differences(plain, watched) == []
    assert again == 0
    assert len(watch.history) == 50


@WAYS
def test_norms_are_those_of_plain_torch(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    want = fxgrad.gradient_flow(model, batch(0), loss=lambda out: out.square().mean(), statistics="norm")
    net: Any = HOW[how](model, backend="aot_eager")
    with fxgrad.watch(net) as watch:
        net(batch(0)).square().mean().backward()
        flow = watch.flow()
    for site in ("0", "1", "2"):
        assert flow.site(site).l2_norm == pytest.approx(want.site(site).l2_norm)
    for record in flow.parameters:
        assert record.l2_norm == pytest.approx(float(model.get_parameter(record.name).grad.norm()))


@WAYS
def test_removing_gives_the_model_back(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net: Any = HOW[how](model, backend="eager")
    before = dict(net.__dict__)
    watch = fxgrad.watch(net)
    net(batch(0)).sum().backward()
    assert watch.active and len(watch.history) == 1
    watch.remove()
    watch.remove()
    assert net.__dict__ == before
    assert all(not p._backward_hooks for p in model.parameters())
    net(batch(1)).sum().backward()
    assert len(watch.history) == 1 and not watch.active


@WAYS
def test_copies_are_plain(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net: Any = HOW[how](model, backend="eager")
    with fxgrad.watch(net) as watch:
        net(batch(0)).sum().backward()
        twin = copy.deepcopy(net)
        assert torch.equal(twin(batch(1)), net(batch(1)))
        twin(batch(1)).sum().backward()
        assert len(watch.history) == 1
        assert pickle.loads(pickle.dumps(model))(batch(1)).shape == (5, 3)  # noqa: S301  # our own


@WAYS
def test_who_stands_in_front_of_compile_sees_nothing_of_a_watch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net: Any = HOW[how](model, backend="eager")
    before = model.__dict__.get("_compile_kwargs")  # Lightning, where it is loaded, was here
    plain = torch.compile

    @functools.wraps(plain)
    def writes_into_the_model(made: Any, **options: Any) -> Any:  # as Lightning's does
        compiled: Any = plain(made, **options)
        compiled._compile_kwargs = options
        return compiled

    monkeypatch.setattr(torch, "compile", writes_into_the_model)
    with fxgrad.watch(net) as watch:
        net(batch(0)).sum().backward()
        assert len(watch.history) == 1
        assert model.__dict__.get("_compile_kwargs") is before


@WAYS
def test_pause_every_and_evaluation(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net: Any = HOW[how](model, backend="eager")
    with fxgrad.watch(net, every=2) as watch:
        with pytest.raises(NoFlowError, match="no gradient flow"):
            watch.flow()
        for i in range(6):
            net(batch(i)).sum().backward()
        assert len(watch.history) == 3
        watch.pause()
        net(batch(0)).sum().backward()
        assert len(watch.history) == 3
        watch.resume()
        net.eval()
        with torch.no_grad():
            net(batch(0))
        net.train()
        for i in range(2):
            net(batch(i)).sum().backward()
        assert len(watch.history) == 4


@WAYS
def test_shapes_that_change_and_accumulation(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    net: Any = HOW[how](model, backend="eager")
    with fxgrad.watch(net, optimizer=optimizer) as watch:
        for i in range(6):
            net(batch(i, 2 + i, 6)).sum().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    history = watch.history
    assert [flow.site("0").shape for flow in history] == [(2 + i, 8) for i in range(6)]
    assert [flow.optimizer.step for flow in history] == [0, 0, 0, 1, 1, 1]
    assert [flow.event.accumulating for flow in history] == [False, True, True] * 2


@WAYS
def test_scaler_and_limits(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    net: Any = HOW[how](model, backend="eager")
    told: list[fxgrad.Finding] = []
    with fxgrad.watch(
        net, optimizer=optimizer, scaler=scaler, limits={"l2_norm": 1e3}, on_finding=told.append
    ) as watch:
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(net(batch(0)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        history = watch.history
    assert [flow.event.loss_scale for flow in history] == [64.0, 64.0, 32.0]
    assert [flow.optimizer.step for flow in history] == [0, None, 1]
    assert [finding.rule for finding in told] == ["loss_seed"]
    assert watch.alarms == tuple(told)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no")  # noqa: EM101


def test_a_backward_that_raised_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net = torch.compile(model, backend="eager")
    with fxgrad.watch(net) as watch:
        out = net(batch(0))
        out.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        net(batch(1)).sum().backward()
        assert [flow.event.failed is not None for flow in watch.history][-1] is False


@pytest.mark.parametrize(
    "options", [{"statistics": "full"}, {"sites": "edge"}, {"forward": True}, {"capture": "eager"}], ids=str
)
def test_what_compiled_code_cannot_tell_is_refused(options: dict[str, Any]) -> None:
    net: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    before = dict(net.__dict__)
    with pytest.raises(OptionError, match="compiled"):
        fxgrad.watch(net, **options)
    assert net.__dict__ == before


@WAYS
def test_one_watch_a_model(how: str) -> None:
    model = nn.Linear(2, 2)
    net: Any = HOW[how](model, backend="eager")
    with fxgrad.watch(net), pytest.raises(WatchError, match="watched already"):
        fxgrad.watch(net)
    with fxgrad.watch(net):
        pass
    if how == "wrapped":
        with fxgrad.watch(model), pytest.raises(WatchError, match="watched already"):
            fxgrad.watch(net)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # what dynamo itself does at a graph break
def test_a_whole_step_that_is_compiled_is_read_by_the_backend() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)

    def trained_by(net: nn.Module, how: Any) -> int:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(step, backend=how)
        early = 0
        for i in range(50):
            compiled(batch(i))
            early = graphs() if i == 20 else early
        return graphs() - early

    assert trained_by(twin, "eager") == trained_by(model, dynamo_backend.backend) == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    flow = fxgrad.flow_of(model)
    assert flow.event.backward == 49
    assert flow.site("0").measured


def test_a_watched_model_that_is_compiled_afterwards_runs_uncompiled_and_a_warning_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with fxgrad.watch(model) as watch:
        model.compile(backend="eager")
        with pytest.warns(RuntimeWarning, match="runs uncompiled"):
            model(batch(0)).sum().backward()
        model(batch(1)).sum().backward()
        assert len(watch.history) == 2
    fxgrad.gradient_flow(model, batch(0), loss=torch.sum)  # one call by itself, of which nobody expects compiled bits
