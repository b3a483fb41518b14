"""What ``fxgrad.instrument(model, engine="function")`` returns: a graph module for ``torch.compile``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.calls import positional_names
from fxgrad.capture.captured import CallGraph
from fxgrad.capture.compare import DisagreementError, agree, node_word
from fxgrad.capture.eager import Session
from fxgrad.capture.learning import LearningRun
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.symbolic import Trace, refusal
from fxgrad.capture.tracing import call_key, faithful_trace, modes_of
from fxgrad.engine.slot_assembly import SlotRun, assemble_slots
from fxgrad.errors import CaptureError, NoFlowError
from fxgrad.handles.watching import refuse_unwatchable
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.probes.functionalise import decide, watch_run
from fxgrad.probes.insert import compiled
from fxgrad.probes.insert_function import Inserted, insert_function_probes
from fxgrad.record.parameters import ParameterHooks
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slot_recorder import EventRuns, SlotRecorder
from fxgrad.schema import CaptureReport, GradientFlow, History
from fxgrad.torch_support.fake import FakeModel, fake_like, like
from fxgrad.torch_support.private import functorch_active, has_hooks
from fxgrad.torch_support.streams import random_streams
from fxgrad.torch_support.structure import tensors_in

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_KINDS = 64  # kinds of calls whose shapes are kept
_OTHER_WAY = "torch.compile(model, backend='fxgrad') takes models that cannot be traced; fxgrad.watch takes any model"


@dataclass(slots=True, eq=False)
class Ready:
    """A graph with function probes, for calls of one kind."""

    key: Any
    trace: Trace
    call_graph: CallGraph
    inserted: Inserted
    function: Callable[..., Any]


@dataclass(slots=True, eq=False)
class Run:
    """One call: what its flow needs besides the slots."""

    number: int
    ready: Ready
    report: CaptureReport
    parameters: list[tuple[int, tuple[str, ...], Tensor]]
    flags: tuple[bool, ...]
    args: list[tuple[Any, ...]]


@dataclass(slots=True)
class _Prepared:
    run: Run
    slots: Tensor
    tensors: list[Tensor]


class Capturer:
    """Makes graphs with function probes of one model, and runs it without data."""

    def __init__(self, model: nn.Module, capture: str) -> None:
        self.model = model
        self.modules = ModuleMap(model)
        self.names = positional_names(model.forward)
        self.checks = capture != "symbolic"
        self._ready: list[Ready] = []
        self._sites: dict[Any, tuple[list[tuple[int, ...]], set[int]]] = {}

    def ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
        """The graph for a call with these arguments.

        Raises:
            CaptureError: the model cannot be traced faithfully; the message says why.
        """
        if self.modules.refresh():
            self._ready = []
        key = (call_key(args, kwargs), modes_of(self.modules))
        for ready in self._ready:
            if ready.key == key:
                return ready
        try:
            made = self._make(key, args, kwargs)
        except CaptureError as error:
            message = str(error)
            raise CaptureError(message if _OTHER_WAY in message else f"{message}. {_OTHER_WAY}") from error
        self._ready = [*self._ready, made][-4:]
        return made

    def _make(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
        made = faithful_trace(self.modules, self.model.forward, args, kwargs, checked=self.checks)
        with random_streams(fake=True):
            fake = FakeModel(self.model)
            if self.checks:
                call_graph = self._eager(fake, args, kwargs)
                try:
                    numbers = agree(made.graph, call_graph)
                except DisagreementError as error:
                    raise refusal(self.model, [str(error)]) from error
            else:
                call_graph, numbers = self._traced(FakeModel(self.model), made, args, kwargs)
            inserted = self._insert(fake, made, call_graph, numbers, (args, kwargs))
        return Ready(key, made, call_graph, inserted, compiled(inserted.graph))

    def _eager(self, fake: FakeModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallGraph:
        forward_record = ForwardRecord(None, 0, 0)
        session = Session(ModuleMap(fake.model), forward_record, _no_hook, None)
        given, named = fake.arguments((args, kwargs))
        self._without_data(fake, lambda: session.run(fake.model.forward, given, named, self.names))
        return forward_record.graph

    def _traced(
        self, fake: FakeModel, made: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallGraph, dict[fx.Node, int]]:
        forward_record = ForwardRecord(None, 0, 0)
        run = LearningRun(ModuleMap(fake.model), forward_record, _no_hook, None)
        given, named = fake.arguments((args, kwargs))
        _, numbers = self._without_data(fake, lambda: run.run_graph(made, given, named, self.names))
        return forward_record.graph, numbers

    def _without_data(self, fake: FakeModel, call: Callable[[], Any]) -> Any:
        try:
            with fake.running():
                return call()
        except Exception as error:
            message = (
                f"{type(self.model).__name__} cannot be run without data to see which values it makes: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
            raise CaptureError(message) from error

    def _insert(
        self, fake: FakeModel, made: Trace, call_graph: CallGraph, numbers: dict[fx.Node, int], given: Any
    ) -> Inserted:
        graph = made.graph
        values = [tensor for _, tensor in tensors_in(fake.arguments(given))]
        facts = self._without_data(fake, lambda: watch_run(graph, fake.model, values))
        types = {place.path: place.type for place in self.modules.places.values()}
        decisions = decide(graph, facts, lambda node: _word(node, types))
        table = call_graph.probe_table
        return insert_function_probes(graph, facts, decisions, {n: table[c] for n, c in numbers.items()})

    def sites(self, run: Run) -> tuple[list[tuple[int, ...]], set[int]]:
        """Shape of each site in a run, and the sites whose value required no gradient then."""
        kind = (run.ready, run.flags, tuple(run.args))
        if kind not in self._sites:
            if len(self._sites) >= _KINDS:
                self._sites.clear()
            self._sites[kind] = self._learn_sites(run)
        return self._sites[kind]

    def _learn_sites(self, run: Run) -> tuple[list[tuple[int, ...]], set[int]]:
        call_graph = run.ready.call_graph
        fake = FakeModel(self.model)
        for parameter, flag in zip(fake.model.parameters(), run.flags, strict=True):
            parameter.requires_grad_(flag)
        forward_record = ForwardRecord(None, 0, 0)
        learning = LearningRun(ModuleMap(fake.model), forward_record, _no_hook, None)
        _, values = fake_like(run.args, fake.mode)
        with random_streams(fake=True), fake.running():
            learning.run_graph(run.ready.trace, tuple(values), {}, self.names)
        made = forward_record.graph
        shapes = [tuple(shape) for shape in forward_record.shapes]
        if len(made.sites) != len(call_graph.sites):
            return [spec.output.shape for spec in call_graph.sites], set()
        return shapes, forward_record.not_required


def _no_hook(forward_record: object, value: object, site: int) -> None:
    """No backward pass follows a run without data."""


def _word(node: fx.Node, types: dict[str, str]) -> str:
    if node.op == "call_module":
        return types.get(str(node.target), "")
    return node_word(node) if node.op in ("call_function", "call_method") else ""


class Compilable(fx.GraphModule):
    """A model with function probes, made for ``torch.compile(..., fullgraph=True)``; it runs without a compiler too.

    Parameters, buffers and submodules are the model's own objects.  The first call with arguments of one structure
    traces the model, with Python state baked in.  Each call brings a small leaf tensor, whose gradient is the
    statistics, so that events are never added up; it is no parameter, no buffer, and nothing that an optimizer sees.
    """

    _observer: _Observer

    def __init__(self, model: nn.Module, capture: str) -> None:
        refuse_unwatchable(model)
        graph = fx.Graph()
        graph.output(None)
        super().__init__(model, graph, class_name=type(model).__name__)
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["training"] = model.training
        self.__dict__["_observer"] = _Observer(model, capture)
        self.__dict__["_compiled_call"] = None

    # ---- the call --------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Regenerate the code of the graph, which is for reading."""
        code = super().recompile()
        kind: Any = type(self)
        kind.forward = _forward
        kind.__call__ = _CALL
        return code

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``nn.Module.compile``: calls of this module run compiled from now on."""
        self.__dict__["_compiled_call"] = torch.compile(_RUN.__get__(self), *args, **kwargs)

    def train(self, mode: bool = True) -> Compilable:  # noqa: FBT001, FBT002  # nn.Module's own signature
        """Set training mode, on the model too."""
        super().train(mode)
        observer = self.__dict__.get("_observer")
        if observer is not None:
            observer.model.training = mode
        return self

    # ---- reading ---------------------------------------------------------------------------------------------

    def flow(self) -> GradientFlow:
        """The flow of the latest backward event; copies its statistics to the host, once.

        Raises:
            NoFlowError: no backward pass has run through a call yet.
        """
        found = self._observer.flows(latest=True)
        if not found:
            message = (
                f"no gradient flow of {type(self._observer.model).__name__} is recorded yet: call the module with "
                "gradients enabled and run backward() first (torch.autograd.grad does not reach the slots)"
            )
            raise NoFlowError(message)
        return found[-1]

    @property
    def history(self) -> History:
        """The flows of the latest backward events (at most 128), oldest first."""
        return History(self._observer.flows())

    def remove(self) -> None:
        """Take the hooks off the parameters; calls run the model plainly from now on."""
        self._observer.close()

    # ---- copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Compilable:
        """The same pass on a deep copy of the model."""
        made = Compilable(copy.deepcopy(self._observer.model, memo), self._observer.capture)
        memo[id(self)] = made
        return made

    def __copy__(self) -> Compilable:
        """The same pass on the same model, with a recorder of its own."""
        return Compilable(self._observer.model, self._observer.capture)

    def __reduce__(self) -> Any:
        """The model and the options: the pass is run again where it is loaded."""
        return Compilable, (self._observer.model, self._observer.capture)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As ``__reduce__``, for every protocol."""
        del protocol
        return self.__reduce__()


