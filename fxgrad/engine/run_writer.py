"""A run file that is written beside the training, by a thread that alone waits for the device and for the disk.

The training thread hands an event over when the next step begins, so that the optimizer's step is in it, and at that
moment waits until the event before it is in the file: what a kill can lose is the event in flight.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed

from fxgrad.engine.judging import Judge
from fxgrad.engine.moments import Moment, moment_path
from fxgrad.engine.run_events import Coming, WrittenEvents
from fxgrad.errors import LogWarning, OptionError, RunFileError
from fxgrad.record.recorder import EventRecord
from fxgrad.run_file import RunFile
from fxgrad.run_file.writing import checked_keep
from fxgrad.schema import Finding, RunFileReport
from fxgrad.torch_support.private import without_dispatch_modes, without_torch_function

__all__ = ["Errors", "RunOptions", "RunWriter", "checked_run_file"]

Errors = Literal["warn", "raise"]
_PATIENCE = 10.0  # seconds that a step waits for the event before the last one to be written
_MOMENTS = 2  # copies of a step that are held: of forward calls whose backward pass has not come yet
_UNSTEPPED = 64  # events, without a step of the optimizer so far, that are written again when it comes


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The run file of a watch.

    Attributes:
        path: of the file.
        keep: see ``RunFile.create``.
        errors: what becomes of an error: a ``LogWarning``, once, or raised in the next step.
        capture: whether each step is copied before it runs, and that of the first error kept.
    """

    path: Path
    keep: Any = None
    errors: Errors = "warn"
    capture: bool = False


def checked_run_file(run_file: Any, keep: Any, errors: Any, capture: Any = False) -> RunOptions | None:  # noqa: FBT002
    """The options of ``fxgrad.watch``; None where there is to be no file.

    Raises:
        OptionError: one has a value that it cannot have.
    """
    checked_keep(keep)
    if errors not in get_args(Errors):
        message = f"run_file_errors={errors!r} is not known; it is 'warn' or 'raise'"
        raise OptionError(message)
    if run_file is None:
        if keep is not None or capture:
            message = f"{'capture_batch' if capture else 'keep'}= is about a run file: give run_file='run.fxgrad', too"
            raise OptionError(message)
        return None
    if not isinstance(run_file, (str, Path)):
        message = f"run_file= takes the path of a file, such as 'run.fxgrad', but got {type(run_file).__name__}"
        raise OptionError(message)
    return RunOptions(Path(run_file).absolute(), keep, errors, bool(capture))


