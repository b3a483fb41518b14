"""What a reduced flow says of ranks, in lines."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.render.words import number
from fxgrad.schema import GradientFlow, Ranks, Spread

__all__ = ["rank_lines", "spread_line"]

_NAMED = 4  # nodes, or ranks


def rank_lines(flow: GradientFlow) -> list[str]:
    """How many ranks there are, which is worst, and which took another course; nothing for a flow of one rank's own."""
    told = flow.ranks
    if told is None or told.size == 1:
        return []
    worst = "" if told.worst is None else f"; worst is rank {told.worst} at {told.worst_at}"
    lines = [f"ranks: {told.size}, their tensors put together{worst}"]
    for other in told.others:
        what = [f"without {_listed(other.missing)}"] if other.missing else []
        what += [f"with {_listed(other.added)}"] if other.added else []
        lines.append(f"{_who(other.ranks)} took another course{': ' if what else ''}{', '.join(what)}")
    if told.without:
        lines.append(f"{_who(told.without)} had no such backward pass")
    if told.failed:
        lines.append(f"{_who(told.failed)} raised in the backward pass")
    if len(_events(told)) > 1:
        lines.append(f"the ranks are at different backward passes: {', '.join(map(str, _events(told)))}")
    return lines


def spread_line(spread: Spread) -> str:
    """How the ranks differ at one value."""
    words = [f"rms {number(spread.smallest)} to {number(spread.largest)}, worst on rank {spread.worst}"]
    words += [
        f"{what} on {_who(which)}"
        for what, which in (("NaN or Inf", spread.nonfinite), ("zero", spread.zero), ("nothing", spread.missing))
        if which
    ]
    return f"ranks: {'; '.join(words)}"


def _events(told: Ranks) -> list[int]:
    return sorted({event for event in told.events if event >= 0})


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(tuple(map(str, ranks)))}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
