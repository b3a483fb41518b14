"""A run file and processes: ranks, forks, ends and kills."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import fxgrad
from fxgrad.run_file import RunFile
from tests.engine.test_run_writer import Training


def test_rank_0_alone_writes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()
    training.watch.remove()
    assert training.watch.run_file.written == 0 and training.watch.run_file.error is None
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_file_alone(tmp_path) -> None:
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()

    def child() -> None:
        training.step()
        training.step()
        training.watch.note(loss=1.0)
        training.watch.remove()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    training.step()
    training.watch.remove()
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        assert run.steps == (0, 1)
        assert run.notes == {}


SCRIPT = """
    import sys, torch, fxgrad
    from torch import nn
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fxgrad.watch(model, optimizer=optimizer, run_file=sys.argv[1])
    print("ready", flush=True)
    for step in range(int(sys.argv[2])):
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.note(loss=loss)
        print(step, flush=True)
    if len(sys.argv) > 3:
        raise SystemExit(sys.argv[3])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.mark.parametrize("end", [(), ("stopped by an error",)])
def test_a_process_that_ends_has_written_its_last_step(script, end, tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    subprocess.run([sys.executable, script, path, "5", *end], capture_output=True, check=not end, timeout=120)
    with fxgrad.open_run(path) as run:
        assert run.steps == run.notes["loss"].steps == (0, 1, 2, 3, 4)


def trains(path: Path, told: Any) -> None:
    """A process that trains until it is killed, and tells of each step."""
    training = Training(run_file=path, told=True)
    for step in itertools.count():
        training.watch.note(loss=training.step())
        os.write(told, f"{step}\n".encode())


def trains_with_a_child(path: Path, told: Any) -> None:
    """A process that trains with a forked child, such as a data loader's worker, which outlives it for a while."""
    training = Training(run_file=path)
    training.step()
    if os.fork() == 0:
        threading.Event().wait(60)
        os._exit(0)
    os.write(told, b"ready\n")
    threading.Event().wait(60)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_outlives_a_killed_process_does_not_hold_the_file(tmp_path) -> None:
    read, write = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=trains_with_a_child, args=(tmp_path / "r.fxgrad", write)
    )
    process.start()
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.readline() == "ready\n"
        process.kill()
        process.join()
        RunFile.create(tmp_path / "r.fxgrad").close()
    process.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.sweep)])
def test_a_kill_loses_at_most_the_event_in_flight(times, tmp_path) -> None:
    numbers = random.Random(times)  # noqa: S311  # nothing secret
    for attempt in range(times):
        path = tmp_path / f"run{attempt}.fxgrad"
        read, write = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=trains, args=(path, write))
        process.start()
        os.close(write)
        with os.fdopen(read) as pipe:
            for _ in range(1 + numbers.randrange(300)):
                pipe.readline()
            threading.Event().wait(numbers.random() / 100)
            process.kill()
            process.join()
            told = pipe.read().split()
        process.close()
        with fxgrad.open_run(path) as run:
            steps = run.steps
            assert steps == tuple(range(len(steps)))
            done = int(told[-1]) + 1 if told else 1
            assert len(steps) >= done - 1, f"{done} steps were done, and {len(steps)} are in the file"
            if steps:
                assert run.flow(steps[-1]).event.backward == steps[-1]
        with RunFile.create(path) as again:  # nobody holds it any more
            assert again.first == len(steps)
