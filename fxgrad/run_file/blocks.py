"""Older flows: their numbers column by column, and fewer of them."""

from __future__ import annotations

import sqlite3
from array import array

from fxgrad.run_file.packing import chunk, column, entry, from_row, row
from fxgrad.run_file.tables import BLOCK

__all__ = ["block_columns", "block_entry", "chunk_id", "fold", "thin"]

_FEW = 16  # flows of one layout in a block; fewer stay in rows
_WIDTH = 1 << 24  # columns of a block, at most


def chunk_id(block: int, number: int) -> int:
    """Where column ``number`` of a block lies among the chunks."""
    return block * _WIDTH + number


def block_columns(file: sqlite3.Connection, block: int, count: int) -> list[tuple[float, ...]]:
    """All columns of a block.

    Raises:
        ValueError: the data is damaged.
    """
    found = file.execute(
        "SELECT data FROM chunks WHERE id >= ? AND id < ? ORDER BY id", (chunk_id(block, 0), chunk_id(block + 1, 0))
    )
    return [column(data, count) for (data,) in found]


def block_entry(file: sqlite3.Connection, block: int, place: int, count: int) -> list[float]:
    """The numbers of the flow at this place in a block.

    Raises:
        ValueError: the data is damaged.
    """
    found = file.execute(
        "SELECT data FROM chunks WHERE id >= ? AND id < ? ORDER BY id", (chunk_id(block, 0), chunk_id(block + 1, 0))
    )
    return [entry(data, place, count) for (data,) in found]


def fold(file: sqlite3.Connection, last: int) -> None:
    """Turn the ``BLOCK`` flows up to number ``last`` from rows into columns; within a transaction."""
    _fold(file, _rows(file, "rows.id > ? AND rows.id <= ?", (last - BLOCK, last)))


def thin(file: sqlite3.Connection, last: int, dense: int, every: int) -> None:
    """Of the flows before the latest ``dense``, keep every ``every``-th and those around a finding; whole blocks."""
    limit = max(0, last - dense) // BLOCK * BLOCK
    gone = file.execute(
        "SELECT id, block FROM flows WHERE id <= ? AND step % ? != 0 AND step NOT IN "
        "(SELECT step FROM findings UNION SELECT step - 1 FROM findings)", (limit, every)
    ).fetchall()  # fmt: skip
    for block in {block for _, block in gone if block is not None}:
        _unfold(file, block)
    file.executemany("DELETE FROM flows WHERE id=?", [(flow,) for flow, _ in gone])
    file.executemany("DELETE FROM rows WHERE id=?", [(flow,) for flow, _ in gone])
    left = _rows(file, "rows.id <= ?", (limit,))
    if len(left) >= BLOCK:
        _fold(file, left)


def _rows(file: sqlite3.Connection, which: str, values: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    """Number, layout and numbers of the flows that lie in rows, oldest first."""
    query = (
        "SELECT rows.id, layout, numbers FROM rows JOIN flows ON flows.id = rows.id "  # noqa: S608
        f"JOIN structures ON structures.id = structure WHERE {which} ORDER BY rows.id"  # a condition of ours
    )
    return file.execute(query, values).fetchall()


def _fold(file: sqlite3.Connection, rows: list[tuple[int, int, bytes]]) -> None:
    by_layout: dict[int, list[tuple[int, bytes]]] = {}
    for flow, layout, numbers in rows:
        by_layout.setdefault(layout, []).append((flow, numbers))
    for layout, group in by_layout.items():
        if len(group) < _FEW:
            continue
        done = file.execute("INSERT INTO blocks(layout, count) VALUES (?, ?)", (layout, len(group)))
        block = done.lastrowid or 0
        columns = zip(*(from_row(numbers) for _, numbers in group), strict=True)
        file.executemany(
            "INSERT INTO chunks VALUES (?, ?)",
            ((chunk_id(block, number), chunk(values)) for number, values in enumerate(columns)),
        )
        file.executemany(
            "UPDATE flows SET block=?, place=? WHERE id=?",
            ((block, place, flow) for place, (flow, _) in enumerate(group)),
        )
        file.executemany("DELETE FROM rows WHERE id=?", ((flow,) for flow, _ in group))


def _unfold(file: sqlite3.Connection, block: int) -> None:
    """Turn a block back into rows."""
    count = file.execute("SELECT count FROM blocks WHERE id=?", (block,)).fetchone()[0]
    columns = block_columns(file, block, count)
    flows = file.execute("SELECT id, place FROM flows WHERE block=?", (block,)).fetchall()
    file.executemany(
        "INSERT INTO rows VALUES (?, ?)",
        ((flow, row(array("d", (values[place] for values in columns)))) for flow, place in flows),
    )
    file.execute("UPDATE flows SET block=NULL, place=NULL WHERE block=?", (block,))
    file.execute("DELETE FROM chunks WHERE id >= ? AND id < ?", (chunk_id(block, 0), chunk_id(block + 1, 0)))
    file.execute("DELETE FROM blocks WHERE id=?", (block,))
