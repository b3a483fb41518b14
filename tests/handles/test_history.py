"""``history`` and ``flow()`` give each event its own numbers, however often and however late they are read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.record.recorder import HISTORY

STEPS = 3 * HISTORY + 7


class Scaled(nn.Module):
    """The gradient of what it returns, and so of its weight, is known in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def run(model: Any, steps: int, read: Any, every: int) -> None:
    """Step ``n`` has gradient ``n`` at both entries of the output; ``read`` looks now and then."""
    for step in range(steps):
        model.zero_grad()
        (model(torch.ones(2)) * step).sum().backward()
        if step % every == every - 1:
            read(step)


def check(flows: Any, last: int) -> None:
    assert [flow.event.backward for flow in flows] == list(range(max(0, last + 1 - HISTORY), last + 1))
    for flow in flows:
        want = flow.event.backward * 2**0.5
        assert flow.sites[-1].l2_norm == pytest.approx(want)
        assert flow.parameters[0].l2_norm == pytest.approx(want)


@pytest.mark.parametrize("native", [True, False])
def test_more_events_than_are_kept_are_read_again_and_again(native: bool) -> None:
    model = Scaled()
    with fxgrad.watch(model, native=native) as watch:
        run(model, STEPS, lambda step: check(watch.history, step), every=50)
        assert watch.flow().event.backward == STEPS - 1


def test_events_that_are_dropped_leave_no_flow_to_the_next_at_their_address() -> None:
    model = Scaled()
    with fxgrad.watch(model) as watch:
        for step in range(STEPS):  # read once, then dropped: the next record may lie where this one did
            run(model, 1, lambda _: None, every=1)
            if step % 150 == 149:
                flows = watch.history
                assert len({flow.event.backward for flow in flows}) == len(flows)
                assert [flow.event.backward for flow in flows] == sorted(flow.event.backward for flow in flows)


def test_a_flow_is_made_once() -> None:
    model = Scaled()
    with fxgrad.watch(model) as watch:
        run(model, 3, lambda _: None, every=1)
        assert all(one is two for one, two in zip(watch.history, watch.history, strict=True))


def test_an_instrumented_function_model_gives_each_event_its_own_numbers() -> None:
    model = fxgrad.instrument(Scaled(), engine="function")
    run(model, STEPS, lambda step: check(model.history, step), every=50)


def test_reading_beside_a_thread_that_trains() -> None:
    model, read = Scaled(), Scaled()
    failures: list[BaseException] = []
    done = threading.Event()
    with fxgrad.watch(model) as watch, fxgrad.watch(read) as other:

        def look() -> None:
            try:
                while not done.is_set():
                    for flow in watch.history:
                        assert flow.sites[-1].l2_norm == pytest.approx(flow.event.backward * 2**0.5)
            except BaseException as error:  # noqa: BLE001  # shown by the main thread
                failures.append(error)

        reader = threading.Thread(target=look)
        reader.start()
        run(model, STEPS, lambda _: None, every=1)
        run(read, 3, lambda step: check(other.history, step), every=1)
        done.set()
        reader.join()
    assert not failures


def test_a_one_shot_call_leaves_the_watch_as_it_was() -> None:
    model = Scaled()
    with fxgrad.watch(model) as watch:
        watch.remove()
        fxgrad.gradient_flow(model, torch.ones(2))
        assert not watch.active
    paused = fxgrad.watch(model)
    paused.pause()
    fxgrad.gradient_flow(model, torch.ones(2))
    model(torch.ones(2)).sum().backward()
    with pytest.raises(fxgrad.errors.NoFlowError):
        paused.flow()
    paused.remove()


def test_switching_off_what_a_one_shot_call_finds_off() -> None:
    """The recorder is switched on again behind a one-shot call only where it was on before."""
    model = Scaled()
    with fxgrad.watch(model) as watch:
        watch.engine.recorder.on = False
        fxgrad.gradient_flow(model, torch.ones(2))
        assert not watch.engine.recorder.on
        watch.engine.recorder.on = True


def test_the_findings_of_a_flow_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxgrad import presenter

    flow = fxgrad.gradient_flow(Scaled(), torch.ones(2))
    judged, own = [], presenter.diagnose

    def counting(*args: Any, **kwargs: Any) -> Any:
        judged.append(args)
        return own(*args, **kwargs)

    monkeypatch.setattr(presenter, "diagnose", counting)
    flow.table()
    flow.to_dot()
    assert flow.findings == flow.diagnosis.findings
    assert flow.not_checked == flow.diagnosis.not_checked
    assert len(judged) == 1


@pytest.mark.parametrize("every", [1, 3])
def test_notes_stand_at_the_backward_pass_of_their_forward(every: int) -> None:
    model = Scaled()
    with fxgrad.watch(model, every=every) as watch:
        assert dict(watch.history.notes) == {}
        for step in range(7):
            loss = model(torch.full((2,), 1.0 + step)).sum()
            watch.note(loss=loss, rate=0.1 / (1 + step))
            loss.backward()
            with torch.no_grad():
                loss.zero_()  # what was noted is the number that it had
        history = watch.history
    assert [flow.event.forward for flow in history] == list(history.notes["loss"].steps)
    assert len(history) == -(-7 // every)
    want = [Scaled()(torch.full((2,), 1.0 + step)).sum().item() for step in range(0, 7, every)]
    assert history.notes["loss"].values == tuple(want)
    assert len(history.notes["rate"]) == len(history)
    assert watch.history.notes == history.notes
