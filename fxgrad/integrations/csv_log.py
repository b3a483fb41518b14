"""A training run as one tidy CSV file: a row for each step and value, note and finding."""

from __future__ import annotations

import csv
from pathlib import Path

from fxgrad.errors import OptionError
from fxgrad.frames import COLUMNS, Of, Row, rows
from fxgrad.schema import LogEntry

__all__ = ["CsvLog"]

_HEAD = (*COLUMNS, "note", "text")


class CsvLog:
    """A log in a CSV file, which is appended to.

    The columns are those of ``history.to_csv()``, with ``step`` as the entry has it, then ``note`` and ``text``: rows
    of kind ``note`` have the name as ``key`` and the number as ``note``, rows of kind ``finding`` the place as ``key``
    and the finding as ``text``.  Written through at each entry.

    Args:
        path: of the file; one that is there has to have the same columns.
        of: ``"values"`` or ``"parameters"``.

    Raises:
        OptionError: the file cannot be written or is another table, or ``of`` is unknown.
    """

    def __init__(self, path: str | Path, *, of: Of = "values") -> None:
        rows((), of)
        self._path, self._of = Path(path), of
        try:
            with self._path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                there = next(csv.reader(file), None)
                if there is None:
                    csv.writer(file, lineterminator="\n").writerow(_HEAD)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            message = f"CsvLog({str(path)!r}): cannot be written: {error}. Name another place"
            raise OptionError(message) from error
        if there not in (None, list(_HEAD)):
            message = f"CsvLog({str(path)!r}): this file is another table, with the columns {', '.join(there)[:80]}"
            raise OptionError(message)

    def write(self, entry: LogEntry) -> None:
        """Append the rows of an entry."""
        made: list[Row] = [{**row, "step": entry.step} for row in rows([entry.flow], self._of)]
        made += [{"step": entry.step, "key": key, "kind": "note", "note": x} for key, x in entry.notes.items()]
        made += [
            {"step": entry.step, "key": one.place, "kind": "finding", "source": one.source, "text": str(one)}
            for one in entry.fresh
        ]
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, _HEAD, lineterminator="\n").writerows(made)

    def close(self) -> None:
        """Nothing is open."""
