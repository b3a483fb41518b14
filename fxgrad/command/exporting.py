"""``fxgrad export``: a run, series or flow as rows for other programs, however long it is."""

from __future__ import annotations

import csv
import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from fxgrad.command.outputs import check_paths
from fxgrad.errors import OptionError
from fxgrad.frames import COLUMNS, rows
from fxgrad.run_file import Run
from fxgrad.schema import GradientFlow
from fxgrad.store import save_series

__all__ = ["SUFFIXES", "What", "export"]

What = Literal["values", "parameters", "notes"]
_AT_ONCE = 64  # flows whose rows are in memory

Row = Mapping[str, Any]


def export(flows: Sequence[GradientFlow], path: Path, what: What) -> None:
    """Write a row for each step and value (or parameter, or what was noted); a ``.json`` file holds the flows whole.

    Raises:
        OptionError: another suffix, a place that cannot be written, notes of something else than a run, or pyarrow is
            missing.
    """
    check_paths([path], SUFFIXES)
    if path.suffix == ".json":
        save_series(flows, path)
        return
    staged = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    try:
        _WRITERS[path.suffix](flows, staged, what)
        staged.replace(path)
    except OSError as error:
        message = f"-o {path}: cannot be written: {error.strerror or error}. Name another place"
        raise OptionError(message) from error
    finally:
        staged.unlink(missing_ok=True)


def _columns(flows: Sequence[GradientFlow], what: What) -> list[str]:
    return ["step", *_notes(flows)] if what == "notes" else list(COLUMNS)


def _notes(flows: Sequence[GradientFlow]) -> dict[str, dict[int, float | None]]:
    if not isinstance(flows, Run):
        message = "--of notes: numbers are noted in a run file only (watch.note of a watch with run_file=)"
        raise OptionError(message)
    return {name: dict(zip(one.steps, one.values, strict=True)) for name, one in flows.notes.items()}


def _batches(flows: Sequence[GradientFlow], what: What) -> Iterator[list[Row]]:
    """The rows, some flows at a time."""
    if what == "notes":
        noted = _notes(flows)
        steps = sorted({step for values in noted.values() for step in values})
        yield [{"step": step, **{name: values.get(step) for name, values in noted.items()}} for step in steps]
        return
    batch: list[GradientFlow] = []
    for flow in flows:
        batch.append(flow)
        if len(batch) == _AT_ONCE:
            yield list(rows(batch, what))
            batch = []
    yield list(rows(batch, what))


def _write_csv(flows: Sequence[GradientFlow], path: Path, what: What) -> None:
    file: TextIO
    with path.open("x", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(flows, what), lineterminator="\n")
        writer.writeheader()
        for batch in _batches(flows, what):
            writer.writerows(batch)


def _write_parquet(flows: Sequence[GradientFlow], path: Path, what: What) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    texts = {"key", "output", "module", "kind", "shape", "dtype", "source", "level"}
    names = _columns(flows, what)
    kinds = [arrow.string() if n in texts else arrow.int64() if n in _WHOLE else arrow.float64() for n in names]
    schema = arrow.schema(list(zip(names, kinds, strict=True)))
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in _batches(flows, what):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


_WHOLE = {"step", "numel", *(name for name in COLUMNS if name.endswith("_count"))}
_WRITERS: Mapping[str, Callable[[Sequence[GradientFlow], Path, What], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
#: The suffixes that ``fxgrad export`` knows.
SUFFIXES = (*_WRITERS, ".json")
