"""What a flow says of the ranks of a distributed run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxgrad.schema.lines import in_a_line

__all__ = ["OtherCourse", "Placement", "Ranks", "Spread", "path_here", "rank_here"]


@in_a_line("words", "copy")
@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on the ranks (a ``torch.distributed.tensor.DTensor``); its statistics are of this rank's part.

    Attributes:
        words: by dimension of the device mesh, ``"Shard(0)"`` or ``"Replicate"``, joined by ``", "``.
        copy: which of the equal copies this rank has, from 0; merged statistics count copy 0 only.
    """

    words: str
    copy: int = 0

    def __str__(self) -> str:
        """As torch writes it."""
        return f"{self.words} (copy {self.copy})" if self.copy else self.words


@in_a_line("worst", "largest", "smallest", "nonfinite", "missing")
@dataclass(frozen=True, slots=True)
class Spread:
    """How the ranks differ in the gradient of one value or parameter.

    Attributes:
        worst: the rank whose part is worst: one with NaN or Inf, else with the largest rms; the lowest of equals.
        largest, smallest: rms of the parts, largest and smallest; NaN or Inf where one is.
        nonfinite: ranks whose part has NaN or Inf.
        zero: ranks whose part is exactly zero throughout; empty at level ``norm``, which does not count.
        missing: ranks that have no gradient here.
    """

    worst: int
    largest: float
    smallest: float
    nonfinite: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


@in_a_line("ranks", "missing", "added")
@dataclass(frozen=True, slots=True)
class OtherCourse:
    """Ranks whose forward ran other operations than that of most ranks.

    Attributes:
        ranks: which.
        missing: keys of the nodes that most ranks have and these do not.
        added: keys of the nodes that these have and most ranks do not.
    """

    ranks: tuple[int, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]


@in_a_line("size", "worst", "worst_at", "without", "others")
@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a reduced flow is made of.

    Attributes:
        size: how many ranks there are.
        worst: the rank with the worst part of any value's or parameter's gradient: one with NaN or Inf, the nearest to
            the loss, else the one that stands out most from the other ranks' rms of the same value; None where nothing
            was measured.
        worst_at: site or parameter where that is.
        without: ranks that had no such backward event.
        failed: ranks whose backward pass raised: their numbers are left out, unless that of every rank raised.
        others: those that took another course, by course.
        events: number of the backward event by rank; -1 for a rank without one.
    """

    size: int
    worst: int | None = None
    worst_at: str | None = None
    without: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    others: tuple[OtherCourse, ...] = ()
    events: tuple[int, ...] = ()


def path_here(ranks: Ranks | None, path: Path | str | None) -> Path | str | None:
    """``path``; None on a rank other than 0 that is asked to write a reduced flow, which all ranks have."""
    return None if ranks is not None and rank_here() else path


def rank_here() -> int:
    """This process's rank in ``torch.distributed``; 0 where that is not in use.  Does not load torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    started = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if started else 0
