"""What a file holds: one flow, a saved series of flows, or a run."""

from __future__ import annotations

from pathlib import Path

from fxgrad.errors import OptionError
from fxgrad.run_file import open_run
from fxgrad.schema import FlowSeries, GradientFlow, History
from fxgrad.store import load_series

__all__ = ["at_step", "latest", "pair", "recorded"]

_SQLITE = b"SQLite format 3\0"


def recorded(path: Path) -> GradientFlow | FlowSeries:
    """A flow, or several of one model, oldest first; those of a run file are read when they are asked for.

    Raises:
        FlowFileError: the file holds none of these.
        RunFileError: it is a damaged run file, or one without any flow yet.
    """
    try:
        with path.open("rb") as file:
            is_run = file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        is_run = False  # the reader of flows says what is wrong with it
    if is_run:
        return open_run(path)
    flows = load_series(path)
    return flows[0] if len(flows) == 1 else History(flows)


def latest(found: GradientFlow | FlowSeries) -> GradientFlow:
    """The flow itself, or the latest of several.

    Raises:
        OptionError: there is none yet.
    """
    if isinstance(found, GradientFlow):
        return found
    if not len(found):
        message = "there is no flow in this file yet: no backward pass was recorded"
        raise OptionError(message)
    return found.sampled(1)[0]


def at_step(found: GradientFlow | FlowSeries, step: int | None) -> GradientFlow:
    """The flow of this step; None: the latest.

    Raises:
        NoFlowError: there is none of this step.
        OptionError: there is none yet.
    """
    if step is None:
        return latest(found)
    return (History([found]) if isinstance(found, GradientFlow) else found).flow(step)


def pair(
    before: Path, after: Path | None, steps: tuple[int, int] | None
) -> tuple[GradientFlow | FlowSeries, GradientFlow | FlowSeries]:  # fmt: skip
    """What is compared: two files, two steps of one, or one step of each.

    Raises:
        NoFlowError, FlowFileError, RunFileError: one of them is not there.
        OptionError: there is one file, and no steps of it.
    """
    if steps is None:
        if after is None:
            message = f"{before} with what? Name a second file, or two steps of this one: --steps 0 100"
            raise OptionError(message)
        return recorded(before), recorded(after)
    first = recorded(before)
    second = first if after is None else recorded(after)
    return at_step(first, steps[0]), at_step(second, steps[1])
