"""What becomes of errors around a run file: training goes on, or stops where the user wants that."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import fxgrad
from fxgrad.engine import run_writer
from fxgrad.engine.run_events import WrittenEvents
from fxgrad.errors import LogWarning, OptionError, RunFileError
from fxgrad.run_file import RunFile
from tests.engine.test_run_writer import Training, net, run_of


def test_an_unknown_option() -> None:
    model = net()
    for options, words in (
        ({"run_file": 3}, "takes the path of a file"),
        ({"run_file": "x", "run_file_errors": "ignore"}, "'warn' or 'raise'"),
        ({"run_file": "x", "keep": 0}, "keep=0 is not known"),
        ({"keep": 10}, "give run_file="),
    ):
        with pytest.raises(OptionError, match=words):
            fxgrad.watch(model, **options)
    assert "forward" not in vars(model)


@pytest.fixture
def broken(monkeypatch, tmp_path) -> Path:
    """A file that cannot take its third and fourth flow."""
    count = 0
    plain = RunFile._put_row

    def put(self: RunFile, *args: Any) -> None:
        nonlocal count
        count += 1
        plain(self, *args)
        if count in (3, 4):
            message = "database or disk is full"
            raise run_writer.RunFileError(message)

    monkeypatch.setattr(RunFile, "_put_row", put)
    return tmp_path / "run.fxgrad"


def test_training_goes_on_when_the_disk_is_full(broken) -> None:
    training = Training(run_file=broken)
    with pytest.warns(LogWarning, match=r"training goes on: database or disk is full") as warned:
        training.steps(6)
    training.watch.remove()
    assert len(warned) == 1
    report = training.watch.run_file
    assert (report.written, report.missed, report.error) == (4, 2, "database or disk is full")
    assert "disk is full" in repr(training.watch)
    with fxgrad.open_run(broken) as run:
        assert run.steps == (0, 1, 4, 5)


def test_or_stops_where_the_user_wants_that(broken) -> None:
    training = Training(run_file=broken, run_file_errors="raise")
    with pytest.raises(RunFileError, match="disk is full"):
        training.steps(6)
    assert len(training.losses) == 4  # raised by the forward behind the end of the one that was lost
    with pytest.raises(RunFileError, match="disk is full"):
        training.watch.remove()  # the other one
    assert not training.watch.active and "forward" not in vars(training.model)


@pytest.mark.parametrize("errors", ["warn", "raise"])
def test_a_file_that_cannot_be_written_is_told_at_once(errors, tmp_path) -> None:
    path, model = tmp_path / "run.fxgrad", net()
    path.write_text("my notes")
    if errors == "raise":
        with pytest.raises(RunFileError, match="no run file"):
            fxgrad.watch(model, run_file=path, run_file_errors="raise")
        assert "forward" not in vars(model)
    else:
        with pytest.warns(LogWarning, match="no run file"):
            training = Training(model, run_file=path)
        training.step()
        assert len(training.watch.history) == 1
        training.watch.remove()
    assert path.read_text() == "my notes"


def test_two_watches_of_one_file(tmp_path) -> None:
    first = Training(run_file=tmp_path / "run.fxgrad")
    with pytest.warns(LogWarning, match="is being written by another process or watch"):
        second = Training(run_file=tmp_path / "run.fxgrad")
    for training in (first, second, first):
        training.step()
    first.watch.remove()
    second.watch.remove()
    assert len(run_of(tmp_path / "run.fxgrad")) == 2


def test_a_thread_that_does_not_answer_does_not_stop_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "_PATIENCE", 0.2)
    training = Training(run_file=tmp_path / "run.fxgrad")
    training.step()
    hangs = threading.Event()
    monkeypatch.setattr(WrittenEvents, "write", lambda *_: hangs.wait())
    with pytest.warns(LogWarning, match="slower than the training"):
        training.steps(4)
    assert training.watch.run_file.missed > 0
    hangs.set()
    training.watch.remove()
