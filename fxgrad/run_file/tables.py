"""The tables of a run file, and how one is opened; what SQLite says of a file, in words of ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxgrad.errors import RunFileError
from fxgrad.store import VERSION as FLOW_VERSION

__all__ = ["BLOCK", "VERSION", "locked", "open_to_read", "open_to_write", "told"]

#: Of the tables below; the flows in them have the version of ``fxgrad.store``.
VERSION = 1
#: Steps whose numbers lie together, column by column.
BLOCK = 256

_MARK = 0x66786772  # "fxgr": SQLite's application_id, by which we know our own
_WAIT = 10.0  # seconds, for a reader that holds the file
_TABLES = """
CREATE TABLE about(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions(first INTEGER PRIMARY KEY, started TEXT NOT NULL, model TEXT NOT NULL);
CREATE TABLE layouts(id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, names BLOB NOT NULL);
CREATE TABLE structures(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, layout INTEGER NOT NULL, base INTEGER, flow BLOB NOT NULL);
CREATE TABLE flows(
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, forward INTEGER NOT NULL, structure INTEGER NOT NULL, ragged BLOB,
    block INTEGER, place INTEGER, UNIQUE(step, forward));
CREATE TABLE rows(id INTEGER PRIMARY KEY, numbers BLOB NOT NULL);
CREATE TABLE blocks(id INTEGER PRIMARY KEY, layout INTEGER NOT NULL, count INTEGER NOT NULL);
CREATE TABLE chunks(id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE notes(name TEXT NOT NULL, step INTEGER NOT NULL, value REAL, PRIMARY KEY(name, step)) WITHOUT ROWID;
CREATE TABLE findings(id INTEGER PRIMARY KEY, step INTEGER NOT NULL, finding TEXT NOT NULL);
"""


def locked(path: Path) -> sqlite3.Connection:
    """What keeps others from writing the run file at ``path`` while it is open, and until the process ends at most.

    A lock of SQLite's on a file beside it, which a forked child does not hold.

    Raises:
        RunFileError: somebody else has it, or the place cannot be written.
    """
    if not path.parent.is_dir():
        message = f"{path} cannot be written: there is no folder {path.parent}. Make it first, or name another."
        raise RunFileError(message)
    with told(path, "written"):
        lock = sqlite3.connect(f"{path}.lock", timeout=0.0, isolation_level=None, check_same_thread=False)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            lock.close()
            if "locked" not in str(error):
                raise
            message = f"{path} is being written by another process or watch. Give each its own run file."
            raise RunFileError(message) from error
        return lock


_HEADER = 100  # bytes that every SQLite file begins with


def open_to_write(path: Path) -> sqlite3.Connection:
    """The run file at ``path``, made if it is not there.

    Raises:
        RunFileError: it cannot be made or written, or is something else, damaged or newer.
    """
    with told(path, "written"):
        if path.is_file() and 0 < path.stat().st_size < _HEADER:  # SQLite takes a file of one byte for an empty one
            message = f"{path} is no run file. Name another place, or remove it first"
            raise RunFileError(message)
        file = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
        try:
            _make_or_check(file, path)
        except BaseException:
            file.close()
            raise
        return file


def _make_or_check(file: sqlite3.Connection, path: Path) -> None:
    if not file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        file.execute("PRAGMA page_size=8192")
        file.execute(f"PRAGMA application_id={_MARK}")
        file.execute(f"PRAGMA user_version={VERSION}")
        file.execute("PRAGMA journal_mode=WAL")
        file.executescript(f"BEGIN;{_TABLES}INSERT INTO about VALUES ('flow', {FLOW_VERSION});COMMIT;")  # noqa: S608
    else:
        _check(file, path)
        file.execute("PRAGMA journal_mode=WAL")
    # What the process has written survives its end in any case; only a loss of power could take the latest steps.
    file.execute("PRAGMA synchronous=NORMAL")


def open_to_read(path: Path) -> sqlite3.Connection:
    """The run file at ``path``, which another process may be writing.

    Raises:
        RunFileError: it is not there or cannot be read, or is something else, damaged or newer.
    """
    if not path.is_file():
        message = f"{path} is no run file: there is no such file. fxgrad.watch(model, run_file=...) writes one."
        raise RunFileError(message)
    with told(path, "read"):
        address = path.resolve().as_uri()
        try:
            return _opened(f"{address}?mode=ro", path)
        except sqlite3.OperationalError:
            if Path(f"{path}-wal").exists():
                raise
            # In a folder that cannot be written SQLite cannot share the file: nobody else writes it either.
            return _opened(f"{address}?immutable=1", path)


def _opened(address: str, path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(address, uri=True, timeout=_WAIT, isolation_level=None, check_same_thread=False)
    try:
        _check(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _check(file: sqlite3.Connection, path: Path) -> None:
    if file.execute("PRAGMA application_id").fetchone()[0] != _MARK:
        message = f"{path} is no run file, but another database. Name another place for the run file."
        raise RunFileError(message)
    _check_version(path, file.execute("PRAGMA user_version").fetchone()[0], VERSION)
    found = file.execute("SELECT value FROM about WHERE name='flow'").fetchone()
    _check_version(path, -1 if found is None else found[0], FLOW_VERSION)
    file.execute("SELECT max(id) FROM flows").fetchone()  # finds a file that was cut off


def _check_version(path: Path, version: int, ours: int) -> None:
    if version > ours:
        message = f"{path} has version {version}, newer than {ours}, which this fxgrad reads. Upgrade fxgrad."
        raise RunFileError(message)
    if version < ours:
        message = f"{path} has version {version}, from before the first release. Start a new run file."
        raise RunFileError(message)


@contextmanager
def told(path: Path, done: str) -> Iterator[None]:
    """Turn what SQLite and the system say into an error of ours; ``done`` is ``"read"`` or ``"written"``."""
    try:
        yield
    except sqlite3.OperationalError as error:
        message = f"{path} cannot be {done}: {error}. {_advice(str(error))}"
        raise RunFileError(message) from error
    except sqlite3.DatabaseError as error:
        message = f"{path} is damaged or no run file: {error}. Name another place, or move this file away."
        raise RunFileError(message) from error
    except (OSError, ValueError) as error:
        if isinstance(error, RunFileError):
            raise
        message = f"{path} cannot be {done}: {error}. Name another place, or make its folder first."
        raise RunFileError(message) from error


def _advice(words: str) -> str:
    if "full" in words:
        return "Make room on the disk, or thin the file with keep=."
    if "locked" in words:
        return "Another program holds it."
    return "Name another place, or make its folder first."
