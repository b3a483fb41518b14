"""Building the library, in a process that does nothing else.

``main`` is what that process runs: it takes the lock, compiles in a folder of its own, and moves the library to its
place in one step.  What it prints is the log.  A failure is written down, so that no run tries again by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from fxgrad.native.places import FLAGS, NAME, SOURCES, Place, compiler, place

NICE = 19
_NAMES = {"Python.h": "the headers of Python are not installed (python3-dev, python3-devel)"}


class BuildError(Exception):
    """The library can't be built; one line says why."""


@contextlib.contextmanager
def locked(where: Place, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of ``where``; False where another process has it, unless ``wait``.

    The system lets go of it when the process ends, however that comes about.
    """
    import fcntl

    with where.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def is_building(where: Place) -> bool:
    """Whether a process is building there now."""
    try:
        if not where.lock.is_file():
            return False
        with locked(where, wait=False) as mine:
            return not mine
    except (OSError, ImportError):
        return False


def impossible() -> str | None:
    """Why a build need not be tried on this machine; None where it may."""
    if sys.platform == "win32":
        return "not on Windows: the sources need GCC or Clang"
    if not compiler():
        return f"no C++ compiler ({os.environ.get('CXX') or 'c++'})"
    return None


def main(arguments: list[str]) -> int:
    """Build; ``--background`` gives way to everything else, ``--force`` builds again.  0 where a library is there."""
    background, force = "--background" in arguments, "--force" in arguments
    if background:
        with contextlib.suppress(OSError):
            os.setsid()  # no signal of the terminal's ends it
        os.nice(NICE)
        os.environ["MAX_JOBS"] = str(max(1, (os.cpu_count() or 1) // 4))
    where = place()
    try:
        where.folder.mkdir(parents=True, exist_ok=True)
        with locked(where, wait=not background) as mine:
            if not mine or (where.library.is_file() and not force) or (background and where.failure.is_file()):
                return 0
            return _build(where)
    except OSError as error:
        print(f"fxgrad: cannot write to the cache: {error}", flush=True)  # noqa: T201  # the log
        return 1


def _build(where: Place) -> int:
    for left in where.folder.glob("work-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=where.folder))
    begin = time.monotonic()
    try:
        made = _compile(work)
        os.replace(made, where.library)  # noqa: PTH105  # one step: nobody ever sees half a library
        _write(where.facts, seconds=round(time.monotonic() - begin, 1), compiler=compiler(), version=_version())
        where.failure.unlink(missing_ok=True)
    except Exception as error:  # noqa: BLE001  # whatever went wrong is written down
        traceback.print_exc()
        _write(where.failure, reason=_reason(error))
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _compile(work: Path) -> Path:
    """Compile and import the library; where it lies.

    Raises:
        BuildError: this machine can't.
    """
    reason = impossible()
    if reason is not None:
        raise BuildError(reason)
    _find_ninja()
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        message = "no ninja: pip install ninja"
        raise BuildError(message)
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    cpp_extension.load(
        NAME, sources, extra_cflags=FLAGS, extra_ldflags=[flag for flag in FLAGS if flag == "-fopenmp"],
        build_directory=str(work), with_cuda=False, verbose=True,
    )  # fmt: skip
    found = work / f"{NAME}.so"
    if not found.is_file():
        message = f"the compiler made no {found.name}"
        raise BuildError(message)
    return found


def _find_ninja() -> None:
    """Put ninja's package on PATH: a Python that is started by its path has nothing of its environment there."""
    folders = [sysconfig.get_path("scripts")]
    with contextlib.suppress(ImportError):
        import ninja

        folders.insert(0, ninja.BIN_DIR)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *folders])


def _reason(error: Exception) -> str:
    text = f"{error}\n{error.__cause__ or ''}"
    for name, words in _NAMES.items():
        if name in text:
            return words
    if isinstance(error, BuildError):
        return str(error)
    lines = [line for line in text.splitlines() if "error" in line.lower()]
    return (lines or [f"{type(error).__name__}: {error}"])[0].strip()[:200]


def _version() -> str:
    import subprocess

    try:
        asked = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True, timeout=20)  # noqa: S603  # the compiler that built it
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (asked.stdout.splitlines() or ["unknown"])[0]


def _write(path: Path, **facts: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts) + "\n", "utf-8")
    part.replace(path)
