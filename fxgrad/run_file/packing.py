"""Numbers as bytes: one step's in a row, one column's over many steps in a chunk."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

__all__ = ["chunk", "column", "entry", "from_row", "packed", "row", "unpacked"]

_SIZE = 8  # bytes of a float64
_ONE = struct.Struct("<d")


def row(numbers: array[float]) -> bytes:
    """The numbers of one step, little-endian float64."""
    return _little(numbers).tobytes()


def from_row(data: bytes) -> array[float]:
    """What ``row`` wrote.

    Raises:
        ValueError: the data is cut off.
    """
    numbers: array[float] = array("d")
    numbers.frombytes(data)
    return _little(numbers)


def chunk(numbers: Sequence[float]) -> bytes:
    """One column over many steps.  Nothing is lost: the first bytes of all numbers lie together, which packs well."""
    data = row(array("d", numbers))
    return zlib.compress(b"".join(data[place::_SIZE] for place in range(_SIZE)), 1)


def column(data: bytes, count: int) -> tuple[float, ...]:
    """What ``chunk`` wrote of this many numbers.

    Raises:
        ValueError: the data is damaged.
    """
    planes = _planes(data, count)
    mixed = bytearray(len(planes))
    for place in range(_SIZE):
        mixed[place::_SIZE] = planes[place * count : (place + 1) * count]
    return struct.unpack(f"<{count}d", mixed)


def entry(data: bytes, place: int, count: int) -> float:
    """One of the numbers of which ``chunk`` wrote so many.

    Raises:
        ValueError: the data is damaged.
    """
    found: float = _ONE.unpack(_planes(data, count)[place::count])[0]
    return found


def _planes(data: bytes, count: int) -> bytes:
    try:
        planes = zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(planes) != count * _SIZE:
        message = f"{len(planes)} bytes are no {count} numbers"
        raise ValueError(message)
    return planes


def packed(content: Any) -> bytes:
    """JSON in few bytes."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    return zlib.compress(text.encode("ascii"), 6)


def unpacked(data: bytes) -> str:
    """The text that ``packed`` wrote.

    Raises:
        ValueError: the data is damaged.
    """
    try:
        return zlib.decompress(data).decode("ascii")
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _little(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers = array("d", numbers)
        numbers.byteswap()
    return numbers
