"""A run file beside the training: what is in it, what training sees of it, and what becomes of errors."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.engine.run_events import WrittenEvents
from fxgrad.run_file import RunFile
from fxgrad.schema import GradientFlow
from tests.fidelity.harness import differences, run, same
from tests.fidelity.programs_of_switches import (
    DispatchModeAroundTheWholeStep,
    FunctionModeAround,
    FunctionModeAroundTheWholeStep,
)

STEPS = 50


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 1),
    )  # fmt: skip


class Training:
    """A loop with an optimizer, and all that must not depend on a watch."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.model = net() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        self.losses: list[float] = []
        told = options.pop("told", False)
        self.watch = fxgrad.watch(self.model, **options, **({"optimizer": self.optimizer} if told else {}))

    def step(self, size: int = 6) -> Tensor:
        loss = self.model(torch.randn(size, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def state(self) -> list[Any]:
        kept = [*self.model.state_dict().items(), *self.optimizer.state_dict()["state"].items()]
        streams = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002  # the global one is what it is about
        return [*kept, *streams, self.losses]


def run_of(path: Path) -> list[GradientFlow]:
    with fxgrad.open_run(path) as run:
        return list(run)


OPTIONS = [
    {}, {"told": True}, {"statistics": "full"}, {"statistics": "histogram", "told": True}, {"forward": True},
    {"sites": "edge"}, {"native": False}, {"native": False, "told": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_the_file_has_every_flow_that_the_history_has(options, tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad", **options)
    for number in range(70):  # so many that some are looked at twice
        training.step(size=5 if number == 30 else 6)
    history = training.watch.history
    training.watch.remove()
    assert training.watch.run_file == fxgrad.schema.RunFileReport(str(tmp_path / "run.fxgrad"), 70, 0, None)
    assert run_of(tmp_path / "run.fxgrad") == list(history)


def test_norms_are_those_of_plain_torch(tmp_path) -> None:
    training = Training(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), run_file=tmp_path / "run.fxgrad")
    expected = []
    for _ in range(5):
        training.model(torch.randn(6, 4)).square().mean().backward()
        expected.append(float(torch.linalg.vector_norm(training.model[2].weight.grad)))
        training.optimizer.zero_grad()
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        assert run.series("2.weight").values == pytest.approx(expected, rel=1e-6)


def test_steps_that_are_alike_are_written_without_a_flow(tmp_path, monkeypatch) -> None:
    slow: list[int] = []
    plain = WrittenEvents._write_flow
    monkeypatch.setattr(WrittenEvents, "_write_flow", lambda self, *a: (slow.append(self._count), plain(self, *a))[1])
    training = Training(run_file=tmp_path / "run.fxgrad", told=True)
    for _ in range(130):
        training.step()
    training.watch.remove()
    quick = 130 - len(slow)
    # Of the Python recorder, each call has a graph of its own.
    assert quick > 100 or training.watch.history[-1].capture.recorder == "python"


def test_a_value_without_a_gradient_at_times(tmp_path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.one(x) + self.two(x) * float(self.calls % 3 == 0)

    training = Training(Gated(), run_file=tmp_path / "run.fxgrad")
    for _ in range(12):
        training.step()
    history = training.watch.history
    training.watch.remove()
    assert run_of(tmp_path / "run.fxgrad") == list(history)


def test_accumulated_steps_get_the_optimizers_step_when_it_comes(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad", told=True)
    for _ in range(3):
        for _ in range(4):
            training.model(torch.randn(6, 4)).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    history = training.watch.history
    training.watch.remove()
    assert training.watch.run_file.written == 12
    assert run_of(tmp_path / "run.fxgrad") == list(history)
    assert all(flow.optimizer.step is not None for flow in history)


def test_a_loss_scale_is_that_of_the_step(tmp_path) -> None:
    model = net()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fxgrad.watch(model, optimizer=optimizer, scaler=scaler, run_file=tmp_path / "run.fxgrad")
    for number in range(6):
        loss = model(torch.randn(6, 4)).square().mean()
        scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watch.remove()
    assert [flow.event.loss_scale for flow in run_of(tmp_path / "run.fxgrad")] == [256.0] * 4 + [128.0] * 2


def test_several_backward_passes_through_one_forward(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad")
    for _ in range(3):
        loss = training.model(torch.randn(6, 4)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    history = training.watch.history
    training.watch.remove()
    assert len(history) == 6
    assert run_of(tmp_path / "run.fxgrad") == list(history)


def test_a_backward_pass_that_raises_is_in_the_file(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()

    def refuse(_: Tensor) -> None:
        message = "no"
        raise ValueError(message)

    handle = training.model[3].register_full_backward_pre_hook(lambda *_: refuse(_[1]))
    with pytest.raises(ValueError, match="no"):
        training.step()
    handle.remove()
    training.optimizer.zero_grad()
    training.step()
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        assert [flow.event.failed is not None for flow in run] == [False, True, False]
        assert "backward_failed" in {finding.rule for finding in run.findings}


# ---- what training sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_training_is_the_same_in_bits(native, told, tmp_path) -> None:
    Training().step()  # what torch imports at its first step draws from Python's stream
    states = []
    for more in ({}, {"run_file": tmp_path / "run.fxgrad"}):
        training = Training(native=native, told=told, **more)
        for _ in range(STEPS):
            training.watch.note(loss=training.step(), lr=0.05)
        states.append(training.state())
        training.watch.remove()
    plain = Training()
    plain.watch.remove()
    for _ in range(STEPS):
        plain.step()
    assert same(states[0], states[1]) and same(plain.state(), states[1])


def growing(steps: int, path: Path) -> tuple[int, int, int]:
    training = Training(run_file=path, told=True, keep=(64, 8))
    counts = []
    for number in range(steps):
        training.watch.note(loss=training.step())
        if number in (steps // 2, steps - 1):
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(issubclass(type(one), Tensor) for one in objects)
            counts.append((tensors, len(objects), len([*Path("/proc/self/fd").iterdir()])))
            del objects
    training.watch.remove()
    (tensors, objects, files), (later, more, still) = counts
    return later - tensors, more - objects, still - files


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="file handles are counted in /proc")
@pytest.mark.parametrize("steps", [600, pytest.param(2000, marks=pytest.mark.sweep)])
def test_nothing_grows(steps, tmp_path) -> None:
    tensors, objects, files = growing(steps, tmp_path / "run.fxgrad")
    assert tensors <= 4 and files <= 0
    assert objects < 600  # an event would be hundreds for each of hundreds of steps


def test_no_thread_and_no_file_is_left(tmp_path) -> None:
    before = threading.active_count()
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()
    training.watch.remove()
    training.watch.remove()
    assert threading.active_count() == before
    RunFile.create(tmp_path / "run.fxgrad").close()  # nobody holds it
    assert {path.name for path in tmp_path.iterdir()} <= {"run.fxgrad", "run.fxgrad.lock"}


def test_a_model_that_is_forgotten_takes_its_thread_along(tmp_path) -> None:
    before = set(threading.enumerate())
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()
    (thread,) = set(threading.enumerate()) - before
    del training
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


# ---- beside the flows -------------------------------------------------------------------------------------------


def test_a_note_stands_at_its_step(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad", told=True)
    seen = []
    for number in range(4):
        loss = training.model(torch.randn(6, 4)).square().mean()
        training.watch.note(before=number)  # its backward pass is still to come
        loss.backward()
        training.watch.note(loss=loss)
        seen.append(float(loss.detach()))
        with torch.no_grad():
            loss.zero_()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.watch.note(after=number)
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        notes = run.notes
        assert {name: series.steps for name, series in notes.items()} == dict.fromkeys(
            ("before", "loss", "after"), (0, 1, 2, 3)
        )
        assert notes["before"].values == notes["after"].values == (0, 1, 2, 3)
        assert notes["loss"].values == tuple(seen)


def test_what_breaks_is_found_at_its_step(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad", keep=(1, 1000))
    for number in range(520):
        training.step()
        if number == 299:
            kept = training.model[4].weight.detach().clone()
            training.model[4].weight.data[0, 0] = float("nan")
        if number == 300:
            training.model[4].weight.data.copy_(kept)
            for parameter in training.model.parameters():
                parameter.data.nan_to_num_(0.1)
            training.optimizer.state.clear()
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        (finding,) = [one for one in run.findings if one.rule == "nonfinite"]
        assert (finding.severity, finding.backward) == ("error", 300)
        assert {299, 300} <= set(run.steps)  # neither is thinned away
        before, then = ({one.rule for one in run.flow(step).findings} for step in (299, 300))
        assert "nonfinite" in then - before


def test_alarms_are_in_the_file(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad", limits={"l2_norm": 1e-6}, on_finding=lambda _: None)
    for _ in range(3):
        training.step()
    alarms = training.watch.alarms
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        kept = [one for one in run.findings if one.message in {alarm.message for alarm in alarms}]
        assert kept == list(alarms) and [one.backward for one in kept] == [0, 1, 2]


def test_another_process_reads_meanwhile(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad")
    code = "import sys, fxgrad; print(len(fxgrad.open_run(sys.argv[1]).steps), 'torch' in sys.modules)"
    for count in (3, 8):
        while len(training.losses) < count:
            training.step()
        read = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run.fxgrad")], capture_output=True, text=True, check=True
        )
        # The last one is written when the step behind it is over.
        assert read.stdout.split() in ([str(count - 1), "False"], [str(count - 2), "False"])
    training.watch.remove()


@pytest.mark.parametrize("kind", [FunctionModeAround, FunctionModeAroundTheWholeStep, DispatchModeAroundTheWholeStep])
@pytest.mark.parametrize("capture", [False, True])
def test_modes_of_the_user_see_nothing_of_it(kind, capture, tmp_path) -> None:
    options = {"run_file": tmp_path / "run.fxgrad", "capture_batch": capture}
    assert differences(run(kind, None), run(kind, options)) == []
