"""The short form of a record: what ``repr`` gives is always one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["LINE", "in_a_line"]

LINE = 120  # characters
_WORD = 44  # of one value

Kind = TypeVar("Kind")


def in_a_line(*names: str) -> Callable[[type[Kind]], type[Kind]]:
    """A class decorator: ``repr`` gives the class and these attributes in one line, those that are None left out."""

    def decorated(kind: type[Kind]) -> type[Kind]:
        missing = [name for name in names if not hasattr(kind, name)]
        if missing:  # found when the class is made, and not when somebody debugs
            message = f"{kind.__name__} has no {', '.join(missing)}"
            raise AttributeError(message)

        def line(self: Any) -> str:
            """The class and what matters most, in one line."""
            words = [f"{name}={_cut(repr(getattr(self, name)), _WORD)}" for name in names if _there(self, name)]
            return _cut(f"{type(self).__name__}({', '.join(words)})", LINE)

        line.__name__, line.__qualname__ = "__repr__", f"{kind.__qualname__}.__repr__"
        kind.__repr__ = line  # type: ignore[method-assign]
        return kind

    return decorated


def _there(thing: Any, name: str) -> bool:
    value = getattr(thing, name)
    return value is not None and value != ()


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 2]}…{words[-1]}"
