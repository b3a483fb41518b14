"""A watch on a compiled model: its graphs are compiled once more, by its own backend, with the statistics in them.

A hook that is put on compiled code never runs, or breaks its graph.  So a watch does nothing of the kind:
observed calls run code that the user's own backend makes of the same graphs with probes, all others the user's code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.modules import ModuleMap
from fxgrad.engine.forward_patch import patched_forward_of
from fxgrad.engine.run_events import Coming
from fxgrad.engine.step import Options
from fxgrad.engine.training import Training
from fxgrad.errors import NoFlowError, OptionError, WatchError
from fxgrad.handles.dynamo_backend import Observer
from fxgrad.handles.dynamo_runs import Graph, GraphRun
from fxgrad.handles.watching import Around, Watch
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.recorder import HISTORY, EventRecord
from fxgrad.record.slot_recorder import EventRuns
from fxgrad.schema import GradientFlow
from fxgrad.torch_support.private import functorch_active, without_torch_function
from fxgrad.torch_support.private_compiled import CompiledCall

_NOTED = 4 * HISTORY  # forward calls of which it is known whether gradients were there
_WATCH = "_fxgrad_compiled_watch"


class _Observer(Observer):
    """The backend of one watch, for one model.

    Args:
        inner: the user's backend.
        model: the original.
    """

    def __init__(self, inner: str | Callable[..., Any], model: nn.Module) -> None:
        super().__init__(inner)
        self.modules = ModuleMap(model)
        self._runs: weakref.WeakSet[GraphRun] = weakref.WeakSet()  # whose autograd graph is there
        self.latest_forward = -1

    def listed(self) -> list[tuple[int, tuple[str, ...], Tensor]]:
        """The parameters now, with their numbers."""
        self.modules.refresh()
        return self._listed(self.modules)

    def note(self, *, accumulating: bool | None) -> None:
        """Of the forward call that has just returned: whether parameters had a gradient before."""
        self.accumulating[self._forward] = accumulating
        if len(self.accumulating) > _NOTED:
            del self.accumulating[next(iter(self.accumulating))]

    def _begin(self, graph: Graph, args: Sequence[Any]) -> GraphRun:
        run = super()._begin(graph, args)
        self._runs.add(run)
        self.latest_forward = run.forward
        return run

    @property
    def waiting(self) -> bool:
        """Whether a backward pass through an observed call may still come."""
        kept = {id(run) for event in self._events_of(set()) for run, _ in event.runs}
        return any(id(run) not in kept for run in tuple(self._runs))

    def event_records(self, events: int = 0) -> list[EventRecord]:
        """What was kept of so many of the latest events (0: all), with the flows."""
        self.recorder.close_events()
        return [part for event in self._events_of(set())[-events:] for part in self.parts(event)]

    def parts(self, event: EventRuns) -> list[EventRecord]:
        """What was kept of one event, made once."""
        if event.parts is None:
            own = {id(parameter) for parameter in self.modules.root.parameters()}
            self.modules.refresh()
            event.parts = self._parts(event, self.modules, own)
        return event.parts


class CompiledEngine:
    """What a watch of a compiled model asks: the calls, the events and their flows.

    Args:
        call: the compiled code.
    """

    def __init__(self, call: CompiledCall) -> None:
        assert call.backend is not None  # noqa: S101  # for mypy: refused before
        self.model = call.model
        self.observer = _Observer(call.backend, self.model)
        self.recorder = self.observer.recorder
        self.parameters = self.observer  # whose hooks a pause takes off
        self.training: Training | None = None
        self._plain = call.code
        self._observed = call.again(self.observer)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, observe: bool) -> Any:
        """The observed code where this call is to be observed, else the user's."""
        if not (observe and torch.is_grad_enabled()) or functorch_active():
            return self._plain(*args, **kwargs)
        if self.training is None:
            return self._observed(*args, **kwargs)
        forward_record = ForwardRecord(self.recorder, 0, 0)
        with without_torch_function():
            forward_record.parameters = self.observer.listed()
            self.training.forward(forward_record)
        result = self._observed(*args, **kwargs)
        self.observer.note(accumulating=forward_record.accumulating)
        return result

    @property
    def latest_forward(self) -> int:
        """Number of the latest observed call."""
        return self.observer.latest_forward

    def rest(self) -> None:
        """Before a call that is not observed: parameters carry no hooks, unless a backward is still to come."""
        self.recorder.close_events()
        if not self.observer.waiting:
            self.observer.remove()

    def close(self) -> None:
        """Take every hook off."""
        self.recorder.close_events()
        self.recorder.on = False
        self.observer.remove()

    def history(self) -> list[GradientFlow]:
        """The flows of all kept events, oldest first."""
        return self._completed(self.observer.event_records())

    def latest(self, count: int) -> list[GradientFlow]:
        """The flows of the latest kept events, at most ``count``, oldest first."""
        return self._completed(self.observer.event_records(count)[-count:])

    def flow(self) -> GradientFlow:
        """The flow of the latest event.

        Raises:
            NoFlowError: no backward pass has run through observed code yet.
        """
        found = self.observer.event_records(1)
        if not found:
            refused = "; ".join(self.observer.unobserved)
            message = f"no gradient flow of {type(self.model).__name__} is recorded yet: " + (
                f"nothing of it could be observed: {refused}" if refused else "call it and run backward() first"
            )
            raise NoFlowError(message)
        return self._completed(found[-1:])[0]

    def _completed(self, events: list[EventRecord]) -> list[GradientFlow]:
        flows = [self.flow_of(event_record) for event_record in events]
        return flows if self.training is None else self.training.complete(events, flows)

    @staticmethod
    def flow_of(event_record: EventRecord) -> GradientFlow:
        """The flow of an event."""
        assert event_record.flow is not None  # noqa: S101  # for mypy: the observer made it
        return event_record.flow

    def coming(self, event_record: EventRecord) -> Coming:
        """What another thread makes the flow of an event of, with what is known now of the training around it."""
        known = None if self.training is None else self.training.known(event_record)
        return Coming(event_record, known, self.flow_of)

    def stepped(self, event_record: EventRecord) -> bool | None:
        """Whether the optimizer's step behind an event is known by now; None where there is no optimizer."""
        return None if self.training is None else self.training.stepped(event_record)

    def tell(self, ended: Callable[[list[EventRecord]], None]) -> None:
        """Have each event told when it ends."""

        def told(event: EventRuns) -> None:
            parts = self.observer.parts(event)
            if parts:
                ended(parts)

        self.recorder.ended = told


