"""What is known of a backward pass that raised: the exception, where it is in sight, and who took part."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fxgrad.record.recorder import EventRecord

#: The functions through which every backward pass that Python asks for goes.
_ENTRIES = frozenset({torch.autograd.backward.__code__, torch.autograd.grad.__code__})


@dataclass(frozen=True, slots=True)
class Seen:
    """An exception that a backward pass raised.

    Attributes:
        type: name of its class.
        message: all of it.
        where: ``file:line`` where Python code that the pass called (a custom function, a hook) raised it; None where
            torch itself did.
    """

    type: str
    message: str
    where: str | None


@dataclass(slots=True, eq=False)
class Raised:
    """A backward pass that raised; shared by all that was kept of it.

    Attributes:
        exception: None where it was out of sight by the time somebody looked.
        parts: what was kept, the earliest forward call first.
    """

    exception: Seen | None
    parts: list[EventRecord] = field(default_factory=list)


def in_sight() -> list[BaseException]:
    """The exceptions that a running ``except``, ``finally`` or ``with`` handles, and the one that a prompt showed."""
    there = vars(sys)  # asked in every step; a module is slow to say that it lacks a name
    shown = there.get("last_exc") or there.get("last_value")
    return [error for error in (sys.exc_info()[1], shown) if error is not None]


def marks() -> tuple[int, ...]:
    """What is in sight now, so as to tell later what is new.  Good for exceptions that stay in sight only."""
    return tuple(map(id, in_sight()))


def exception_since(before: tuple[int, ...]) -> Seen | None:
    """The exception in sight that a backward pass raised, unless it was there before; or what it was raised from."""
    for error in in_sight():
        if id(error) not in before:
            for one in _chain(error):
                frames = list(_frames(one.__traceback__))
                entry = next((n for n, (frame, _) in enumerate(frames) if frame.f_code in _ENTRIES), None)
                if entry is not None:
                    return Seen(type(one).__name__, _text(one), _where(frames[entry:]))
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the user's own __str__
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    here: BaseException | None = error
    while here is not None and all(here is not one for one in seen):
        seen.append(here)
        yield here
        here = here.__cause__ or here.__context__


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    return traceback.walk_tb(trace)


def _where(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """The innermost line below the entry that is not torch's."""
    library = torch.__file__.removesuffix("__init__.py")
    inner = [f"{f.f_code.co_filename}:{line}" for f, line in frames if not f.f_code.co_filename.startswith(library)]
    return inner[-1] if inner else None