class _Observer:
    """Prepares calls and keeps what came of them."""

    def __init__(self, model: nn.Module, capture: str) -> None:
        self.model = model
        self.capture = capture
        self.recorder = SlotRecorder()
        self.parameters = ParameterHooks(self.recorder)  # type: ignore[arg-type]
        self.capturer = Capturer(model, capture)
        self._numbers = itertools.count()

    def prepare(self, owner: Compilable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Prepared | None:
        if not self.recorder.on or not torch.is_grad_enabled() or functorch_active():
            return None
        self.recorder.close_events()
        ready = self.capturer.ready(args, kwargs)
        if ready.inserted.graph is not owner.graph:
            owner.graph = ready.inserted.graph
        listed = self.parameters.refresh(self.capturer.modules.parameters)
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        report = CaptureReport(
            "symbolic", "a graph module for torch.compile was asked for", type(self.model).__name__,
            self.model.training, torch.__version__, recorder="slots",
        )  # fmt: skip
        run = Run(
            next(self._numbers), ready, report, listed, tuple(p.requires_grad for p in self.model.parameters()),
            [like(tensor) for tensor in tensors],
        )  # fmt: skip
        device = next((p.device for _, _, p in listed), tensors[0].device if tensors else torch.device("cpu"))
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return _Prepared(run, torch.zeros(ready.inserted.size, dtype=dtype, device=device, requires_grad=True), tensors)

    def finish(self, prepared: _Prepared, returned: Any) -> Any:
        self.recorder.expect(prepared.run, prepared.slots, returned)
        return prepared.run.ready.trace.rebuild(returned)

    def close(self) -> None:
        self.recorder.close_events()
        self.recorder.on = False
        self.parameters.remove()

    def flows(self, *, latest: bool = False) -> list[GradientFlow]:
        self.recorder.close_events()
        events = list(self.recorder.history)[-1:] if latest else list(self.recorder.history)
        for event in events:
            if event.parts is None:
                event.parts = self._assembled(event)
        return [part.flow for event in events for part in event.parts or () if part.flow is not None]

    def _assembled(self, event: EventRuns) -> list[EventRecord]:
        return [self._flow(event, run, slots) for run, slots in sorted(event.runs, key=lambda entry: entry[0].number)]

    def _flow(self, event: EventRuns, run: Run, slots: Tensor) -> EventRecord:
        shapes, not_required = self.capturer.sites(run)
        inserted = run.ready.inserted
        return assemble_slots(event, SlotRun(
            run.number, run.ready.call_graph, run.report, run.parameters, shapes, not_required, slots, inserted.slot_of,
            inserted.unprobed,
        ))  # fmt: skip


# ---- the call, outside of what is compiled ---------------------------------------------------------------------


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _prepare(self: Compilable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Prepared | None:
    prepared: _Prepared | None = self._observer.prepare(self, args, kwargs)
    return prepared


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _finish(self: Compilable, prepared: _Prepared, returned: Any) -> Any:
    return self._observer.finish(prepared, returned)


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def _run(self: Compilable, *args: Any, **kwargs: Any) -> Any:
    """One call.  This frame stays Python under ``torch.compile``; the graph's own function is what gets compiled."""
    prepared = _prepare(self, args, kwargs)
    model = self._observer.model
    if prepared is None:
        return model.forward(*args, **kwargs)
    returned = prepared.run.ready.function(model, prepared.slots, *prepared.tensors)
    return _finish(self, prepared, returned)


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def _call(self: Compilable, *args: Any, **kwargs: Any) -> Any:
    compiled_call = self.__dict__["_compiled_call"]
    if has_hooks(self):
        return nn.Module.__call__(self, *args, **kwargs)
    return _RUN(self, *args, **kwargs) if compiled_call is None else compiled_call(*args, **kwargs)


def _forward(self: Compilable, *args: Any, **kwargs: Any) -> Any:
    """The forward of a compilable model."""
    compiled_call = self.__dict__["_compiled_call"]
    return _RUN(self, *args, **kwargs) if compiled_call is None else compiled_call(*args, **kwargs)


_CALL: Any = _call
_RUN: Any = _run
