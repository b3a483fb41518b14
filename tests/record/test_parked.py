"""Small gradients that wait for each other as on an accelerator, counted on the CPU, where none wait otherwise."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from benchmarks.counting import count, host_reads
from fxgrad.record import parked
from fxgrad.record.owners import Parameters
from fxgrad.record.parked import BOUND, PARTS, SMALL, Parked, bound_for
from tests.record.by_hand import check
from tests.record.waiting import Rooms, Written, grads, mlp, numbers, resnet, transformer

# ---- what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, resnet, transformer])
def test_the_launches_and_the_memory_of_a_backward(rooms: Rooms, make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, x = make()

    def backward() -> Counter[str]:
        model.zero_grad()
        loss = model(x).square().mean()
        return count(loss.backward).operators

    backward()
    plain = backward()
    with fxgrad.watch(model) as watch:
        for _ in range(3):
            watched = backward()
        sizes = [statistics.numel * 4 for statistics in numbers(watch.flow())]
    extra = watched - plain
    assert not plain - watched
    small = sum(size <= SMALL for size in sizes)
    assert small > 90
    assert extra.total() <= small / 32 + len(sizes) - small + 8
    waiting = [size for size in sizes if size <= BOUND // PARTS["norm"]]
    groups = math.ceil(sum(waiting) / (BOUND - BOUND // PARTS["norm"]))
    assert extra["_foreach_norm"] == extra["stack"] <= groups
    assert extra.total() <= 2 * groups + len(sizes) - len(waiting) + 2  # the slots of those at once are copied
    assert 0 < rooms.most <= rooms[-1].most <= BOUND


def test_the_bound_makes_groups(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "BOUND", 40_000)
    model, x = mlp()
    with fxgrad.watch(model) as watch:
        for _ in range(2):
            model(x).square().mean().backward()
        found = len(numbers(watch.flow()))
    assert found == 66 + 66  # the input asks for none
    assert len(rooms[-1].batches) == 5
    assert rooms.most <= rooms[-1].most <= 40_000


def test_the_bound_is_a_share_of_the_parameters() -> None:
    assert bound_for(0) == BOUND == 8_000_000
    assert bound_for(4_000_000_000) == 20_000_000
    owner = Parameters()
    tensors = [nn.Parameter(torch.empty(10)), nn.Parameter(torch.empty(3, device="meta")), nn.UninitializedParameter()]
    owner.tensors = dict(enumerate(tensors))
    assert owner.nbytes(torch.device("cpu")) == 40
    assert owner.nbytes(torch.device("meta")) == 12


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_nothing_is_brought_to_the_host(rooms: Rooms, statistics: Any) -> None:
    model, x = mlp()
    with fxgrad.watch(model, statistics=statistics):
        for _ in range(2):
            loss = model(x).square().mean()
            with host_reads() as reads:
                counts = count(loss.backward)
            assert reads.number == counts.syncs == 0
    assert rooms


@pytest.mark.parametrize("kind", ["norm", "full"])
def test_a_group_is_reduced_without_a_look_at_its_numbers(kind: Any) -> None:
    # A meta tensor has none: whatever would wait for the device, or depend on what is there, raises.
    part = Written()
    room = Parked(torch.device("meta"), BOUND)
    for index in range(40):
        assert room.put(part, index, torch.empty(index + 1, 7, device="meta"), kind) is not None
    room.finish()
    assert not part.failures
    assert room.batches[0].result is not None
    assert room.batches[0].result.device.type == "meta"


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_no_gradient_outlives_its_backward(rooms: Rooms, statistics: Any) -> None:
    seen: list[weakref.ref[Any]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda g: seen.append(weakref.ref(g.untyped_storage())))
            return x * 1

    model = nn.Sequential(nn.Linear(4, 4), Spy(), nn.Linear(4, 1))
    with fxgrad.watch(model, statistics=statistics):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        gc.collect()
        assert len(rooms) == 2
        assert not any(room._groups for room in rooms)
        assert seen


def test_a_backward_that_raises(rooms: Rooms) -> None:
    class Failing(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                x.register_hook(lambda _: 1 / 0)
            return x * 1

    model = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 1))
    with fxgrad.watch(model) as watch:
        model[1].on = True
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(3, 4)).sum().backward()
        model[1].on = False
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        assert watch.flow().parameters[0].l2_norm == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-6)
    assert not any(room._groups for room in rooms)


# ---- that it is right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [3_000, BOUND])
@pytest.mark.parametrize("statistics", ["norm", "full"])
@pytest.mark.parametrize("make", [mlp, resnet, transformer])
def test_the_numbers_and_the_bits(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, make: Any, statistics: Any, bound: int
) -> None:
    monkeypatch.setattr(parked, "BOUND", bound)

    def steps(*, wait: bool) -> tuple[list[Any], list[Tensor]]:
        monkeypatch.setattr(parked, "parks", lambda _: wait)
        torch.manual_seed(0)
        model, x = make()
        found = []
        with fxgrad.watch(model, statistics=statistics) as watch:
            for step in range(3):  # the last one adds to what is there
                if step < 2:
                    model.zero_grad()
                torch.manual_seed(step)
                model(x).square().mean().backward()
                found.append(numbers(watch.flow()))
            return found, grads(model)

    (want, bits), (got, own) = steps(wait=False), steps(wait=True)
    assert rooms
    assert all(map(torch.equal, own, bits))
    for one, other in zip(want, got, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert found.level == expected.level
            assert found.l2_norm == pytest.approx(expected.l2_norm, rel=2e-6)
            if statistics == "full":
                assert (found.zero_count, found.numel) == (expected.zero_count, expected.numel)
                assert (found.max_abs, found.min_abs_nonzero) == (expected.max_abs, expected.min_abs_nonzero)


def reduced(gradients: list[Tensor]) -> list[float]:
    part, room = Written(), Parked(torch.device("cpu"), BOUND)
    for index, gradient in enumerate(gradients):
        assert room.put(part, index, gradient, "norm") is not None
    room.finish()
    return [float(batch.result[place]) for batch, _, _, place in part.readings[: len(gradients)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_nan_inf_zeros_and_layouts(dtype: torch.dtype) -> None:
    gradients = [
        torch.zeros(3), torch.tensor(2.0), torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.inf]),
        torch.full((300, 4), 200.0), torch.arange(12.0).view(3, 4).t(), torch.arange(6.0)[2:4],
    ]  # fmt: skip
    got = reduced([gradient.to(dtype) for gradient in gradients])
    assert got[:2] == [0, 2]
    assert math.isnan(got[2])
    assert got[3] == math.inf
    assert got[4:] == pytest.approx([200 * 1200**0.5, 506**0.5, 13**0.5], rel=1e-6)  # beyond float16's range


def test_several_dtypes_are_not_mixed_up() -> None:
    one = torch.full((4,), 0.5)
    assert reduced([one, one.double(), one.half() * 2, one * 3, one.bfloat16() * 4]) == [1, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_full_of_unusual_numbers(rooms: Rooms, dtype: torch.dtype) -> None:
    given = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 1e-6, 3.0, -70000.0] * 300).to(dtype)
    weights = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=dtype)) for size in (2700, 9, 1024)])

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self) -> Tensor:
            return torch.cat([weight.view(-1) for weight in self.weights])

    model = Sum()
    with fxgrad.watch(model, statistics="full") as watch:
        model().backward(gradient=torch.cat([given, given[:9], given[:1024]]))
        records = watch.flow().parameters
    for record, weight in zip(records, weights, strict=True):
        check(record.statistics, weight.grad)
    assert rooms


def test_what_does_not_wait() -> None:
    part, room = Written(), Parked(torch.device("cpu"), BOUND)
    for gradient in (
        torch.ones(300_000), torch.ones(1).expand(5), torch.ones(8)[::2], torch.ones(300_000)[:4], torch.empty(0),
        torch.ones(3, dtype=torch.complex64), torch.ones(3).to_sparse(), nn.Parameter(torch.ones(3)),
    ):  # fmt: skip
        assert room.put(part, 0, gradient, "norm") is None
    for gradient in (torch.ones(3, dtype=torch.float64), torch.ones(200_000)):
        assert room.put(part, 0, gradient, "full") is None
    assert room.put(part, 0, torch.ones(250_000), "norm") is not None


class Stream:
    """A stream of a device that isn't here."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.stream_id = number
        self._log = log

    def __enter__(self) -> None:
        self._log.append(f"enter {self.stream_id}")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"leave {self.stream_id}")

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.stream_id} waits for {other.stream_id}")


def test_each_group_is_reduced_on_the_stream_it_came_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    streams = [Stream(number, log) for number in range(3)]
    now = streams[1]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: now)
    monkeypatch.setattr(
        parked, "norms_of", lambda given, _: [log.append(str(len(given))) or t.norm() for t in given[:1]]
    )
    part, room = Written(), Parked(torch.device("cuda"), BOUND)
    for index, stream in enumerate((1, 2, 1)):
        now = streams[stream]
        room.put(part, index, torch.ones(4), "norm")
    now = streams[0]
    room.finish()
    assert log[:6] == ["enter 1", "2", "leave 1", "enter 2", "1", "leave 2"]
    assert log[6:] == ["0 waits for 1", "0 waits for 2"]


def test_gradients_wait_on_cuda_only() -> None:
    # `parks` is asked by device, so that no card is needed to ask.
    assert parked.parks(torch.device("cuda", 1))
    assert not any(parked.parks(torch.device(kind)) for kind in ("cpu", "meta", "mps", "xla"))
