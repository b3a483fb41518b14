"""Writing a run file: each flow in a transaction of its own, older ones column by column."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.plain import plain
from fxgrad.run_file.blocks import fold, thin
from fxgrad.run_file.numbers import Fixed, columns, prototype, split
from fxgrad.run_file.packing import packed, row
from fxgrad.run_file.structures import difference, whole
from fxgrad.run_file.tables import BLOCK, locked, open_to_write, told
from fxgrad.schema import Finding, GradientFlow
from fxgrad.store import strict_json

__all__ = ["EVERY", "Keep", "RunFile", "checked_keep"]

#: How many flows are kept whole, and of those before them every which one; None: all.
Keep = tuple[int, int] | None
#: Of the flows before the ones that are kept whole, where only their number was given.
EVERY = 100
_REMEMBERED = 64  # structures that are known without a look into the file


def checked_keep(keep: Any) -> Keep:
    """The ``keep=`` of a run file: a number of flows, or that number and every which flow before them.

    Raises:
        OptionError: anything else.
    """
    if keep is None:
        return None
    pair = keep if isinstance(keep, (tuple, list)) else (keep, EVERY)
    whole = [isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in pair]
    if len(pair) != 2 or not all(whole):  # noqa: PLR2004  # the pair
        message = (
            f"keep={keep!r} is not known: it is how many of the latest flows are kept (keep=10_000), or that and every "
            "which flow before them (keep=(10_000, 100))"
        )
        raise OptionError(message)
    return pair[0], pair[1]


class RunFile:
    """A run file that is being written.  Use it in one thread; a context manager.

    A step is the number of a backward pass (``flow.event.backward``).  Written into a file that has flows already, the
    steps of this session follow theirs.
    """

    def __init__(self, path: Path, file: sqlite3.Connection, lock: sqlite3.Connection, keep: Keep) -> None:
        """See ``create``."""
        self.path = path
        self._file = file
        self._lock = lock
        self._keep = keep
        last = file.execute("SELECT max(step) FROM flows").fetchone()[0]
        self._first = 0 if last is None else last + 1
        self._begun = False
        self.structure = 0  # of the flow that was appended last
        self._fixed: Fixed = {}
        self._base: tuple[int, GradientFlow] | None = None
        self._known: dict[tuple[Any, ...], int] = {}

    @classmethod
    def create(cls, path: str | Path, *, keep: Any = None) -> RunFile:
        """Make a run file, or go on with one that is there.

        Args:
            path: of the file; its folder has to be there.  While it is written, ``-wal``, ``-shm`` and ``.lock`` files
                lie beside it.
            keep: how many of the latest flows are kept, and every which one of those before them (100 where only the
                number is given); None: all.  Flows with a finding, and the one before each, are always kept.

        Raises:
            RunFileError: it cannot be written, is something else, is damaged or newer, or is being written already.
            OptionError: ``keep`` has another form.
        """
        where, thinned = Path(path), checked_keep(keep)
        lock = locked(where)
        try:
            return cls(where, open_to_write(where), lock, thinned)
        except BaseException:
            lock.close()
            raise

    @property
    def first(self) -> int:
        """What is added to the number of a backward pass to get its step here: 0 in a new file."""
        return self._first

    def append(
        self, flow: GradientFlow, *, notes: Mapping[str, float] | None = None, findings: Iterable[Finding] = ()
    ) -> int:
        """Write a flow, with what was noted and found at it; it is in the file when this returns.

        A flow of the same backward pass and forward call that was written before is replaced.

        Returns:
            Its step.

        Raises:
            RunFileError: it cannot be written.  The file is as it was before, and the next one may be tried.
        """
        step = self._first + flow.event.backward
        flow = replace(flow, event=replace(flow.event, backward=step))
        with self._writing():
            self._begin_session(flow.capture.model)
            self._put(step, flow)
            self._put_notes(step, notes or {})
            self._put_findings(step, findings)
        return step

    def repeat(
        self, structure: int, numbers: array[float], event: tuple[int, int], notes: Mapping[str, float] | None = None
    ) -> int:  # fmt: skip
        """Write a flow that differs from one written before in its numbers only.

        Args:
            structure: of that one, as ``structure`` was behind its ``append``.
            numbers: what ``split`` would give of the flow, with the step as its ``backward``.
            event: numbers of its backward pass and of its forward call.
            notes: as for ``append``.

        Returns:
            Its step.

        Raises:
            RunFileError: as ``append``.
        """
        step = self._first + event[0]
        with self._writing():
            self._put_row(step, event[1], structure, numbers)
            self._put_notes(step, notes or {})
        return step

    def note(self, step: int, notes: Mapping[str, float]) -> None:
        """Write numbers beside a step; ``step`` as in the file (``first`` + the number of the backward pass).

        Raises:
            RunFileError: they cannot be written.
        """
        with self._writing():
            self._put_notes(step, notes)

    def found(self, findings: Iterable[Finding], step: int) -> None:
        """Write findings, each at the step that it is about, or else at ``step`` of the file.

        Raises:
            RunFileError: they cannot be written.
        """
        with self._writing():
            for finding in findings:
                own = finding.backward
                self._put_findings(step if own is None else self._first + own, [finding])

    def close(self) -> None:
        """Let go of the file.  May be called twice."""
        try:
            with told(self.path, "written"):
                self._file.close()
        finally:
            self._lock.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with told(self.path, "written"):
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._file.execute("COMMIT")
            except BaseException:
                self._known.clear()  # what was written of structures is not there any more
                self._base = None
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise

    def _begin_session(self, model: str) -> None:
        if not self._begun:
            now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
            self._file.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (self._first, now, model))
            self._begun = True

    def _put(self, step: int, flow: GradientFlow) -> None:
        """Write the flow's row, and its structure where that is new."""
        parts = split(flow, self._fixed)
        structure = self._known.get(parts.signature)
        if structure is None:
            structure = self._structure(flow)
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[parts.signature] = structure
        self.structure = structure
        self._put_row(step, flow.event.forward, structure, parts.numbers, parts.ragged)

    def _put_row(
        self, step: int, forward: int, structure: int, numbers: array[float], ragged: Sequence[tuple[int, ...]] = ()
    ) -> None:  # fmt: skip
        """Write a row; with the last one of a block, fold that."""
        again = self._file.execute("SELECT id FROM flows WHERE step=? AND forward=?", (step, forward)).fetchall()
        self._file.executemany("DELETE FROM flows WHERE id=?", again)
        self._file.executemany("DELETE FROM rows WHERE id=?", again)
        done = self._file.execute(
            "INSERT INTO flows(step, forward, structure, ragged) VALUES (?, ?, ?, ?)",
            (step, forward, structure, packed(ragged) if any(ragged) else None),
        )
        last = done.lastrowid or 0
        self._file.execute("INSERT INTO rows VALUES (?, ?)", (last, row(numbers)))
        if last % BLOCK == 0:
            fold(self._file, last)
            if self._keep is not None:
                thin(self._file, last, *self._keep)

    def _structure(self, flow: GradientFlow) -> int:
        """The number of the flow's prototype, which is written if it is new."""
        common = prototype(flow)
        names = json.dumps([astuple(column) for column in columns(common)], separators=(",", ":"))
        layout = self._shared("layouts", names, {"names": packed(names)})
        base = None if self._base is None else difference(common, self._base[1])
        if base is not None and self._base is not None:
            number = self._base[0]
            return self._shared("structures", f"{number} {base}", {
                "layout": layout, "base": number, "flow": packed(base),
            })  # fmt: skip
        text = whole(common)
        number = self._shared("structures", text, {"layout": layout, "flow": packed(text)})
        self._base = number, common
        return number

    def _shared(self, table: str, text: str, values: Mapping[str, int | bytes]) -> int:
        """The number of what has this text, which is written if it is new."""
        digest = hashlib.sha256(text.encode()).digest()
        found = self._file.execute(f"SELECT id FROM {table} WHERE digest=?", (digest,)).fetchone()  # noqa: S608
        if found is not None:
            return int(found[0])
        marks = ", ".join("?" * (1 + len(values)))
        done = self._file.execute(
            f"INSERT INTO {table}(digest, {', '.join(values)}) VALUES ({marks})",  # noqa: S608  # names of ours
            (digest, *values.values()),
        )
        return done.lastrowid or 0

    def _put_notes(self, step: int, notes: Mapping[str, float]) -> None:
        rows = [(name, step, None if math.isnan(value) else value) for name, value in notes.items()]
        self._file.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", rows)

    def _put_findings(self, step: int, findings: Iterable[Finding]) -> None:
        rows = [(step, strict_json(plain(finding))) for finding in findings]
        self._file.executemany("INSERT INTO findings(step, finding) VALUES (?, ?)", rows)

    def __enter__(self) -> RunFile:  # noqa: PYI034  # Self is no part of typing before Python 3.11
        """The file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
