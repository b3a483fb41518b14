"""The pages of the documentation do what they say.

How a page is run: from top to bottom, in an empty folder, as one module.

* A ``python`` block is executed.  If its first line is a comment with a file's name (``# models.py``), it is written
  to that file instead.
* Of a ``sh`` block, each line that begins with ``fxgrad `` or ``torchrun `` is run as that command line; all other
  lines are not run.  A line may end with ``# exit code 2``, if it is not 0.
* A ``text`` block that follows with nothing but blank lines between is what was printed.  White space does not count,
  and ``...`` stands for anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.schema import REASONS
from tests.trackers import keep_in

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (?P<name>[\w-]+\.py)\n")
_EXIT_CODE = re.compile(r"\s+# exit code (\d+)$")
_LINK = re.compile(r"(?:\]\(|(?:src|href)=\")(?P<target>[^)\"\s]+)[)\"]")
_LOCAL = re.compile(r"(?<![\w.])(?:/(?:home|root|tmp|work|Users|opt|mnt)/|[A-Z]:\\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with its line number and what it is to print."""

    kind: str
    code: str
    line: int
    printed: str | None


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page in order; a ``text`` block right behind another one becomes its ``printed``."""
    found = list(_FENCE.finditer(text))
    for number, match in enumerate(found):
        behind = found[number + 1] if number + 1 < len(found) else None
        answers = behind is not None and behind["kind"] == "text" and not text[match.end() : behind.start()].strip()
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(match["kind"], match["code"], line, behind["code"] if behind is not None and answers else None)


def run_python(block: Block, page: Path, module: ModuleType) -> str:
    """What the block prints."""
    file = _FILE.match(block.code)
    if file:
        Path(file["name"]).write_text(block.code)
        return ""
    padded = "\n" * (block.line - 1) + block.code  # so that tracebacks and source lines name the line of the page
    name = f"{page.relative_to(ROOT)}"
    linecache.cache[name] = (len(padded), None, padded.splitlines(keepends=True), name)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(padded, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  # running the docs is the test
    return printed.getvalue()


def run_commands(block: Block) -> str:
    """What the lines that begin with fxgrad or torchrun print."""
    printed = ""
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("torchrun "):
            printed += run_ranks(shlex.split(line)[1:])
        if not line.startswith("fxgrad "):
            continue
        wanted = _EXIT_CODE.search(line)
        answer = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], prog_name="fxgrad")
        assert answer.exit_code == (int(wanted[1]) if wanted else 0), f"{line}\n{answer.output}"
        printed += answer.output
    return printed


def run_ranks(arguments: list[str]) -> str:
    """What the ranks of a script print.

    Their exit code is not looked at: plain DistributedDataParallel over gloo, torn down, now and then aborts.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=given, timeout=300, check=False)
    return run.stdout or run.stderr


def agrees(printed: str, wanted: str) -> bool:
    """Whether a text is what the page says, white space aside, ``...`` for anything."""
    parts = [re.escape("".join(part.split())) for part in wanted.split("...")]
    return re.fullmatch(".*".join(parts), "".join(printed.split()), re.DOTALL) is not None


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor",  # what dynamo itself does at a graph break
    # Lightning's own use of what torch and itself have deprecated, and its advice; SQLAlchemy on MLflow.
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*LeafSpec:DeprecationWarning",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:.*litlogger",
    "ignore:The ``noload`` loader strategy is deprecated",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as for a script in this folder
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(sys.modules)
    try:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.kind not in ("python", "sh"):
                continue
            printed = run_python(block, page, module) if block.kind == "python" else run_commands(block)
            if block.printed is not None:
                assert agrees(printed, block.printed), f"{page.name}, line {block.line}, printed\n{printed}"
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("fxgrad_file_") or (tmp_path / f"{name}.py").exists():
                del sys.modules[name]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        place, _, heading = match["target"].partition("#")
        if re.match(r"[a-z]+:", place):
            continue
        target = (page.parent / place) if place else page
        assert target.exists(), f"{page.name} links to {match['target']}"
        if heading:
            assert heading in _anchors(target), f"{page.name} links to {match['target']}"


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "file", [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "docs" / "images").iterdir()], ids=lambda file: file.name
)
def test_no_file_names_a_place_on_one_machine(file: Path) -> None:
    """The tooltips of a picture hold source lines, so that it is easy to commit somebody's folders with it."""
    assert _LOCAL.search(file.read_text(encoding="utf-8")) is None


def test_links_in_html_count_as_links() -> None:
    text = '[a](one.md) ![b](two.svg) <a href="three.svg"><img src="four.svg"></a>'
    assert [match["target"] for match in _LINK.finditer(text)] == ["one.md", "two.svg", "three.svg", "four.svg"]


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_the_command_line_page_names_every_command_and_option() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    command = typer.main.get_command(app)
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        assert f"fxgrad {name}" in text
        for parameter in sub.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("-"):
                    assert f"`{option}`" in text or f"`{option} " in text, f"{name} {option}"


def test_the_command_line_page_names_every_loss() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in importlib.import_module("fxgrad.command.losses").NAMES:
        assert f"`{name}`" in text


def test_concepts_explain_every_reason_and_public_name() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for reason in REASONS:
        assert f"`{reason}`" in text
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in fxgrad.__all__:
        assert name in everything


def _without_signatures(page: str) -> str:
    """Versions of Python write signatures differently."""
    return re.sub(r"^(- `\.\w+)\(.*?`: |^```text\n.*?^```$", r"\1", page, flags=re.DOTALL | re.MULTILINE)


def test_the_reference_says_what_the_docstrings_say() -> None:
    """If this fails, ``python docs/make_reference.py`` makes the page anew."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert _without_signatures(written) == _without_signatures(maker.page())


def test_a_wrong_page_fails() -> None:
    """The comparison itself can fail."""
    block = next(blocks_of("```python\nprint('1 2')\n```\n\n```text\n1 ... 3\n```\n"))
    assert block.printed == "1 ... 3\n"
    assert not agrees("1 2", block.printed)
    assert agrees("1 x\n3", block.printed)
    apart = next(blocks_of("```python\nprint('1 2')\n```\nand so on\n```text\n1\n```\n"))
    assert apart.printed is None
