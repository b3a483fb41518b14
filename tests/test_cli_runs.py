"""The command line over run files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.command import exporting
from fxgrad.run_file import RunFile
from fxgrad.schema import Finding
from tests import flows
from tests.run_file.making import at, step_of


def call(*words: object, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.fxgrad"
    with RunFile.create(path) as file:
        for number in range(150):
            file.append(step_of(number), notes={"loss": 1 / (1 + number), "lr": 0.1})
        file.found([Finding("spike", "error", "it stands out", "", node=flows.node("/op1"), backward=3)], 3)
    return path


def test_log(run_file) -> None:
    lines = call("log", run_file, "--last", 2).splitlines()
    assert lines[0].startswith(f"{run_file}: 150 flows of Net, steps 0 to 149 (")
    assert any(line.startswith("  step 3: ") and "spike" in line and "/op1" in line for line in lines)
    assert "  loss: 1 at first, 0.00667 at last, from 0.00667 to 1" in lines
    assert lines[-1].startswith("  step 149: ") and lines[-1].endswith(", loss 0.00667, lr 0.1")
    assert lines[-3] == "the last 2 of 150 flows (l2_norm):"


def test_log_of_a_run_without_a_step(tmp_path) -> None:
    RunFile.create(tmp_path / "run.fxgrad").close()
    assert "0 flows of no model yet" in call("log", tmp_path / "run.fxgrad")


def test_render_takes_a_step(run_file, tmp_path) -> None:
    output = tmp_path / "flow.json"
    call("render", run_file, "--step", 7, "-o", output)
    assert fxgrad.load(output) == step_of(7)
    call("render", run_file, "-o", output)
    assert fxgrad.load(output) == step_of(149)
    assert "the nearest is 149" in call("render", run_file, "--step", 700, code=2)


def test_compare_takes_two_steps(run_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    other, ninth = tmp_path / "other.fxgrad", at(step_of(9), 0)
    with RunFile.create(other) as file:
        file.append(ninth)
    assert call("compare", run_file, "--steps", 3, 9) == f"{fxgrad.compare(step_of(3), step_of(9))}\n"
    assert call("compare", run_file, other, "--steps", 3, 0) == f"{fxgrad.compare(step_of(3), ninth)}\n"
    assert "--steps 0 100" in call("compare", run_file, code=2)


def test_plot_shows_a_run(run_file, tmp_path) -> None:
    assert "backward 0 to 149" in call("plot", run_file, "--value", "/op1")
    call("plot", run_file, "-o", tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_diagnose_tells_of_what_was_found_meanwhile(run_file) -> None:
    text = call("diagnose", run_file, code=1)
    assert "spike" in text and "it stands out" in text


def test_an_empty_run_is_told(tmp_path) -> None:
    RunFile.create(tmp_path / "run.fxgrad").close()
    for command in ("diagnose", "plot", "render"):
        assert "no backward pass was recorded" in call(command, tmp_path / "run.fxgrad", code=2)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("what", ["values", "parameters"])
def test_export_has_a_row_for_each_step_and_value(suffix, what, run_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "_AT_ONCE", 40)
    output = tmp_path / f"run.{suffix}"
    call("export", run_file, "-o", output, "--of", what)
    found = pd.read_csv(output) if suffix == "csv" else pd.read_parquet(output)
    with fxgrad.open_run(run_file) as run:
        expected = run.to_pandas(of=what)
    assert list(found.columns) == list(expected.columns) and len(found) == len(expected)
    assert list(found["l2_norm"].dropna()) == pytest.approx(list(expected["l2_norm"].dropna()), rel=1e-15)
    assert list(found["step"]) == list(expected["step"])


def test_export_of_notes_and_of_whole_flows(run_file, tmp_path) -> None:
    call("export", run_file, "-o", tmp_path / "notes.csv", "--of", "notes")
    with (tmp_path / "notes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[4] == {"step": "4", "loss": "0.2", "lr": "0.1"} and len(rows) == 150
    call("export", run_file, "-o", tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["format"] == "fxgrad-series"
    assert fxgrad.load_series(tmp_path / "run.json")[7] == step_of(7)
    assert "run file only" in call("export", tmp_path / "run.json", "-o", tmp_path / "x.csv", "--of", "notes", code=2)
    assert not (tmp_path / "x.csv").exists() and len(list(tmp_path.iterdir())) == 2


def test_a_damaged_run_is_told(run_file, tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    path.write_bytes(run_file.read_bytes()[:20000])
    for command in (("log",), ("render",), ("diagnose",), ("plot",), ("export", "-o", tmp_path / "x.csv")):
        assert "damaged" in call(command[0], path, *command[1:], code=2)
    assert not (tmp_path / "x.csv").exists()
