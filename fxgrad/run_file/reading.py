"""Reading a run file, also while another process writes it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from fxgrad.errors import RunFileError
from fxgrad.plain import from_plain
from fxgrad.run_file.blocks import block_entry, chunk_id
from fxgrad.run_file.numbers import filled
from fxgrad.run_file.packing import column, from_row, unpacked
from fxgrad.run_file.structures import patched, read
from fxgrad.run_file.tables import open_to_read, told
from fxgrad.schema import Finding, FlowSeries, GradientFlow, Series
from fxgrad.series import check_statistic, evenly, no_flow, place_of

__all__ = ["Run", "Session", "open_run"]

_ROW = "flows.id, structure, ragged, numbers, block, place FROM flows LEFT JOIN rows ON rows.id = flows.id"
_KEPT = 64  # structures that are held in memory
_Row = tuple[int, int, bytes | None, bytes | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Session:
    """A time in which a run file was written.

    Attributes:
        first: its first step.
        started: when, in UTC, as ``2026-01-31T12:00:00+00:00``.
        model: class name of the model.
    """

    first: int
    started: str
    model: str


def open_run(path: str | Path) -> Run:
    """Open a run file that ``fxgrad.watch(model, run_file=...)`` writes or wrote.

    Raises:
        RunFileError: it is not there, is something else, damaged or newer than this fxgrad.
    """
    return Run(path)


class Run(FlowSeries):
    """A run file, open for reading: the flows of a training run, oldest first; also a context manager.

    What another process writes meanwhile is seen by the next read.  A read copies what it gives; nothing else of the
    file is held in memory.  Use it in one thread at a time.
    """

    __slots__ = ("_file", "path", "structure")

    def __init__(self, path: str | Path) -> None:
        """See ``open_run``."""
        self.path = Path(path)
        self._file = open_to_read(self.path)
        self.structure = functools.lru_cache(_KEPT)(self._structure)

    # ---- flows -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many flows there are."""
        return int(self._one("SELECT count(*) FROM flows")[0])

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a flow, ascending."""
        return tuple(step for (step,) in self._all("SELECT DISTINCT step FROM flows ORDER BY step"))

    @overload
    def __getitem__(self, place: int) -> GradientFlow: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[GradientFlow, ...]: ...
    def __getitem__(self, place: int | slice) -> GradientFlow | tuple[GradientFlow, ...]:
        """The flow at this place, or those of a slice, which are read at once."""
        if isinstance(place, slice):
            return tuple(self._at(one) for one in range(*place.indices(len(self))))
        count = len(self)
        if not -count <= place < count:
            message = f"there is no flow at place {place}: there are {count}"
            raise IndexError(message)
        return self._at(place % count)

    def __iter__(self) -> Iterator[GradientFlow]:
        """The flows, oldest first, each read when it is asked for."""
        for step, forward in self._all("SELECT step, forward FROM flows ORDER BY step, forward"):
            with self._at_once():
                found = self._all(f"SELECT {_ROW} WHERE step=? AND forward=?", step, forward)
                flow = self._flow(found[0]) if found else None
            if flow is not None:  # else thinned away meanwhile
                yield flow

    def flow(self, step: int) -> GradientFlow:
        """The flow of this step; of several forward calls in it, that of the latest.

        Raises:
            NoFlowError: there is none; the message says which there are.
            RunFileError: the file is damaged.
        """
        with self._at_once():
            in_reach = abs(step) < 2**63  # of SQLite's numbers
            found = self._all(f"SELECT {_ROW} WHERE step=? ORDER BY forward DESC LIMIT 1", step) if in_reach else None
            if not found:
                raise no_flow(step, self.steps)
            return self._flow(found[0])

    def sampled(self, most: int) -> Sequence[GradientFlow]:
        """At most so many of the flows, evenly spread; the first and the last are among them."""
        return tuple(self._at(place) for place in evenly(len(self), most))

    def _at(self, place: int) -> GradientFlow:
        query = f"SELECT {_ROW} ORDER BY step, forward LIMIT 1 OFFSET ?"
        with self._at_once():
            return self._flow(self._one(query, place))

    def _flow(self, row: _Row) -> GradientFlow:
        _, structure, ragged, numbers, block, place = row
        with self._whole():
            common = self.structure(structure)[0]
            if numbers is not None:
                given: Sequence[float] = from_row(numbers)
            else:
                count = self._one("SELECT count FROM blocks WHERE id=?", block)[0]
                given = block_entry(self._file, block or 0, place or 0, count)
            tuples = [] if ragged is None else [tuple(one) for one in json.loads(unpacked(ragged))]
            return filled(common, iter(given), _endless(tuples))

    def _structure(self, number: int) -> tuple[GradientFlow, int]:
        """A flow without its numbers, and its layout."""
        layout, base, packed = self._one("SELECT layout, base, flow FROM structures WHERE id=?", number)
        text = unpacked(packed)
        if base is not None:
            text = patched(text, unpacked(self._one("SELECT flow FROM structures WHERE id=?", base)[0]))
        return read(text), layout

    # ---- series ------------------------------------------------------------------------------------------------

    def series(self, key: str, statistic: str = "l2_norm") -> Series:
        """One statistic of one value or parameter over all steps; see ``FlowSeries.series``."""
        check_statistic(statistic)
        with self._at_once():
            return self._series_of(key, statistic)

    def _series_of(self, key: str, statistic: str) -> Series:
        if not len(self):
            return Series(key, statistic, (), ())
        part, name = place_of(self[-1], key)
        wanted = ("l2_norm", "numel") if statistic == "rms" else (statistic,)
        rows = self._all("SELECT step, structure, block, place FROM flows ORDER BY step, forward")
        found = [self._series(rows, (part, name, f"statistics.{word}")) for word in wanted]
        values = found[0]
        if statistic == "rms":
            values = [_rms(norm, numel) for norm, numel in zip(*found, strict=True)]
        steps = [row[0] for row in rows]
        return Series(name, statistic, tuple(steps), tuple(values))

    def _series(self, rows: Sequence[tuple[Any, ...]], names: tuple[str, str, str]) -> list[float | None]:
        """The numbers of the column of these names, over all flows."""
        layouts = dict(self._all("SELECT id, layout FROM structures"))
        numbers = self._numbers_of(names)
        blocks: dict[int, tuple[float, ...] | None] = {}
        values: list[float | None] = []
        loose = self._loose(numbers, layouts)
        for _, structure, block, place in rows:
            number = numbers.get(layouts[structure])
            if block is None or number is None:
                values.append(next(loose) if block is None else None)
                continue
            if block not in blocks:
                blocks[block] = self._column(block, number)
            values.append((blocks[block] or ())[place])
        return values

    def _numbers_of(self, names: tuple[str, str, str]) -> dict[int, int]:
        """By layout: which of its columns has these names, where one does."""
        found = {}
        for layout, packed in self._all("SELECT id, names FROM layouts"):
            with self._whole():
                known = json.loads(unpacked(packed))
            if list(names) in known:
                found[layout] = known.index(list(names))
        return found

    def _column(self, block: int, number: int) -> tuple[float, ...]:
        data, count = self._one(
            "SELECT data, count FROM chunks, blocks WHERE chunks.id=? AND blocks.id=?", chunk_id(block, number), block
        )
        with self._whole():
            return column(data, count)

    def _loose(self, numbers: Mapping[int, int], layouts: Mapping[int, int]) -> Iterator[float | None]:
        """The number of each flow that lies in a row."""
        with told(self.path, "read"):
            for structure, data in self._file.execute(
                "SELECT structure, numbers FROM rows JOIN flows ON flows.id = rows.id ORDER BY step, forward"
            ):
                number = numbers.get(layouts[structure])
                with self._whole():
                    yield None if number is None else _entry(data, number)

    # ---- beside the flows --------------------------------------------------------------------------------------

    @property
    def notes(self) -> dict[str, Series]:
        """What was noted (``watch.note(loss=...)``), by name."""
        found: dict[str, tuple[list[int], list[float | None]]] = {}
        for name, step, value in self._all("SELECT name, step, value FROM notes ORDER BY name, step"):
            steps, values = found.setdefault(name, ([], []))
            steps.append(step)
            values.append(math.nan if value is None else value)
        return {name: Series(name, "", tuple(steps), tuple(values)) for name, (steps, values) in found.items()}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings that were written, in the order in which they came; ``backward`` is their step."""
        found = []
        for step, text in self._all("SELECT step, finding FROM findings ORDER BY id"):
            with self._whole():
                finding: Finding = from_plain(Finding, json.loads(text))
            found.append(replace(finding, backward=step))
        return tuple(found)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """When the file was written, oldest first: a run that was taken up again has several."""
        return tuple(Session(*row) for row in self._all("SELECT first, started, model FROM sessions ORDER BY first"))

    # ---- the file ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the file.  May be called twice."""
        self._file.close()

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """All reads see the file as it is at the first of them, whatever is written meanwhile."""
        if self._file.in_transaction:
            yield
            return
        with told(self.path, "read"):
            self._file.execute("BEGIN")
        try:
            yield
        finally:
            self._file.rollback()

    def _all(self, query: str, *values: object) -> list[Any]:
        with self._whole(), told(self.path, "read"):
            return self._file.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> Any:
        found = self._all(query, *values)
        if not found:
            message = f"{self.path} is damaged: a part of it is not there"
            raise RunFileError(message)
        return found[0]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Turn what cannot be read of the content into an error of ours."""
        try:
            yield
        except (ValueError, LookupError, StopIteration, TypeError) as error:
            message = f"{self.path} is damaged: {str(error) or 'numbers are missing'}"
            raise RunFileError(message) from error

    def __enter__(self) -> Run:  # noqa: PYI034  # Self is no part of typing before Python 3.11
        """The run itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Which file, and how many flows of which model."""
        models = ", ".join(dict.fromkeys(session.model for session in self.sessions)) or "no model"
        return f"Run({str(self.path)[-60:]}: {len(self)} flows of {models[:40]})"


def _rms(norm: float | None, numel: float | None) -> float | None:
    if norm is None or numel is None:
        return None
    return norm / math.sqrt(numel) if numel else 0.0


def _entry(data: bytes, number: int) -> float:
    return from_row(data[number * 8 : number * 8 + 8])[0]


def _endless(tuples: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    yield from tuples
    while True:
        yield ()