class _Place:
    """Stands where the compiled code of a model stood."""

    covered = False

    def __init__(self, call: CompiledCall, watch: CompiledWatch) -> None:
        self._call = call
        self._before = call.code

        def observed(*args: Any, **kwargs: Any) -> Any:
            return watch.call(args, kwargs)

        observed.__dict__[_WATCH] = watch

        # Inside of another function that is compiled, ours stays Python, and what it calls is compiled by itself.
        self._ours = torch.compiler.disable(observed, recursive=False)  # type: ignore[no-untyped-call]
        self.one_shots = 0
        call.owner.__dict__[call.attribute] = self._ours

    def stay(self) -> None:
        """Nothing takes us out."""

    def take_out(self, watch: Watch) -> None:
        """Give the place back, where it is still ours."""
        del watch
        own = self._call.owner.__dict__
        if own.get(self._call.attribute) is self._ours:
            own[self._call.attribute] = self._before


class CompiledWatch(Watch):
    """A compiled model under observation.  Made by ``fxgrad.watch``; also a context manager."""

    def __init__(self, call: CompiledCall, options: Options, *, every: int, around: Around) -> None:
        _refuse(call, options)
        self._begin(call.owner, every, around)
        self.engine: Any = CompiledEngine(call)
        self._patched: Any = _Place(call, self)
        self._surround(around)


def _refuse(call: CompiledCall, options: Options) -> None:
    name = type(call.model).__name__
    if hasattr(call.code, _WATCH) or patched_forward_of(call.model) is not None:
        message = f"this {name} is watched already; call remove() on the first watch, or use its flow()"
        raise WatchError(message)
    if call.backend is None:
        message = (
            f"this {name} is compiled, and by which backend cannot be told; compile the original with "
            "torch.compile(model, backend='fxgrad', options={'inner': ...}) and read fxgrad.flow_of(model)"
        )
        raise WatchError(message)
    asked = {
        "statistics": (options.level, "norm"), "sites": (options.sites, "node"), "forward": (options.forward, False),
        "capture": (options.capture, "auto"),
    }  # fmt: skip
    for word, (value, can) in asked.items():
        if value != can:
            message = (
                f"{word}={value!r} cannot be had of a model that is compiled, as this {name} is; {word}={can!r} can. "
                "Watch the original, uncompiled, for the rest"
            )
            raise OptionError(message)


__all__ = ["CompiledEngine", "CompiledWatch"]
