"""What a file holds: one flow, a saved series of flows, or a run."""

from __future__ import annotations

from pathlib import Path

from fxgrad.errors import OptionError
from fxgrad.run_file import open_run
from fxgrad.schema import FlowSeries, GradientFlow, History
from fxgrad.store import load_series

__all__ = ["latest", "recorded"]

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
