"""Starting the process that builds: one that somebody waits for, or one that nobody does."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from fxgrad.native.build import impossible, is_building
from fxgrad.native.places import Place, place, read_json

#: The child gets our own path of modules: the current folder may hold a file that is named like one of the library's.
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from fxgrad.native.build import main; raise SystemExit(main(sys.argv[2:]))"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a build ended.

    Attributes:
        reason: why it failed; None where it did not.
    """

    place: Place
    seconds: float
    reason: str | None


def _spawn(where: Place, *options: str) -> int:
    """Start the process; its number.  All that it prints goes to the log.

    Raises:
        OSError: the cache can't be written to, or no process can be started.
    """
    where.folder.mkdir(parents=True, exist_ok=True)
    log = os.open(where.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        command = [sys.executable, "-c", _CODE, json.dumps([str(entry) for entry in sys.path]), *options]
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        # Not subprocess: its object would complain when this process ends first, and fork copies a large process.
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    finally:
        os.close(log)
        os.close(null)


def build(*, force: bool = False, progress: Callable[[str], None] | None = None) -> Outcome:
    """Build and wait; ``progress`` is told ninja's ``3/7``.

    A remembered failure is tried again.
    """
    where, begin = place(), time.monotonic()
    reason = impossible()
    if reason is not None:
        return Outcome(where, 0.0, reason)
    with contextlib.suppress(OSError):
        where.failure.unlink(missing_ok=True)
    try:
        process = _spawn(where, *(["--force"] if force else []))
    except OSError as error:
        return Outcome(where, 0.0, f"cannot write to the cache: {error}")
    try:
        status = _wait(process, where, progress)
    except BaseException:
        with contextlib.suppress(OSError):
            os.kill(process, 15)
        raise
    seconds = time.monotonic() - begin
    if status == 0 and where.library.is_file():
        return Outcome(where, seconds, None)
    found = read_json(where.failure) or {}
    return Outcome(where, seconds, found.get("reason") or "the building process ended early")


def _wait(process: int, where: Place, progress: Callable[[str], None] | None) -> int:
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if progress is not None:
            lines = [line for line in tail(where, 50) if line.startswith("[")]
            if lines:
                progress(lines[-1].partition("]")[0].lstrip("["))
        time.sleep(0.1)


def tail(where: Place, lines: int = 15) -> list[str]:
    """The last lines of the log."""
    try:
        return where.log.read_text("utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class BackgroundBuild:
    """The one build that this process may start by itself."""

    def __init__(self) -> None:
        self._process: int | None = None
        self.tried = False
        self.reason: str | None = None

    def start(self) -> None:
        """Start a build of low priority, unless one is running or has failed; never raises, never prints, once."""
        if self.tried:
            return
        self.tried = True
        try:
            where = place()
            self.reason = impossible()
            if self.reason is None and not where.failure.is_file() and not is_building(where):
                self._process = _spawn(where, "--background")
        except Exception as error:  # noqa: BLE001  # training goes on, with the Python recorder
            self.reason = f"the build could not be started: {error}"

    def reap(self) -> None:
        """Let the system forget a build that has ended."""
        if self._process is None:
            return
        try:
            ended, _ = os.waitpid(self._process, os.WNOHANG)
        except OSError:  # somebody else has waited for it
            ended = self._process
        if ended:
            self._process = None