@dataclass(slots=True, eq=False)
class _Job:
    """What the thread is given: an event, or only what stands beside the last one.

    Attributes:
        coming: the event; None where there is no further one.
        notes, findings: that go with it.
        moment: what the step began with, where that is copied.
        again: whether it was written before, without the optimizer's step behind it.
        last: whether the run ends with it.
        done: set when it is in the file, or has failed with ``error``.
    """

    coming: Coming | None
    notes: dict[str, float | Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    moment: Moment | None = None
    again: bool = False
    last: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    is_new: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_new = self.coming is not None and not self.again


class RunWriter:
    """Writes the events of one watch.

    Args:
        options: which file, and how.

    Raises:
        RunFileError: the file cannot be written, and ``errors`` is ``"raise"``.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.error: str | None = None
        self.written = self.missed = 0
        self._coming: Callable[[EventRecord], Coming]
        self._stepped: Callable[[EventRecord], bool | None]
        self._pid = os.getpid()
        self._pending: list[EventRecord] = []  # one backward pass: a record for each of its forward calls
        self._unstepped: deque[EventRecord] = deque(maxlen=_UNSTEPPED)
        self._beside: dict[str, float | Tensor] = {}  # of these
        self._next: dict[str, float | Tensor] = {}  # of the event to come
        self._findings: list[Finding] = []
        self._busy: list[_Job] = []
        self._moments: dict[int, Moment] = {}  # by number of the forward call
        self._raised: Exception | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_exit = _AtExit(self)
        if _is_first():
            self._open()

    def opened(
        self, coming: Callable[[EventRecord], Coming],
        stepped: Callable[[EventRecord], bool | None],
    ) -> RunWriter:  # fmt: skip
        """The same, for a watch.

        ``coming`` gives an event as another thread can read it, with what is known now; ``stepped`` whether
        the optimizer's step behind an event is known, None where there is no optimizer.
        """
        self._coming, self._stepped = coming, stepped
        return self

    def _open(self) -> None:
        opened = _Job(None)
        thread = threading.Thread(
            target=_work, args=(self.options, self._jobs, opened), name="fxgrad run file", daemon=True
        )
        thread.start()
        opened.done.wait()
        if opened.error is not None:
            self._fail(opened.error)
            self._raise()
            return
        self._thread = thread
        atexit.register(self._at_exit)
        weakref.finalize(self, self._jobs.put, None)  # who forgets a watch leaves no thread behind

    @property
    def report(self) -> RunFileReport:
        """How it stands."""
        return RunFileReport(str(self.options.path), self.written, self.missed, self.error)

    @property
    def _on(self) -> bool:
        return self._thread is not None and os.getpid() == self._pid  # a forked child has no such thread

    # ---- in the training thread --------------------------------------------------------------------------------

    def note(self, scalars: Mapping[str, float | Tensor]) -> None:
        """Numbers that stand beside the event that ended last, or else the next one; tensors stay on their device."""
        (self._beside if self._pending else self._next).update(scalars)

    def found(self, finding: Finding) -> None:
        """A finding that came from elsewhere."""
        self._findings.append(finding)

    def ended(self, kept: list[EventRecord]) -> None:
        """A backward pass has ended: the one before it is complete, whatever came behind it, and is written now."""
        if self._on:
            self._hand_over()
            self._settle()
            self._pending = [part for part in kept if part.forward_record.call_graph is not None]
            self._beside, self._next = self._next, {}

    def captured(self, number: int, moment: Moment) -> None:
        """What the forward call with this number began with."""
        if self._on:
            self._moments[number] = moment
            while len(self._moments) > _MOMENTS:
                del self._moments[next(iter(self._moments))]

    def forward(self) -> None:
        """A training forward is about to run: the step before it is complete.

        Raises:
            RunFileError: something could not be written, and ``errors`` is ``"raise"``.
        """
        if self._on:
            self._hand_over()
            self._raise()

    def finish(self) -> None:
        """Write what is left and let go of the file.  May be called twice.

        Raises:
            RunFileError: as ``forward``.
        """
        if not self._on or self._thread is None:
            return
        self._hand_over()
        self._submit(_Job(None, self._next, self._findings, last=True))
        self._jobs.put(None)
        if self._settle():
            self._thread.join(_PATIENCE)
        self._thread = None
        atexit.unregister(self._at_exit)
        self._raise()

    def _hand_over(self) -> None:
        """Give the event that has ended to the thread, when the one before it is written."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if _capturing():
            self._lose(len(pending), "a CUDA graph was being captured, in which nothing may wait for the device")
        elif not self._settle():
            self._lose(len(pending), f"it is slower than the training, by more than {_PATIENCE:.0f} seconds")
        else:
            try:
                with without_torch_function(), without_dispatch_modes(), torch.no_grad():
                    self._give(pending)
            except Exception as error:  # noqa: BLE001  # the user's backward must go on
                self._fail(error, lost=len(pending))

    def _give(self, pending: list[EventRecord]) -> None:
        again = [part for part in self._unstepped if self._stepped(part)]
        self._unstepped = deque((part for part in self._unstepped if part not in again), _UNSTEPPED)
        self._unstepped.extend(part for part in pending if self._stepped(part) is False)
        jobs = [_Job(self._coming(part), again=True) for part in again]
        jobs += [_Job(self._coming(part)) for part in pending]
        jobs[-1].moment = self._moments.pop(pending[-1].forward_record.number, None)
        jobs[-1].notes, self._beside = self._beside, {}
        jobs[-1].findings, self._findings = self._findings, []
        for job in jobs:
            self._submit(job)

    def _submit(self, job: _Job) -> None:
        self._busy.append(job)
        self._jobs.put(job)

    def _settle(self) -> bool:
        """Wait until all that was handed over is written; False where that takes too long."""
        while self._busy:
            job = self._busy[0]
            if not job.done.wait(_PATIENCE):
                return False
            del self._busy[0]
            if job.error is not None:
                self._fail(job.error, lost=job.is_new)
            else:
                self.written += job.is_new
        return True

    def _lose(self, count: int, why: str) -> None:
        self._fail(RunFileError(f"{self.options.path} lacks events: {why}"), lost=count)

    def _fail(self, error: Exception, lost: int = 0) -> None:
        self.missed += lost
        first, self.error = self.error is None, f"{error}"
        if self.options.errors == "raise":
            self._raised = self._raised or error
        elif first:
            message = f"the run file lacks something, and training goes on: {error}"
            warnings.warn(message, LogWarning, stacklevel=2)

    def _raise(self) -> None:
        error, self._raised = self._raised, None
        if error is not None:
            raise error


class _AtExit:
    """Finishes a writer at the end of the process, unless that is gone already."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = weakref.ref(writer)

    def __call__(self) -> None:
        """The process ends."""
        writer = self._writer()
        if writer is not None:
            writer.finish()


def _work(options: RunOptions, jobs: SimpleQueue[_Job | None], opened: _Job) -> None:
    """What the thread does.  The file is known here only: a forked child, which has no such thread, cannot touch it."""
    try:
        file = RunFile.create(options.path, keep=options.keep)
    except Exception as error:  # noqa: BLE001  # told where it is waited for
        opened.error = error
        opened.done.set()
        return
    opened.done.set()
    judge, events = Judge(), WrittenEvents(file)
    with file, torch.no_grad():
        while (job := jobs.get()) is not None:
            try:
                _write(file, events, judge, job)
            except Exception as error:  # noqa: BLE001  # told where it is waited for
                job.error = error
            job.coming = job.moment = None  # which hold the event
            job.done.set()
            del job


def _write(file: RunFile, events: WrittenEvents, judge: Judge, job: _Job) -> None:
    """Write a job."""
    notes = {name: float(value) for name, value in job.notes.items()}
    bad = not all(map(math.isfinite, notes.values()))
    flow = None
    if job.coming is not None:
        written = events.write(job.coming, notes)
        flow, bad = written.flow, bad or written.bad
    elif events.step is not None:
        file.note(events.step, notes)
    judge.told(job.findings)
    found = [*job.findings, *(() if job.again else judge.look(flow, bad=bad, last=job.last))]
    if found:
        file.found(found, events.step or 0)
    if job.moment is not None and not events.broken and any(finding.severity == "error" for finding in found):
        events.broken = True
        job.moment.save(moment_path(file.path), events.step or 0)


def _is_first() -> bool:
    """Whether this process is the one that writes: rank 0 of those that torch.distributed runs."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
