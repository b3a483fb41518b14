"""A run file and processes: ranks, forks, ends and kills."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

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


FORKS = pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here")


@pytest.fixture(scope="module")
def clean() -> Any:
    """Processes in which torch has not run a backward pass: behind one on several threads it refuses in forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.test_run_writer"])
    return context


def goes_on_in_a_child(path: Path) -> None:
    torch.set_num_threads(1)  # a forked child waits for ever for the others
    training = Training(run_file=path)
    training.step()
    if (child := os.fork()) == 0:
        training.step()
        training.step()
        training.watch.note(loss=1.0)
        training.watch.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    training.step()
    training.watch.remove()


@FORKS
def test_a_forked_child_leaves_the_file_alone(clean, tmp_path) -> None:
    process = clean.Process(target=goes_on_in_a_child, args=(tmp_path / "run.fxgrad",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
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


def trains(path: Path, told: Connection) -> None:
    """A process that trains until it is killed, and tells of each step."""
    training = Training(run_file=path, told=True)
    for step in itertools.count():
        training.watch.note(loss=training.step())
        told.send_bytes(str(step).encode())


def trains_with_a_child(path: Path, told: Connection) -> None:
    """A process that trains with a forked child, such as a data loader's worker, which outlives it for a while."""
    training = Training(run_file=path)
    training.step()
    if os.fork() == 0:
        threading.Event().wait(60)
        os._exit(0)
    told.send_bytes(b"ready")
    threading.Event().wait(60)


@FORKS
def test_a_child_that_outlives_a_killed_process_does_not_hold_the_file(clean, tmp_path) -> None:
    read, write = clean.Pipe(duplex=False)
    process = clean.Process(target=trains_with_a_child, args=(tmp_path / "r.fxgrad", write))
    process.start()
    write.close()
    assert read.recv_bytes() == b"ready"
    process.kill()
    process.join()
    RunFile.create(tmp_path / "r.fxgrad").close()


def until_the_end(read: Connection) -> Iterator[int]:
    """The steps that a process told of before it was killed."""
    with contextlib.suppress(EOFError, OSError):  # OSError: killed in the middle of a message
        while True:
            yield int(read.recv_bytes())


@FORKS
@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.sweep)])
def test_a_kill_loses_at_most_the_event_in_flight(times, clean, tmp_path) -> None:
    numbers = random.Random(times)  # noqa: S311  # nothing secret
    for attempt in range(times):
        path = tmp_path / f"run{attempt}.fxgrad"
        read, write = clean.Pipe(duplex=False)
        process = clean.Process(target=trains, args=(path, write))
        process.start()
        write.close()
        for _ in range(1 + numbers.randrange(300)):
            read.recv_bytes()
        threading.Event().wait(numbers.random() / 100)
        process.kill()
        process.join()
        done = 1 + max(until_the_end(read), default=0)
        with fxgrad.open_run(path) as run:
            steps = run.steps
            assert steps == tuple(range(len(steps)))
            assert len(steps) >= done - 1, f"{done} steps were done, and {len(steps)} are in the file"
            if steps:
                assert run.flow(steps[-1]).event.backward == steps[-1]
        with RunFile.create(path) as again:  # nobody holds it any more
            assert again.first == len(steps)
