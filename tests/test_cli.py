"""The command line, as somebody types it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fxgrad
from fxgrad.cli import app
from fxgrad.errors import GraphvizMissingError

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.drop = nn.Dropout()
        self.last = nn.Linear(width, 2)
    def forward(self, x, scale=None):
        h = torch.relu(self.first(x))
        self.seen = self.training
        h = self.drop(h)
        return self.last(h if scale is None else h * scale)

class Raising(Net):
    def forward(self, x):
        raise RuntimeError("the valve is shut")

class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class Integers(Net):
    def forward(self, x):
        return super().forward(x).argmax(-1)

def half_of_it(output):
    return output.sum() / 2

def not_a_loss(output):
    return output
"""
RUN = ("run", "models.py:Net", "--input", "8x4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with models.py to work in."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("fxgrad_file_models", None)


def typed(*words: str) -> Result:
    """What the command line answers."""
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def done(*words: str) -> Result:
    result = typed(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words: str) -> str:
    """The message of a command that is misused."""
    result = typed(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr
    return result.stderr


def files(folder: Path) -> set[str]:
    """What is in the folder besides the models."""
    return {path.name for path in folder.iterdir()} - {"models.py", "__pycache__"}


class TestRun:
    def test_prints_the_table(self) -> None:
        result = done(*RUN)
        assert "first" in result.stdout
        assert "last" in result.stdout

    def test_quiet(self) -> None:
        assert done(*RUN, "-o", "flow.json", "--quiet").stdout == "wrote flow.json\n"

    def test_writes_by_suffix(self, folder: Path) -> None:
        names = ["flow.svg", "flow.html", "flow.dot", "flow.json", "flow.txt"]
        result = done(*RUN, *(word for name in names for word in ("-o", name)))
        assert files(folder) == set(names)
        for name in names:
            assert f"wrote {name}" in result.stdout
        assert "</svg>" in Path("flow.svg").read_text()
        assert "digraph" in Path("flow.dot").read_text()
        assert Path("flow.html").read_text().startswith("<!doctype html>")
        assert json.loads(Path("flow.json").read_text())
        assert "first" in Path("flow.txt").read_text()
        assert "\x1b" not in Path("flow.txt").read_text()

    def test_flow_is_the_one_of_the_library(self) -> None:
        done(*RUN, "--loss", "sum", "--eval", "-o", "flow.json")
        flow = fxgrad.load("flow.json")
        assert flow.event.loss == "the sum over all outputs"
        assert not flow.capture.training
        assert flow.site("last").l2_norm == pytest.approx(4.0)  # 8 * 2 ones

    def test_same_seed_same_flow(self) -> None:
        for name, seed in (("a.json", "0"), ("b.json", "0"), ("c.json", "1")):
            done(*RUN, "--seed", seed, "-o", name)
        a, b, c = (Path(name).read_text() for name in ("a.json", "b.json", "c.json"))
        assert a == b != c

    @pytest.mark.parametrize(("mode", "training"), [([], True), (["--train"], True), (["--eval"], False)])
    def test_mode(self, mode: list[str], *, training: bool) -> None:
        done(*RUN, *mode, "-o", "flow.json")
        assert fxgrad.load("flow.json").capture.training is training

    @pytest.mark.parametrize("front_end", ["symbolic", "eager"])
    def test_capture(self, front_end: str) -> None:
        done(
            "run",
            "torch.nn:Linear",
            "in_features=4",
            "out_features=2",
            "-i",
            "8x4",
            "--capture",
            front_end,
            "-o",
            "f.json",
        )
        assert fxgrad.load("f.json").capture.front_end == front_end

    def test_statistics(self) -> None:
        done(*RUN, "--statistics", "norm", "-o", "flow.json")
        assert fxgrad.load("flow.json").event.level == "norm"

    @pytest.mark.parametrize("norm", ["l2_norm", "rms", "max_abs"])
    def test_norm_and_depth(self, norm: str) -> None:
        done(*RUN, "--norm", norm, "--depth", "1", "-o", "flow.svg")
        assert norm in Path("flow.svg").read_text()

    def test_own_loss(self) -> None:
        done(*RUN, "--loss", "models.py:half_of_it", "-o", "flow.json")
        assert fxgrad.load("flow.json").event.loss == "half_of_it"

    def test_stock_model_by_its_own_inputs(self) -> None:
        done("run", "fxgrad.demo:residual_cnn", "--input", "fxgrad.demo:residual_cnn_inputs", "--loss", "cross_entropy")

    def test_several_and_named_inputs(self) -> None:
        done("run", "models.py:Net", "-i", "8x4", "-i", "scale=scalar")

    def test_model_file_is_no_half_module_afterwards(self) -> None:
        assert "models" not in sys.modules


class TestMisuse:
    @pytest.mark.parametrize(
        ("words", "cause", "way_out"),
        [
            (["run", "models.py:Nett", "-i", "8x4"], "has no 'Nett'", "Did you mean Net"),
            (["run", "models.py:Net", "depth=3", "-i", "8x4"], "unexpected keyword argument 'depth'", "name=value"),
            (["run", "models.py:Net", "-i", "8x4xx"], "is no shape", "8x3x224x224"),
            (["run", "models.py:Net", "-i", "8x5"], "Net raised RuntimeError", "(8, 5)"),
            (["run", "models.py:Net"], "no --input", "Give one --input for each argument"),
            (["run", "models.py:Net", "-i", "8", "-i", "8", "-i", "8"], "3 --input", "too many positional arguments"),
            (["run", "models.py:Net", "-i", "y=8x4"], "1 --input", "missing a required argument: 'x'"),
            (["run", "models.py:Raising", "-i", "8x4"], "the valve is shut", "Raising raised RuntimeError"),
            (["run", "models.py:Frozen", "-i", "8x4"], "Frozen", "require"),
            (["run", "models.py:Integers", "-i", "8x4"], "Integers", "differentiated"),
            ([*RUN, "--loss", "models.py:not_a_loss"], "one value", "mean"),
            ([*RUN, "--loss", "no_loss"], "not a known loss", "nll_loss"),
            ([*RUN, "--loss", "nll_loss", "-o", "no/flow.svg"], "there is no folder no", "Make it first"),
            ([*RUN, "-o", "flow.gif"], "'.gif'", ".svg, .png, .pdf, .html, .dot, .json, .csv, .parquet, .txt"),
            ([*RUN, "-o", "flow"], "suffix ''", ".svg, .png, .pdf, .html, .dot, .json, .csv, .parquet, .txt"),
            ([*RUN, "--theme", "blue"], "blue", "dark"),
            ([*RUN, "--scale", "log"], "log", "absolute"),
            ([*RUN, "--depth", "-1"], "--depth", "0"),
            ([*RUN, "--capture", "magic"], "magic", "symbolic"),
            ([*RUN, "--norm", "l1"], "l1", "rms"),
            ([*RUN, "--inputs", "8"], "--inputs", "--input"),
            (["rum"], "rum", "run"),
            (["render", "nowhere.json"], "nowhere.json", ""),
            (["render", "models.py"], "models.py", ""),
        ],
    )
    def test_names_cause_and_way_out(self, folder: Path, words: list[str], cause: str, way_out: str) -> None:
        message = refused(*words)
        assert cause in message
        assert way_out in message
        assert files(folder) == set()

    def test_output_is_checked_before_the_work(self) -> None:
        assert "no folder" in refused("run", "models.py:Raising", "-i", "8x4", "-o", "no/flow.svg")

    def test_traceback_when_asked(self) -> None:
        assert "--traceback" in refused("run", "models.py:Raising", "-i", "8x4")
        result = typed("run", "models.py:Raising", "-i", "8x4", "--traceback")
        assert result.exit_code == 2
        assert "Traceback" in result.output
        assert 'raise RuntimeError("the valve is shut")' in result.output


class TestFiles:
    def test_old_file_survives_a_failure(self, folder: Path) -> None:
        Path("flow.json").write_text("old")
        refused("run", "models.py:Raising", "-i", "8x4", "-o", "flow.json")
        assert Path("flow.json").read_text() == "old"
        assert files(folder) == {"flow.json"}

    def test_failure_between_two_files_leaves_neither(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> str:
            message = "no room"
            raise fxgrad.FxgradError(message)

        monkeypatch.setattr(fxgrad.GradientFlow, "to_dot", fail)
        assert "no room" in refused(*RUN, "-o", "flow.json", "-o", "flow.dot")
        assert files(folder) == set()

    def test_folder_in_the_way(self, folder: Path) -> None:
        (folder / "flow.svg").mkdir()
        assert "no ordinary file" in refused(*RUN, "-o", "flow.svg")

    def test_through_a_link(self, folder: Path) -> None:
        (folder / "real.json").write_text("old")
        (folder / "flow.json").symlink_to("real.json")
        done(*RUN, "-o", "flow.json")
        assert (folder / "flow.json").is_symlink()
        assert fxgrad.load("real.json")

    def test_ordinary_permissions(self) -> None:
        umask = os.umask(0o022)
        try:
            done(*RUN, "-o", "flow.json")
        finally:
            os.umask(umask)
        assert stat.S_IMODE(Path("flow.json").stat().st_mode) == 0o644

    def test_permissions_of_the_old_file_are_kept(self) -> None:
        Path("flow.json").write_text("old")
        Path("flow.json").chmod(0o600)
        done(*RUN, "-o", "flow.json")
        assert stat.S_IMODE(Path("flow.json").stat().st_mode) == 0o600

    def test_without_graphviz_the_dot_text_is_written(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> str:
            message = "install pygraphviz"
            raise GraphvizMissingError(message)

        monkeypatch.setattr(fxgrad.GradientFlow, "to_svg", fail)
        message = refused(*RUN, "-o", "flow.svg", "-o", "flow.json")
        assert "install pygraphviz" in message
        assert "flow.dot" in message
        assert files(folder) == {"flow.dot", "flow.json"}


class TestRender:
    def test_draws_what_run_wrote(self) -> None:
        done(*RUN, "-o", "flow.json", "-o", "flow.svg")
        done("render", "flow.json", "-o", "again.svg", "-o", "again.json")
        assert Path("again.svg").read_text() == Path("flow.svg").read_text()
        assert Path("again.json").read_text() == Path("flow.json").read_text()

    def test_options_of_a_picture_reach_it(self) -> None:
        done(*RUN, "-o", "flow.json", "-o", "plain.svg")
        plain = Path("plain.svg").read_text()
        for words in (["--theme", "dark"], ["--lr"], ["--scale", "absolute"], ["--depth", "0"]):
            done("render", "flow.json", "-o", "other.svg", *words)
            other = Path("other.svg").read_text()
            assert (other == plain) == (words == ["--depth", "0"])  # a model without inner modules

    def test_pictures_as_png_and_pdf(self) -> None:
        if importlib.util.find_spec("cairosvg") is None and shutil.which("rsvg-convert") is None:
            pytest.skip("neither CairoSVG nor rsvg-convert is here")
        done(*RUN, "-o", "flow.png", "-o", "flow.pdf")
        assert Path("flow.png").read_bytes().startswith(b"\x89PNG")
        assert Path("flow.pdf").read_bytes().startswith(b"%PDF")

    def test_without_a_converter_nothing_is_run(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        monkeypatch.setenv("PATH", "")
        message = refused(*RUN, "-o", "flow.png")
        assert "pip install 'fxgrad[image]'" in message
        assert "rsvg-convert" in message
        assert files(folder) == set()

    def test_every_value_on_request(self) -> None:
        short = done(*RUN, "-o", "flow.json").stdout
        long = done(*RUN, "--all").stdout
        assert "Gradient flow of" not in short
        assert "Gradient flow of" in long
        assert "Gradient flow of" in done("render", "flow.json", "--all").stdout

    def test_prints_the_profile_without_output(self) -> None:
        profile = done(*RUN, "-o", "flow.json").stdout.replace("wrote flow.json\n", "")
        assert done("render", "flow.json").stdout == profile

    def test_without_torch(self) -> None:
        done(*RUN, "-o", "flow.json")
        code = (
            "import sys\n"
            "from fxgrad.cli import app\n"
            "app(['render', 'flow.json', '-o', 'x.svg', '-o', 'x.txt'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env=_environment())
        assert Path("x.svg").is_file()


class TestDemo:
    def test_writes_where_it_says(self, folder: Path) -> None:
        result = done("demo", "-o", "made/here")
        assert files(folder / "made" / "here") == {"flow.svg", "flow.json"}
        assert f"wrote {Path('made/here/flow.svg')}" in result.stdout
        assert "sigmoid_mlp" in result.stdout
        assert "residual_cnn" in result.stdout
        assert fxgrad.load("made/here/flow.json").capture.model == "SigmoidMLP"

    def test_other_model(self) -> None:
        done("demo", "--model", "residual_cnn")
        assert fxgrad.load("flow.json").capture.model == "ResidualCNN"

    def test_folder_that_cannot_be_made(self) -> None:
        assert "cannot make this folder" in refused("demo", "-o", "models.py")


def test_as_a_process() -> None:
    """The exit code and the streams, of the real thing."""
    words = [sys.executable, "-m", "fxgrad", "run", "models.py:Raising", "-i", "8x4"]
    process = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("fxgrad: Raising raised RuntimeError")


def test_version() -> None:
    assert done("--version").stdout == f"fxgrad {fxgrad.__version__}\n"


@pytest.mark.parametrize("command", [[], ["run"], ["render"], ["diagnose"], ["demo"]])
def test_help(command: list[str]) -> None:
    assert "--help" in done(*command, "--help").stdout


def test_shell_completion() -> None:
    assert "--install-completion" in done("--help").stdout
    words = {"_FXGRAD_COMPLETE": "complete_bash", "COMP_WORDS": "fxgrad ren", "COMP_CWORD": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "fxgrad"], capture_output=True, text=True, check=True, env=_environment() | words
    )
    assert process.stdout.split() == ["render"]


def _environment() -> dict[str, str]:
    """Of a process that finds this fxgrad from another folder."""
    return {**os.environ, "PYTHONPATH": str(Path(fxgrad.__file__).parent.parent)}


def test_torch_is_left_as_it_was() -> None:
    """The command may seed torch, but switches nothing."""
    done(*RUN)
    assert torch.is_grad_enabled()
