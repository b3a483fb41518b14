"""The life of a backward event: it begins with a gradient, and ends with its pass or where that raised."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fxgrad.record import events
from fxgrad.record.events import Event, Events


class Log(Events[Event]):
    """Writes down what happens, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []

    def _new(self, number: int, thread: int) -> Event:
        return Event(number, thread)

    def _began(self, event: Event) -> None:
        self.log.append(("began", event.number))

    def _has_raised(self, event: Event) -> None:
        self.log.append(("raised", event.number))

    def _ended(self, event: Event) -> None:
        self.log.append(("ended", event.number))


class Late(Log):
    rounds = 1


@pytest.fixture(params=[Log, Late])
def log(request: pytest.FixtureRequest) -> Log:
    return request.param()


def loss(log: Log, hook: Any = None) -> Tensor:
    with torch.enable_grad():  # also in a hook
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        z = y * 2
    z.register_hook(lambda _: (log.running(), hook() if hook is not None else None)[1])
    y.register_hook(lambda _: (log.running(), None)[1])
    with torch.enable_grad():
        return z.sum()


def test_an_event_ends_with_its_pass(log: Log) -> None:
    loss(log).backward()
    loss(log).backward()
    assert log.log == [("began", 0), ("ended", 0), ("began", 1), ("ended", 1)]


def test_a_pass_inside_of_a_pass_belongs_to_it(log: Log) -> None:
    loss(log, lambda: loss(log).backward()).backward()
    assert log.log == [("began", 0), ("ended", 0)]


def refuse() -> None:
    message = "no"
    raise ValueError(message)


def test_a_pass_that_raises_is_noticed_at_once_and_ended_later(log: Log) -> None:
    with pytest.raises(ValueError, match="no"):
        loss(log, refuse).backward()
    assert log.log == [("began", 0), ("raised", 0)]
    log.close_events()
    assert log.log[2:] == [("ended", 0)]


def test_the_pass_behind_one_that_raised_is_another_event(log: Log) -> None:
    with contextlib.suppress(ValueError):
        loss(log, refuse).backward()
    loss(log).backward()
    assert log.log == [("began", 0), ("raised", 0), ("ended", 0), ("began", 1), ("ended", 1)]


def test_a_pass_inside_may_raise_and_be_caught(log: Log) -> None:
    def inner() -> None:
        with contextlib.suppress(ValueError):
            loss(log, refuse).backward()

    loss(log, inner).backward()
    assert log.log == [("began", 0), ("ended", 0)]


def test_settling_inside_of_a_pass_ends_nothing(log: Log) -> None:
    loss(log, log.close_events).backward()
    assert log.log == [("began", 0), ("ended", 0)]


def test_one_thread_leaves_the_events_of_another_alone(log: Log) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    other = threading.Thread(target=lambda: loss(log, wait).backward())
    other.start()
    assert inside.wait(60)
    log.close_events()
    loss(log).backward()
    go_on.set()
    other.join()
    assert log.log == [("began", 0), ("began", 1), ("ended", 1), ("ended", 0)]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(events, "at_end_of_backward", lambda _: False)
    return


@pytest.mark.usefixtures("silent")
def test_where_torch_announces_no_end_it_is_at_the_next_occasion() -> None:
    log = Log()
    loss(log).backward()
    log.close_events()
    assert log.log == [("began", 0), ("ended", 0)]


def test_nothing_holds_what_has_ended() -> None:
    import gc
    import weakref

    log = Log()
    loss(log).backward()
    with contextlib.suppress(ValueError):
        loss(log, refuse).backward()
    log.close_events()
    gone = weakref.ref(log)
    del log
    gc.collect()
    assert gone() is None
