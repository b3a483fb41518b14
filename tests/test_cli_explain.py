"""``fxgrad explain``: the pages of the checks, from a checkout and from an installed wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.schema import RULES

ROOT = Path(fxgrad.__file__).parents[1]


@pytest.mark.parametrize("check", RULES)
def test_the_page_of_a_check_is_printed(check: str) -> None:
    done = CliRunner().invoke(app, ["explain", check])
    assert done.exit_code == 0
    assert done.stdout == (ROOT / "docs" / "findings" / f"{check}.md").read_text(encoding="utf-8")


def test_without_a_name_all_checks_are_listed() -> None:
    done = CliRunner().invoke(app, ["explain"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(RULES)


def test_a_check_that_does_not_exist_is_misuse() -> None:
    done = CliRunner().invoke(app, ["explain", "ded"])
    assert done.exit_code == 2
    assert "explain ded: there is no such check. Use one of dead" in done.stderr


def test_an_installed_package_has_the_pages(tmp_path: Path) -> None:
    """Laid out as the build does it: by the table of pyproject.toml."""
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("wheel.force-include]")[2]
    ((source, target),) = re.findall(r'^"(.+)" = "(.+)"$', table.partition("\n[")[0], re.MULTILINE)
    shutil.copytree(ROOT / "fxgrad", tmp_path / "fxgrad", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / source, tmp_path / target)
    code = "from fxgrad.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "dead"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("# dead: units of an activation never fire")


def test_without_pages_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxgrad.command.explaining._FOLDERS", (tmp_path,))
    done = CliRunner().invoke(app, ["explain", "dead"])
    assert done.exit_code == 2
    assert f"no page in {tmp_path}" in done.stderr
