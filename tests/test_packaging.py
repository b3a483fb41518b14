"""What `import fxgrad` costs, what the package says about itself, and which parts stay free of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fxgrad

PACKAGE = Path(fxgrad.__file__).parent


def modules_after(code: str) -> set[str]:
    """The modules that are loaded in a new Python after it has run ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return set(done.stdout.split())


def test_the_house_shows_every_room_and_no_other() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    house = text.split("## The house")[1].split("```")[1].split("\nweb/")[0]
    shown = set(re.findall(r"(?<![\w/.])(\w+(?:\.py|/))(?=[,\s])", house.split("\n", 2)[2]))
    rooms = {
        f"{path.name}{'/' * path.is_dir()}" for path in PACKAGE.iterdir() if not path.name.startswith(("__p", "."))
    }
    assert rooms - {"py.typed", "__main__.py"} <= shown
    inside = {path.name for room in PACKAGE.iterdir() if room.is_dir() for path in room.iterdir()}
    assert {name for name in shown if name.rstrip("/") not in inside} <= rooms


def test_import_does_nothing_else() -> None:
    loaded = modules_after("import fxgrad") - modules_after("import typing, importlib")
    assert {name for name in loaded if not name.startswith("_")} <= {"fxgrad", "fxgrad.presenting"}


@pytest.mark.parametrize(
    "module",
    [
        "errors",
        "schema",
        "graph",
        "store",
        "plain",
        "series",
        "run_file",
        "diagnosis",
        "render.dot",
        "render.svg",
        "render.text",
        "render.findings",
        "render.findings_json",
        "render.sarif",
        "render.picture",
        "render.report",
        "render.comparing",
        "render.page",
        "render.plots",
        "comparison",
        "frames",
        "command.plotting",
        "cli",
        "command.outputs",
    ],
)
def test_these_do_not_import_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import fxgrad.{module}")


def test_saved_flow_is_read_without_torch() -> None:
    names = "load, load_series, save_series, diagnose, GradientFlow, Finding, Diagnosis, Thresholds, FxgradError"
    code = f"import fxgrad; {', '.join(f'fxgrad.{name}' for name in names.split(', '))}"
    assert "torch" not in modules_after(code)


def test_public_names_are_literal_sorted_and_there() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert names == sorted(names)
    assert set(names) == set(fxgrad._HOME)
    for name in names:
        assert getattr(fxgrad, name) is getattr(import_module(fxgrad._HOME[name]), name)
        assert name in dir(fxgrad)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gradientflow'"):
        fxgrad.gradientflow  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_the_one_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fxgrad.__version__)


@pytest.mark.parametrize("first", ["fxgrad.integrations.CsvLog", "fxgrad.integrations.WandbLog", "str"])
def test_what_is_loaded_in_a_training_loop_draws_nothing(first: str) -> None:
    """Rich draws a number when it is imported."""
    code = f"""
import random, torch, fxgrad
random.seed(0)
{first}
model = torch.nn.Linear(3, 1)
with fxgrad.watch(model, status=True, log_every=1) as watch:
    model(torch.ones(2, 3)).sum().backward()
print(watch.flow(), watch.history, watch.flow().to_csv())
assert "rich.style" in __import__("sys").modules
assert random.getstate() == random.Random(0).getstate()
"""
    modules_after(code)


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
