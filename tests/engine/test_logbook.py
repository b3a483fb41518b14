"""A watched run is logged: which steps, what an entry has, and that training does not see it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import LogWarning, OptionError
from fxgrad.schema import Finding, LogEntry


class Kept:
    """A log that keeps its entries."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.closed = 0

    def write(self, entry: LogEntry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        return [entry.step for entry in self.entries]


class Dicing(Kept):
    """A log whose library draws from every random stream."""

    def write(self, entry: LogEntry) -> None:
        super().write(entry)
        random.random()
        np.random.rand()
        torch.rand(2)


class Broken(Kept):
    def write(self, entry: LogEntry) -> None:
        message = "No space left on device"
        raise OSError(28, message)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))


def train(steps: int, *, model: nn.Module | None = None, **options: Any) -> list[Any]:
    """Train; all that must not depend on a watch."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watch = fxgrad.watch(model, optimizer=optimizer, **options) if options else None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        if watch is not None:
            watch.note(loss=loss, lr=0.01)
        optimizer.step()
    if watch is not None:
        watch.remove()
    state = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
    return [*model.state_dict().values(), *state, torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("native", [True, False])
def test_50_steps_end_in_the_same_bits_whatever_a_log_draws(native: bool, threads: int) -> None:
    log, plain, done = Dicing(), train(50), threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(threads)]  # as loaders and loggers have them
    for one in others:
        one.start()
    try:
        assert same(plain, train(50, log_to=log, log_every=7, native=native))
    finally:
        done.set()
    assert log.steps == [0, 7, 14, 21, 28, 35, 42, 49]
    assert not same(train(49), train(50))  # the comparison can fail


def test_every_nth_step_and_the_last_one_are_written() -> None:
    log = Kept()
    train(12, log_to=log, log_every=5)
    assert log.steps == [0, 5, 10, 11]
    assert log.closed == 1
    assert [entry.flow.event.backward for entry in log.entries] == [0, 5, 10, 11]
    assert [entry.flow.optimizer.step for entry in log.entries if entry.flow.optimizer] == [0, 5, 10, 11]


def test_steps_count_training_forwards_where_only_some_are_observed() -> None:
    log = Kept()
    train(12, log_to=log, log_every=2, every=3)
    assert log.steps == [0, 3, 6, 9]


def test_an_entry_has_the_flow_that_the_watch_has_and_the_latest_notes() -> None:
    model, log, losses = net(), Kept(), []
    with fxgrad.watch(model, log_to=log, log_every=1) as watch:
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            losses.append(loss.item())
            watch.note(loss=loss)
            loss.detach().zero_()  # what was noted is what it was
        flows = list(watch.history)
    assert [entry.flow for entry in log.entries] == flows
    assert [entry.notes["loss"] for entry in log.entries] == losses
    assert log.entries[-1].diagnosis == fxgrad.diagnose(flows)


def test_findings_are_fresh_once_and_told_to_the_listener() -> None:
    chain = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 1))
    log, told = Kept(), list[Finding]()
    with fxgrad.watch(chain, log_to=log, log_every=1, on_finding=told.append):
        for _ in range(3):
            chain(torch.ones(4, 8)).sum().backward()
    assert [finding.rule for finding in log.entries[0].fresh] == ["vanishing"]
    assert all("vanishing" in [finding.rule for finding in entry.diagnosis.findings] for entry in log.entries)
    assert not any(finding.rule == "vanishing" for entry in log.entries[1:] for finding in entry.fresh)
    assert [finding.rule for finding in told].count("vanishing") == 1


def test_a_step_is_logged_when_told_with_the_number_told() -> None:
    model, log = net(), Kept()
    watch = fxgrad.watch(model, log_to=log, log_every=None)
    watch.log()  # there is nothing yet
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    watch.log(step=300)
    watch.log(step=301)  # no backward pass since
    watch.remove()
    assert log.steps == [300]
    assert log.entries[0].flow.event.backward == 2


def test_forwards_without_a_backward_write_nothing() -> None:
    model, log = net(), Kept()
    with fxgrad.watch(model, log_to=log, log_every=1):
        model(torch.randn(8, 4))
        model(torch.randn(8, 4)).sum().backward()
        model.eval()
        model(torch.randn(8, 4))
        with torch.no_grad():
            model.train()(torch.randn(8, 4))
    assert log.steps == [1]


def test_a_log_that_fails_is_dropped_and_training_goes_on() -> None:
    log = Kept()
    with pytest.warns(LogWarning, match=r"^Broken failed and gets no more entries: OSError: .*No space left") as warned:
        train(6, log_to=[Broken(), log], log_every=1)
    assert len(warned) == 1
    assert log.steps == [0, 1, 2, 3, 4, 5]


def test_an_exception_in_the_loop_still_leaves_the_last_step_in_the_log() -> None:
    model, log = net(), Kept()

    def loop() -> None:
        with fxgrad.watch(model, log_to=log, log_every=100):
            for _ in range(4):
                model(torch.randn(8, 4)).sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert log.steps == [0, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log_to": "gradients.csv"}, "log_to= takes logs, objects with write.* but got 'gradients.csv'. Take one of"),
        ({"log_to": [Kept]}, "but got <class "),
        ({"log_every": 0}, "log_every must be a whole number of at least 1, or None, but is 0"),
        ({"log_every": True}, "but is True"),
    ],
)
def test_what_is_no_log_is_refused(options: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(OptionError, match=words):
        fxgrad.watch(model, **options)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("value", [torch.ones(2), "much", None])
def test_a_note_is_one_number(value: Any) -> None:
    with fxgrad.watch(net()) as watch, pytest.raises(OptionError, match=r"^note\(loss=...\) takes one number"):
        watch.note(loss=value)


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    log = Kept()
    train(3, log_to=log, log_every=1)
    assert log.steps == []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    train(3, log_to=log, log_every=1)
    assert log.steps == [0, 1, 2]
