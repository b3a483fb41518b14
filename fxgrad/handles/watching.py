"""A model under observation: the handle that ``fxgrad.watch`` returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.diagnosis.limits import checked_limits
from fxgrad.engine.alarms import Alarms, OnFinding, checked_listener
from fxgrad.engine.forward_patch import patched_forward_of, patching, refuse_unpatchable
from fxgrad.engine.logbook import Logbook
from fxgrad.engine.moments import Moment
from fxgrad.engine.run_writer import RunOptions, RunWriter
from fxgrad.engine.step import Engine, Options
from fxgrad.engine.training import Training, checked_optimizers, checked_scaler
from fxgrad.errors import NoFlowError, WatchError
from fxgrad.handles.graphs import GraphEngine
from fxgrad.record.distributed import TIMEOUT, flow_of_ranks, is_distributed
from fxgrad.record.recorder import HISTORY, EventRecord
from fxgrad.schema import Diagnosis, Finding, GradientFlow, History, Level, RunFileReport, Series

if TYPE_CHECKING:
    from fxgrad.diagnosis import Thresholds


@dataclass(frozen=True, slots=True)
class Around:
    """What a watch is told of the training around the model.

    Attributes:
        optimizers: whose steps are measured.
        scaler: of the loss.
        limits: by statistics word.
        on_finding: who is told of findings.
        logbook: the logs, where there are any.
        run_file: the run file, where there is to be one.
    """

    optimizers: tuple[Optimizer, ...] = ()
    scaler: GradScaler | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    on_finding: OnFinding | None = None
    logbook: Logbook = field(default_factory=Logbook)
    run_file: RunOptions | None = None

    @staticmethod
    def of(level: Level, *, optimizer: Any, scaler: Any, limits: Any, on_finding: Any) -> Around:
        """The options of ``fxgrad.watch``.

        Raises:
            OptionError: one has a value that it cannot have.
        """
        checked = {} if limits is None else checked_limits(limits, level)
        return Around(checked_optimizers(optimizer), checked_scaler(scaler), checked, checked_listener(on_finding))


_PUBLIC = ("active", "alarms", "diagnose", "flow", "history", "log", "note", "pause", "remove", "resume", "run_file")


class Watch:
    """A model under observation.  Made by ``fxgrad.watch``; also a context manager."""

    observes = True

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        every: int = 1,
        one_shot: bool = False,
        around: Around | None = None,
    ) -> None:
        """``one_shot``: for a single call, which may lie above an outer watch on the same model."""
        if not one_shot:
            refuse_unwatchable(model)
        around = Around() if around is None else around
        self._begin(model, every, around)
        self.one_shot = one_shot
        patched = patching(model)
        kind = GraphEngine if options.capture == "symbolic" else Engine
        self.engine = kind(model, patched.plain, options)
        self._patched = patched.add(self)
        self._patched.one_shots += one_shot
        self._surround(around)

    def _begin(self, model: nn.Module, every: int, around: Around) -> None:
        """Before the model is touched."""
        self._run = None if around.run_file is None else RunWriter(around.run_file)
        self._model = model
        self._every = every
        self._forwards = 0
        self._paused = False
        self._seen = False  # whether a backward pass may come to the latest call
        self._noted: deque[tuple[int, dict[str, float | torch.Tensor]]] = deque(maxlen=HISTORY)
        self.one_shot = False

    def _surround(self, around: Around) -> None:
        engine = self.engine
        if around.optimizers or around.scaler is not None:
            engine.training = Training(engine.recorder, around.optimizers, around.scaler)
        scale_of = (lambda _: None) if engine.training is None else engine.training.scale_of
        alarms = Alarms(around.limits, around.on_finding, engine.flow_of, scale_of)
        ended: list[Callable[[list[EventRecord]], None]] = [alarms.ended] if around.limits else []
        if self._run is not None:
            alarms.noted = self._run.found
            ended.append(self._run.opened(engine.coming, engine.stepped).ended)
        if ended:
            engine.tell(_each(ended))
        self._training, self._alarms = engine.training, alarms
        self._logbook = around.logbook.opened(engine.latest, alarms.report)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, observed where this call is to be."""
        observe = self._wants()
        if observe and self._model.training:
            self._logbook.forward(self._forwards - 1)
            if self._run is not None:
                self._run.forward()
                if self._run.options.capture:
                    return self._captured(self._run, args, kwargs)
        return self.engine.run(args, kwargs, observe=observe)

    def _captured(self, run: RunWriter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moment = Moment.before(self._model, args, kwargs)
        result = self.engine.run(args, kwargs, observe=True)
        moment.returned(result)
        run.captured(self.engine.latest_forward, moment)
        return result

    def _wants(self) -> bool:
        if self._paused or not self.engine.recorder.on:
            return False
        if self._model.training and torch.is_grad_enabled():
            self._forwards += 1
            if (self._forwards - 1) % self._every:
                self.engine.rest()
                self._seen = False
                return False
        self._seen = torch.is_grad_enabled()
        return True

    def returned(self, result: Any) -> None:
        """Nothing to do behind the forward."""

    # ---- for the user --------------------------------------------------------------------------------------

    def flow(self, *, reduce: bool = False, timeout: float = TIMEOUT, group: Any = None) -> GradientFlow:
        """The flow of the latest backward event; copies the statistics to the host, once.

        Args:
            reduce: that of all ranks of a distributed run, on each of them, by one collective: every rank has to call
                it.  ``flow.ranks`` tells how they differ.  Without ``torch.distributed`` it is that of one rank.
            timeout: with ``reduce``, seconds that ranks wait for each other.
            group: with ``reduce``, the process group; None for all ranks.

        Raises:
            NoFlowError: no backward pass has run through an observed forward call yet (with ``reduce``: on no rank).
            RanksError: a rank did not come in time, or made another call; the process group can be used as before.
        """
        if not reduce:
            return self._flow()
        try:
            own: GradientFlow | None = self._flow()
        except NoFlowError:
            if not is_distributed(group):
                raise
            own = None
        return flow_of_ranks(own, timeout=timeout, group=group)

    def _flow(self) -> GradientFlow:
        self._patched.stay()
        try:
            return self.engine.flow()
        except NoFlowError as error:
            if not self._patched.covered:
                raise
            name = type(self._model).__name__
            message = (
                f"{error}. The forward of this {name} was replaced while it was watched: watch it again after that"
            )
            raise NoFlowError(message) from None

    @property
    def history(self) -> History:
        """The flows of the latest backward events (at most 128), oldest first; one per forward call of an event."""
        self._patched.stay()
        flows = History(self.engine.history()) or History.without_flows(self.engine.unreached)
        return flows.with_notes(_by_backward(flows, self._noted)) if self._noted else flows

    def diagnose(self, thresholds: Thresholds | None = None) -> Diagnosis:
        """What the rules say of ``history``: ``fxgrad.diagnosis.diagnose`` over it.

        ``on_finding`` is told of the findings that were not reported before, by rule and place.

        Raises:
            NoFlowError: no backward pass has run through an observed forward call yet.  Where the watched optimizer was
                stepped all the same, that is a finding instead (``detached``).
            Exception: what ``on_finding`` raised first, once it was told of all.
        """
        from fxgrad.diagnosis import diagnose

        history = self.history
        if history.unreached is None:
            self.flow()  # raises where there is none
        found = diagnose(history, thresholds)
        self._alarms.report(found.findings)
        return found

    def note(self, **scalars: float | torch.Tensor) -> None:
        """Keep numbers that stand beside the gradients: ``watch.note(loss=loss)`` after the forward of a step.

        They are in ``history.notes`` and above its plot; the latest of each name is written to the logs.
        A tensor with one element stays on its device until then.

        Raises:
            OptionError: one is no single number.
        """
        kept = self._logbook.note(scalars)
        if self._run is not None:
            self._run.note(kept)
        if self._seen:
            self._noted.append((self.engine.latest_forward, kept))

    def log(self, step: int | None = None) -> bool:
        """Write the latest flow, its findings and the notes to the logs of ``log_to`` now.

        Waits for the device, once.  Does nothing where no backward pass has come since it was done last.

        Args:
            step: the number that the entry gets; None: that of the latest training forward, from 0.

        Returns:
            Whether there was something to write.
        """
        return self._logbook.write(step)

    @property
    def run_file(self) -> RunFileReport | None:
        """How the run file stands: how many flows were written and missed, and why; None where there is none."""
        return None if self._run is None else self._run.report

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The latest alarms of ``limits`` (at most 128), oldest first."""
        return tuple(self._alarms.latest)

    @property
    def active(self) -> bool:
        """False once the watch is removed."""
        return self.engine.recorder.on

    def pause(self) -> None:
        """Stop observing until ``resume``: calls run the model's own forward, and parameters carry no hooks of ours."""
        if self.active:
            self._paused = True
            self._note_pause(paused=True)
            self.engine.recorder.close_events()
            self.engine.parameters.remove()

    def resume(self) -> None:
        """Observe again after ``pause``."""
        self._paused = False
        self._note_pause(paused=False)

    def _note_pause(self, *, paused: bool) -> None:
        if self._training is not None:
            self._training.paused = paused

    def remove(self) -> None:
        """Give the model back as it was.  What was recorded stays readable.  May be called twice."""
        if not self.engine.recorder.on:
            return
        self._logbook.finish()
        self.engine.close()
        if self._training is not None:
            self._training.remove()
        self._patched.one_shots -= self.one_shot
        self._patched.take_out(self)
        if self._run is not None:
            self._run.finish()

    def __repr__(self) -> str:
        """The model's class, and how it stands."""
        state = "removed" if not self.active else "paused" if self._paused else "active"
        lacking = f", run file: {self._run.report.error}" if self._run is not None and self._run.report.error else ""
        return f"Watch({type(self._model).__name__[:40]}, {state}, {self._forwards} training forwards seen{lacking})"

    def __str__(self) -> str:
        """The same, and the history in lines."""
        return f"{self!r}\n{self.history}"

    def __dir__(self) -> list[str]:
        """The public names."""
        return list(_PUBLIC)

    def __enter__(self) -> Watch:  # noqa: PYI034  # Self is no part of typing before Python 3.11
        """The watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the watch."""
        self.remove()


def _by_backward(flows: History, noted: Iterable[tuple[int, Mapping[str, float | torch.Tensor]]]) -> dict[str, Series]:
    """What was noted behind forward calls, by the backward passes that ran through them.  Waits for the device."""
    passes = {flow.event.forward: flow.event.backward for flow in flows}
    found: dict[str, dict[int, float]] = {}
    for forward, notes in noted:
        for name, value in notes.items() if forward in passes else ():
            found.setdefault(name, {})[passes[forward]] = float(value)
    return {name: Series(name, "", tuple(steps), tuple(steps.values())) for name, steps in found.items()}


def _each(ended: Sequence[Callable[[list[EventRecord]], None]]) -> Callable[[list[EventRecord]], None]:
    """All of them, one after the other."""

    def run(kept: list[EventRecord]) -> None:
        for one in ended:
            one(kept)

    return run


def watch_of(model: nn.Module) -> Watch | None:
    """The watch that is on this very model, if any."""
    patched = patched_forward_of(model)
    patches = patched.patches if patched is not None else []
    return next((patch for patch in patches if isinstance(patch, Watch) and not patch.one_shot), None)


def refuse_unwatchable(model: Any) -> None:
    """Raise for what cannot be watched in place.

    Raises:
        WatchError: not a module, a compiled or scripted module, or one that is watched already.
    """
    refuse_unpatchable(model, "watch")
    if watch_of(model) is not None:
        message = f"this {type(model).__name__} is watched already; call remove() on the first watch, or use its flow()"
        raise WatchError(message)
