"""What a training run is logged by: an entry for a step, and the protocol of what takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fxgrad.schema.findings import Diagnosis, Finding
from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.lines import in_a_line

__all__ = ["Log", "LogEntry", "RunFileReport"]


@in_a_line("step")
@dataclass(frozen=True, slots=True)
class LogEntry:
    """One step of a training run.

    Attributes:
        step: the step number of the framework; in a loop of your own the number of the training forward, from 0.
        flow: of the latest backward pass of that step.
        diagnosis: what the checks say of the latest flows, this one last.
        fresh: the errors and warnings among its findings that no entry before this one had, by rule and place.
        notes: the latest scalars that were given to ``watch.note``, by name.
    """

    step: int
    flow: GradientFlow
    diagnosis: Diagnosis
    fresh: tuple[Finding, ...] = ()
    notes: Mapping[str, float] = field(default_factory=dict, hash=False)


@runtime_checkable
class Log(Protocol):
    """Where entries go: TensorBoard, a CSV file, a line on the screen, or an object of your own with these methods."""

    def write(self, entry: LogEntry) -> None:
        """Take an entry.  What it raises becomes a ``fxgrad.LogWarning``, and the log gets no more entries."""
        ...

    def close(self) -> None:
        """The watch is removed: no more entries come.  What the user opened stays open."""
        ...


@in_a_line("path", "written", "missed", "error")
@dataclass(frozen=True, slots=True)
class RunFileReport:
    """How the run file of a watch stands.

    Attributes:
        path: of the file.
        written: how many flows are in it, of this watch.
        missed: how many are not, since they could not be written.
        error: why, the latest time; None where all went well.
    """

    path: str
    written: int
    missed: int
    error: str | None
