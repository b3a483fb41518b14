"""How the library is built, found, refused, and that none of it is seen where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fxgrad.cli import app
from fxgrad.native import build as building
from fxgrad.native import loader as loading
from fxgrad.native import places, starting
from fxgrad.native.loader import Loader
from fxgrad.record import library as module

STEPS = """
import sys, time, torch, fxgrad
from fxgrad.record import library
library.PATIENCE = 0.0
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
patience = library.Patience()
with fxgrad.watch(model, statistics="full", capture="eager") as watch:
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        patience.tick()
    assert watch.flow().site("0").measured
print(library.reason())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "FXGRAD_NATIVE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=False)


def until(holds: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiler() -> None:
    reason = building.impossible()
    if reason is not None:
        pytest.skip(reason)


def test_the_library_is_loaded_and_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    monkeypatch.setenv("PATH", "")  # no compiler is asked for
    found = Loader()
    assert found.load(module.check) is found.load(module.check) is found.module is not None
    assert found.reason() is None
    monkeypatch.setenv("FXGRAD_NATIVE", "0")
    assert found.load(module.check) is None
    assert found.reason() == "FXGRAD_NATIVE=0"


def test_a_failed_check_refuses_it_for_good(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    found = Loader()
    assert found.load(lambda _: "max_abs of 7 entries") is None
    assert found.load(lambda _: None) is None
    assert found.reason() == "self-check failed: max_abs of 7 entries"


def test_what_is_no_library(empty: Path) -> None:
    where = places.place()
    where.folder.mkdir(parents=True)
    where.library.write_text("no library")
    found = Loader()
    assert found.load(module.check) is None
    assert str(found.reason()).startswith("it could not be loaded: ImportError")


def test_a_library_that_comes_later_is_found(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: clock[0])
    found, looked = Loader(), []
    monkeypatch.setattr(loading, "built", lambda: looked.append(1))
    for second in (10.0, 10.5, 11.1, 11.2):
        clock[0] = second
        assert found.load(module.check) is None
    assert len(looked) == 2


@pytest.mark.usefixtures("compiler")
def test_reasons_without_one(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, found = places.place(), Loader()
    assert found.reason() == "not built yet: run `fxgrad build`"
    where.folder.mkdir(parents=True)
    with building.locked(where, wait=True) as mine:
        assert mine
        assert found.reason() == "being built"
        with building.locked(where, wait=False) as other:
            assert not other
    where.failure.write_text('{"reason": "bad luck"}')
    assert found.reason() == f"build failed: bad luck; see {where.log}, and run `fxgrad build` to try again"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found.reason() == "no C++ compiler (no-such-compiler)"


def test_another_compiler_and_other_sources_have_other_places(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = places.place()
    monkeypatch.setenv("CXX", "/bin/false")
    assert places.place().folder.name.startswith("false-")
    assert places.place().folder.parent == first.folder.parent
    monkeypatch.setattr(places, "sources_hash", lambda: "other")
    assert places.place().folder.parent != first.folder.parent
    assert torch.__version__ in str(first.folder)


def test_a_library_of_another_compiler_will_do(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert places.built() is None
    other = places.Place(places.shelf() / "other-compiler")
    other.folder.mkdir(parents=True)
    other.library.touch()
    assert places.built() == other


@pytest.mark.usefixtures("compiler")
def test_a_broken_compiler_in_the_background_is_remembered_and_silent(empty: Path) -> None:
    first = run(STEPS, CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(empty))
    assert (first.returncode, first.stderr) == (0, "")
    (folder,) = (empty / "fxgrad").glob("*/false-*")
    where = places.Place(folder)
    assert until(where.failure.is_file)
    assert until(lambda: not building.is_building(where))
    written = where.log.stat().st_mtime_ns
    second = run(STEPS, CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(empty))
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout.startswith("build failed: ")
    assert str(where.log) in second.stdout
    time.sleep(0.5)
    assert where.log.stat().st_mtime_ns == written  # nobody tried again


@pytest.mark.usefixtures("compiler")
def test_a_broken_compiler_in_the_foreground(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1
    assert "the build failed" in result.output
    assert "try: another compiler" in result.output
    told = CliRunner().invoke(app, ["build", "--status"])
    assert told.exit_code == 1
    assert "/bin/false" in told.output


def test_words_without_a_compiler_or_a_cache(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not built" in CliRunner().invoke(app, ["build", "--status"]).output
    blocked = empty / "file"
    blocked.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1
    assert "cannot write to the cache" in result.output or "no C++ compiler" in result.output
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "try: install GCC or Clang" in CliRunner().invoke(app, ["build"]).output


def test_a_cache_that_cannot_be_written_to(empty: Path) -> None:
    blocked = empty / "file"
    blocked.touch()
    done = run(STEPS, TORCH_EXTENSIONS_DIR=str(blocked))
    assert (done.returncode, done.stderr) == (0, "")
    assert "could not be started" in done.stdout or "no C++ compiler" in done.stdout


@pytest.mark.parametrize("word", ["0", "prebuilt"])
def test_switched_off(empty: Path, word: str) -> None:
    done = run(STEPS, FXGRAD_NATIVE=word, TORCH_EXTENSIONS_DIR=str(empty))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("FXGRAD_NATIVE=0" if word == "0" else ("not built yet", "no C++ compiler"))
    assert not list(empty.iterdir())


def test_patience(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    clock, started = [100.0], []
    monkeypatch.setenv("FXGRAD_NATIVE", "1")
    monkeypatch.setattr(module, "loader", Loader())
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.background, "start", lambda: started.append(clock[0]))
    patience = module.Patience()
    for second in (100.0, 101.5, 102.9, 103.1, 104.5):
        clock[0] = second
        patience.tick()
    assert started == [104.5] or started == [103.1, 104.5]
    assert not list(empty.iterdir())


def test_the_builder_starts_once_and_never_raises(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(starting, "_spawn", broken)
    monkeypatch.setattr(starting, "impossible", lambda: None)
    background = starting.BackgroundBuild()
    background.start()
    assert "No space left" in str(background.reason)
    monkeypatch.setattr(starting, "_spawn", lambda *_: pytest.fail("started again"))
    background.start()


def test_two_processes_build_once(cache: Path, empty: Path) -> None:
    """The compiler is replaced by one that counts, and the library by one that is there."""
    code = (
        "import sys, time, shutil, os; from pathlib import Path\n"
        "from fxgrad.native import build, places\n"
        f"made = next(Path({str(cache)!r}).glob('fxgrad/*/*/fxgrad_native.so'))\n"
        "def compiled(work):\n"
        "    (Path(os.environ['TORCH_EXTENSIONS_DIR']) / f'ran-{os.getpid()}').touch(); time.sleep(1)\n"
        "    return Path(shutil.copy(made, work / made.name))\n"
        "build._compile = compiled\n"
        "raise SystemExit(build.main([]))\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(empty)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(list(empty.glob("ran-*"))) == 1
    where = places.place()
    assert where.library.is_file()
    assert sorted(path.name for path in where.folder.iterdir()) == ["built.json", "fxgrad_native.so", "lock"]


def test_what_a_watch_measures_with_and_without(cache: Path) -> None:
    code = """
import json, torch, fxgrad
from torch import nn
from fxgrad.record.library import reason
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).to(dtype)
    x = torch.randn(4, 3, 8, 8).to(dtype)
    for level in ("norm", "full", "histogram"):
        with fxgrad.watch(model, statistics=level, forward=True) as watch:
            for _ in range(3):
                model.zero_grad()
                model(x).sum().backward()
            for flow in watch.history:
                for one in [*flow.sites, *flow.parameters]:
                    for found in (one.statistics, getattr(one, "value", None)):
                        if found is not None:
                            print(level, found.level, found.l2_norm, found.max_abs, found.zero_count,
                                  found.subnormal_count, sum(found.exponent_histogram or ()))
print(reason())
"""
    native = run(code, TORCH_EXTENSIONS_DIR=str(cache))
    plain = run(code, FXGRAD_NATIVE="0")
    assert (native.stderr, plain.stderr) == ("", "")
    *with_it, none = native.stdout.split("\n")[:-1]
    *without, off = plain.stdout.split("\n")[:-1]
    assert (none, off) == ("None", "FXGRAD_NATIVE=0")
    assert len(with_it) == len(without) > 100
    for a, b in zip(with_it, without, strict=True):
        for x, y in zip(a.split()[2:], b.split()[2:], strict=True):
            assert x == y if "None" in (x, y) else float(x) == pytest.approx(float(y), rel=1e-5)


def test_full_takes_no_operator_of_torch(cache: Path) -> None:
    code = """
import collections, torch, fxgrad
from fxgrad.torch_support import private
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
private._count_modes = lambda: 0  # our operators are hidden from modes; here they are what is looked for
class Ops(TorchDispatchMode):
    seen = collections.Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Ops.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
def step():
    loss = model(torch.randn(3, 4)).square().sum()
    with Ops():
        Ops.seen = collections.Counter()
        loss.backward()
    return Ops.seen
step(); plain = step()
with fxgrad.watch(model, statistics="full", capture="eager") as watch:
    for _ in range(3): step()
    more = step() - plain
    print(more["copy_"], more["stack"], more["count_nonzero"], more["clone"])
"""
    done = run(code, TORCH_EXTENSIONS_DIR=str(cache))
    assert (done.stdout, done.stderr) == ("0 0 0 2\n", "")  # copies of the slots, and no more


def test_nothing_is_loaded_inside_of_a_backward(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    monkeypatch.setenv("FXGRAD_NATIVE", "1")
    monkeypatch.setattr(module, "loader", Loader())
    x, found = nn.Parameter(torch.ones(2)), []
    y = x * 2
    y.register_hook(lambda _: found.append(module.library()))
    y.sum().backward()
    assert found == [None]
    assert module.library() is not None
