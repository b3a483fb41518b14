"""The engine: runs a model's forward under observation, by the recorder that fits, and keeps what came of it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxgrad.capture.calls import positional_names
from fxgrad.capture.captured import CallGraph
from fxgrad.capture.eager import Session
from fxgrad.capture.modules import ModuleMap
from fxgrad.courses.rest import Given
from fxgrad.courses.values import finished
from fxgrad.engine.assembly import assemble
from fxgrad.engine.forward_values import accumulating, begin
from fxgrad.engine.recorders import Recorders
from fxgrad.engine.run_events import Coming
from fxgrad.engine.training import Training
from fxgrad.errors import NoFlowError
from fxgrad.probes.edges import EdgeNotes, hook_edges
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.probes.leaves import LeafHook
from fxgrad.probes.probe import put
from fxgrad.record.gradient_statistics import GradientStatistics
from fxgrad.record.parameters import ParameterHooks
from fxgrad.record.recorder import EventRecord, Recorder
from fxgrad.record.values import ValueRecorder
from fxgrad.rewriting.apply import MARK, NodeRules, rules_of
from fxgrad.rewriting.tally import Windows
from fxgrad.schema import CaptureReport, FrontEnd, GradientFlow, Level, SiteKind, Statistics
from fxgrad.torch_support.leaf_hooks import LeafHooks, hook_in_front
from fxgrad.torch_support.private import functorch_active, sequence_number, without_torch_function

# Norms that a float32 sum of squares holds with room to spare (1e-23 ** 2 is 0, 1.9e19 ** 2 is Inf).
_MEASURABLE = (1e-15, 1e15)
_FEW = 256  # forward records that are remembered before those that are gone are forgotten


@dataclass(frozen=True, slots=True)
class Options:
    """What is observed.

    Attributes:
        level: statistics level.
        capture: ``"auto"`` or ``"eager"``, the model's own Python; ``"symbolic"``, a graph module.
        sites: ``"edge"`` to measure the part of each consumer of a value as well.
        forward: whether the values themselves are measured, in the forward pass.
        channels: whether gradients of what convolutions and linear ops return are measured unit by unit as well.
        native: whether the native recorder may be used, and had built.
        one_shot: for a single call.
    """

    level: Level = "norm"
    capture: str = "auto"
    sites: SiteKind = "node"
    forward: bool = False
    channels: bool = False
    native: bool = True
    one_shot: bool = False


class Engine:
    """Observes the forward calls of one model.

    Args:
        model: the model.
        forward: what a call runs (the model's own forward).
        options: what is observed.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], options: Options) -> None:
        self.model = model
        self.forward = forward
        self.options = options
        self.recorder = Recorder(options.level, native=options.native)
        self.modules = ModuleMap(model)
        self.parameters = ParameterHooks(self.recorder)
        self.loss_words = "the caller's own backward pass"
        self._numbers = itertools.count()
        self.latest_forward = -1  # number of the latest observed call
        self._names = positional_names(forward)
        self._previous: CallGraph | None = None
        self._structure = self.modules.structure  # of which the previous call graph is
        self._values = ValueRecorder(options.level, native=options.native) if options.forward else None
        # A freed autograd graph takes its forward record along.  No WeakSet, which takes some microseconds a step.
        self._live: list[weakref.ref[ForwardRecord]] = []
        self._many = _FEW
        self.leaves = LeafHooks(LeafHook, hook_in_front, self.parameters.mend)
        self.training: Training | None = None
        self._windows = Windows()
        self._latest_report: tuple[Any, CaptureReport | None] = (None, None)  # the same in most steps
        self._recorders = Recorders(self.recorder, self.modules, self.parameters, options)
        self._reading = threading.Lock()  # what is kept of an event is brought into form by who reads it first

    @property
    def call_graph(self) -> CallGraph | None:
        """The graph of the latest observed call; None before the first."""
        return self._previous

    # ---- running ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward under observation where that makes sense, else as it is."""
        return self.run(args, kwargs, observe=True)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, observe: bool) -> Any:
        """Run the forward under the model's rewrite rules and, if ``observe``, under observation."""
        observe = observe and self.recorder.on
        rules = rules_of(self.model)
        if torch.is_grad_enabled():
            self._windows.close()
        if not (observe or rules) or not torch.is_grad_enabled() or functorch_active():
            return self._plain(args, kwargs)
        with without_torch_function():
            forward_record = self._begin(rules, observe=observe)
        try:
            result = self._record(forward_record, args, kwargs)
        except BaseException:
            forward_record.abandoned()
            raise
        forward_record.end = sequence_number()
        with without_torch_function():
            forward_record.returned()
            self._finish(forward_record)
            if observe and self.parameters.lazy:  # made in the forward, by now
                self.parameters.refresh(self.modules.parameters)
        if observe:
            self._live.append(weakref.ref(forward_record))
            if len(self._live) > self._many:
                self._release_finished()
                self._many = 2 * len(self._live) + _FEW
        return result

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward as it is."""
        return self.forward(*args, **kwargs)

    def _record(self, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward under the recorder for this call, which sets the record's ``call_graph`` and ``report``."""
        if forward_record.rewriting is not None:
            return self._rewritten(forward_record, args, kwargs)
        observer, reason = self._recorders.choose(forward_record)
        if observer is None:
            return self._run_python(forward_record, args, kwargs, reason)
        with without_torch_function():
            prepared = observer.prepare(args, kwargs, self._names)
        if prepared is None:
            return self._run_python(forward_record, args, kwargs, observer.refused or "")
        learning = prepared.learning
        if learning is not None:
            return observer.learn(
                forward_record,
                lambda session: self._run_python(forward_record, args, kwargs, learning, session),
                prepared,
            )
        with without_torch_function():
            run = observer.follow(forward_record, prepared)
        try:
            result = self.forward(*args, **kwargs)
        except BaseException:
            run.leave()
            raise
        with without_torch_function():
            observer.arrived(run, result)
        if forward_record.deviation is None:
            self._previous = forward_record.call_graph
        else:
            reason = forward_record.deviation.words
        forward_record.report = self._report("eager", "native", reason)
        return result

    def _rewritten(self, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under rewrite rules."""
        ways, reason = self._recorders.ways(forward_record, observe=forward_record.number >= 0)
        if ways is None:
            result = self._run_python(forward_record, args, kwargs, reason)
        else:
            given = Given(self.forward, args, kwargs, self._names)
            result, left = ways.run(forward_record, given, self._previous)
            self._previous = forward_record.call_graph
            forward_record.report = self._report("eager", "python" if left else "native", left or reason)
        forward_record.rewriting.rules.capture = forward_record.report
        return result

    def _run_python(
        self, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str,
        session: Callable[..., Session] = Session,
    ) -> Any:  # fmt: skip
        """The Python recorder: the model's own Python under a ``TorchFunctionMode``, once."""
        previous = self._previous
        if previous is not None:
            forward_record.escalated = frozenset(previous.escalated)
        result = session(self.modules, forward_record, put, previous).run(self.forward, args, kwargs, self._names)
        self._previous = forward_record.call_graph
        forward_record.report = self._report("eager", "python", reason)
        return result

    def _report(self, front_end: FrontEnd, recorder: str, reason: str) -> CaptureReport:
        facts = front_end, reason, type(self.model).__name__, self.model.training, torch.__version__
        known, report = self._latest_report
        if report is None or known != (*facts, recorder):
            report = CaptureReport(*facts, recorder=recorder)
            self._latest_report = (*facts, recorder), report
        return report

    def _finish(self, forward_record: ForwardRecord) -> None:
        """The forward has returned."""
        if forward_record.rewriting is not None:
            forward_record.rewriting.close()
            if forward_record.slots is not None and forward_record.sizes is None:  # C++ could not look on
                forward_record.call_graph = None
        if forward_record.edges is not None and forward_record.slots is None:
            hook_edges(forward_record)
        if forward_record.values is not None:
            forward_record.values.finish()
            if forward_record.written is not None:
                finished(forward_record.values.taken, forward_record, forward_record.written, forward_record.units)

    def _begin(self, rules: NodeRules | None, *, observe: bool) -> ForwardRecord:
        self.recorder.close_events()
        self.modules.refresh()
        if self.modules.structure is not self._structure:
            self._structure, self._previous = self.modules.structure, None
        self._recorders.prepare()
        expected = len(self._previous.sites) + len(self._previous.fan_out) if self._previous is not None else 0
        forward_record = ForwardRecord(self.recorder, next(self._numbers) if observe else -1, expected)
        forward_record.leaves = self.leaves
        if observe:
            self.latest_forward = forward_record.number
            forward_record.parameters = self.parameters.refresh(self.modules.parameters)
            forward_record.outside, forward_record.reduced = self.modules.outside, self.modules.reduced
            forward_record.edges = EdgeNotes(None) if self.options.sites == "edge" else None
            known = self.parameters.accumulating
            forward_record.accumulating = accumulating(forward_record.parameters) if known is None else known
            forward_record.values = begin(self._values, self.modules, forward_record if self.options.channels else None)
            forward_record.window = self._windows.open(
                self.model, MARK, functools.partial(GradientStatistics, self.options.level)
            )
            if self.training is not None:
                self.training.forward(forward_record)
        if rules is not None:
            forward_record.rewriting = rules.begin(forward_record, observing=observe)
        return forward_record

    def _release_finished(self) -> None:
        """Forget the forward calls whose backward has run."""
        finished = {
            id(event_record.forward_record) for event_record in tuple(self.recorder.history)
        }  # at once: other threads append
        for one in tuple(self._live):  # one by one: other threads append
            there = one()
            if there is None or id(there) in finished:
                self._live.remove(one)

    def rest(self) -> None:
        """Before a forward call that is not observed: parameters carry no hooks, unless a backward is still to come."""
        if not self.parameters.on:
            return
        self.recorder.close_events()
        self._release_finished()
        if not self._live:
            self.parameters.remove()

    def tell(self, ended: Callable[[list[EventRecord]], None]) -> None:
        """Have each event told when it ends."""
        self.recorder.ended = ended

    def close(self) -> None:
        """Take every hook off."""
        self.recorder.close_events()
        self.recorder.on = False
        self._live.clear()
        self.leaves.remove()
        self.parameters.remove()

    # ---- reading ---------------------------------------------------------------------------------------------

    def history(self) -> list[GradientFlow]:
        """The flows of all kept events, oldest first."""
        self.recorder.close_events()
        return self._completed(self._finished())

    def latest(self, count: int) -> list[GradientFlow]:
        """The flows of the latest kept events, at most ``count``, oldest first."""
        self.recorder.close_events()
        return self._completed(self._finished()[-count:])

    def _finished(self) -> list[EventRecord]:
        """The kept events of forward calls that returned; one that raised has no graph."""
        return [
            event_record
            for event_record in tuple(self.recorder.history)
            if event_record.forward_record.call_graph is not None
        ]

    def flow(self) -> GradientFlow:
        """The flow of the latest event.

        Raises:
            NoFlowError: no backward pass has run through a recorded forward call yet.
        """
        self.recorder.close_events()
        finished = self._finished()
        if not finished:
            raise NoFlowError(self._why_no_flow())
        return self._completed(finished[-1:])[0]

    @property
    def unreached(self) -> str | None:
        """Why there is no flow, where the optimizer stepped all the same; else None."""
        steps = 0 if self.training is None or self._previous is None or self._finished() else self.training.steps
        if not steps:
            return None
        taken = f"the optimizer was stepped {steps} time{'s' if steps > 1 else ''} without a gradient of this model"
        return f"{self._why_no_flow()}; {taken}"

    def _why_no_flow(self) -> str:
        message = f"no gradient flow of {type(self.model).__name__} is recorded yet: "
        if self._previous is None:
            return message + "call the model with gradients enabled and run backward() first"
        return message + (
            "it was called with gradients enabled, but no backward pass has come to a call of it. If backward() was "
            "run, the loss is cut off from the model: look for .item(), .detach(), .data, float() or "
            "torch.tensor(loss) between them, and for torch.no_grad() in forward"
        )

    def _completed(self, events: list[EventRecord]) -> list[GradientFlow]:
        flows = [self.flow_of(event_record) for event_record in events]
        return flows if self.training is None else self.training.complete(events, flows)

    def flow_of(self, event_record: EventRecord) -> GradientFlow:
        """The flow of an event, without what lies around the backward pass; made once."""
        if event_record.flow is None:
            self._recorders.rename(event_record.forward_record)
            event_record.flow = self._assembled(event_record)
        return event_record.flow

    def coming(self, event_record: EventRecord) -> Coming:
        """What another thread makes the flow of an event of, with what is known now of the training around it."""
        self._recorders.rename(event_record.forward_record)
        known = None if self.training is None else self.training.known(event_record)
        return Coming(event_record, known, self._assembled, self._reading, self.loss_words, self.options.level)

    def stepped(self, event_record: EventRecord) -> bool | None:
        """Whether the optimizer's step behind an event is known by now; None where there is no optimizer."""
        return None if self.training is None else self.training.stepped(event_record)

    def _assembled(self, event_record: EventRecord) -> GradientFlow:
        if event_record.flow is not None:
            return event_record.flow
        with self._reading:
            flow = assemble(event_record, self.loss_words, self.options.level)
            own = [site.statistics for site in flow.sites]
            if event_record.forward_record.edges is not None:
                edges = dict(zip(event_record.forward_record.call_graph.uses, flow.edges, strict=True))
                own += [edges[use].statistics for use in event_record.forward_record.call_graph.fan_out]
            _escalate(event_record.forward_record.call_graph.escalated, dict(enumerate(own)))
            numbers = [number for number, _, _ in event_record.forward_record.parameters]
            found = dict(zip(numbers, (record.statistics for record in flow.parameters), strict=True))
            _escalate(self.recorder.escalated, found)
        return flow


def _escalate(marked: set[int], found: Mapping[int, Statistics | None]) -> None:
    """Mark what ``norm`` could not tell (0 or Inf) to be measured at ``full``, for as long as that stays so."""
    for number, statistics in found.items():
        if statistics is None:
            continue
        if statistics.level == "norm":
            if statistics.outside_range:
                marked.add(number)
        elif number in marked and _MEASURABLE[0] < statistics.l2_norm < _MEASURABLE[1]:
            marked.discard(number)
