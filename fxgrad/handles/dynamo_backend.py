"""The ``torch.compile`` backend ``"fxgrad"``: function probes in the graphs of dynamo, then another backend.

``torch.compile(model, backend="fxgrad", options={"inner": "inductor"})`` observes; ``fxgrad.flow_of(model)`` reads.
Dynamo guards its graphs itself, so that a change of Python state, of shapes or of the mode makes a new graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxgrad.capture.calls import positional_names
from fxgrad.capture.compare import node_word
from fxgrad.capture.dynamo import fragment, join
from fxgrad.capture.modules import ModuleMap
from fxgrad.engine.slot_assembly import SlotRun, assemble_slots
from fxgrad.errors import CaptureError, NoFlowError, OptionError
from fxgrad.handles.dynamo_runs import (
    Binding,
    Graph,
    GraphRun,
    Refused,
    facts_of_run,
    joined_shapes,
    of_model,
    shapes_by_site,
    together,
)
from fxgrad.probes.function import copied, fresh
from fxgrad.probes.functionalise import decide
from fxgrad.probes.insert_function import insert_function_probes
from fxgrad.record.recorder import HISTORY, EventRecord
from fxgrad.record.slot_recorder import EventRuns, SlotRecorder
from fxgrad.schema import CaptureReport, GradientFlow
from fxgrad.torch_support.fake import fake_like, like
from fxgrad.torch_support.private import compiled_original, forget_empty_hooks, inner_compiler
from fxgrad.torch_support.private_skipping import leave_to_python

_OPTIONS = ("inner",)
_REMEMBERED = 1024
_REENTRANT = "it has a reentrant checkpoint, whose gradients dynamo does not compute as torch does without it"


class _SlotRecorder(SlotRecorder):
    """Keeps each event with the graphs and parameters that it went through, so that no model pushes another's out."""

    def keep(self, event: EventRuns) -> None:
        """An event has ended."""
        for binding in {run.binding for run, _ in event.runs}:
            binding.events.append(event)


class Observer:
    """A backend for ``torch.compile`` that observes.

    Args:
        inner: who compiles the graphs with probes: ``"eager"``, ``"aot_eager"``, ``"inductor"`` or another backend.
    """

    def __init__(self, inner: str | Callable[..., Any] = "eager") -> None:
        leave_to_python()
        self.inner = inner
        self.recorder = _SlotRecorder()
        self.refused: list[Refused] = []
        self.accumulating: dict[int, bool | None] = {}  # by forward call, where it was noted
        self._hooked = WeakIdKeyDictionary()
        self._handles = WeakIdKeyDictionary()
        self._bindings: list[Binding] = []
        self._numbers = itertools.count()
        self._parameter_numbers = itertools.count()
        self._forward = 0
        self._seen: set[Graph] = set()
        self._events = 0
        self._left: dict[int, tuple[weakref.ref[Tensor], GraphRun, int]] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        """A new one with the same inner compiler: Lightning copies what ``torch.compile`` was given."""
        del memo
        return Observer(self.inner)

    @property
    def unobserved(self) -> list[str]:
        """Why graphs could not be observed."""
        return [one.reason for one in self.refused]

    # ---- compiling -------------------------------------------------------------------------------------------

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Take a graph of dynamo, as every backend."""
        compile_inner: Callable[..., Callable[..., Any]] = inner_compiler(self.inner)
        if not torch.is_grad_enabled():
            return compile_inner(gm, example_inputs)
        try:
            graph = self._observed(gm, example_inputs)
        except Exception as error:  # noqa: BLE001  # a graph that cannot be run without data is compiled as it is
            reason = f"a graph of {len(gm.graph.nodes)} nodes: {type(error).__name__}: {error}"
            owners: list[Tensor] = [value for value in example_inputs if isinstance(value, nn.Parameter)]
            self.refused.append(Refused(reason, tuple(map(weakref.ref, owners))))
            return compile_inner(gm, example_inputs)
        if not graph.inserted.size:
            return compile_inner(gm, example_inputs)
        made = fx.GraphModule(gm, graph.inserted.graph)
        slots = torch.zeros(graph.inserted.size, dtype=torch.float64, requires_grad=True)
        return self._runner(graph, compile_inner(made, [slots, *example_inputs]))

    def _observed(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        if any(node.kwargs.get("use_reentrant") for node in gm.graph.nodes):
            raise CaptureError(_REENTRANT)
        likes = tuple(map(like, inputs))
        facts = facts_of_run(gm, *fake_like(likes))
        owned = [isinstance(value, nn.Parameter) or _is_buffer(node) for node, value in zip(
            (n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True)]  # fmt: skip
        made = fragment(gm.graph, facts.of, inputs, owned)
        decisions = decide(gm.graph, facts, node_word_or_nothing)
        copy = fresh if self.inner == "eager" else copied
        inserted = insert_function_probes(gm.graph, facts, decisions, made.sites, copy)
        return Graph(gm, made, inserted, {likes: shapes_by_site(facts, made)})

    def _hook(self, inputs: Iterable[Any]) -> None:
        """Hook the parameters among them.  A number is never given twice, so that nothing is taken for another."""
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in self._handles:
                if tensor not in self._hooked:
                    self._hooked[tensor] = next(self._parameter_numbers)
                    self.recorder.parameters.expected = self._hooked[tensor] + 1
                hook = self.recorder.hook(self.recorder.parameters, self._hooked[tensor])
                self._handles[tensor] = tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off the parameters; the next run puts them back."""
        for parameter, handle in tuple(self._handles.items()):  # type: ignore[no-untyped-call]
            handle.remove()
            forget_empty_hooks(parameter)
        self._handles.clear()

    # ---- running ---------------------------------------------------------------------------------------------

    def _runner(self, graph: Graph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            device = next((t.device for t in tensors), torch.device("cpu"))
            slots = torch.zeros(graph.inserted.size, dtype=torch.float64, device=device, requires_grad=True)
            this = self._begin(graph, args)
            result = compiled(slots, *args)
            self.recorder.expect(this, slots, result)
            self._end(this, result)
            return result

        return torch.compiler.disable(run)  # type: ignore[no-any-return, no-untyped-call]

    def _begin(self, graph: Graph, args: Sequence[Any]) -> GraphRun:
        self.recorder.close_events()
        with self._lock:
            links: dict[int, tuple[GraphRun, int]] = {}
            for number, arg in enumerate(args):
                found = self._left.get(id(arg)) if isinstance(arg, Tensor) else None
                if found is not None and found[0]() is arg and graph.fragment.inputs[number] is not None:
                    links[number] = (found[1], found[2])
            linked = any(run.forward == self._forward for run, _ in links.values())
            if not linked and (graph in self._seen or self.recorder.begun != self._events):
                self._forward += 1  # a graph that runs again, or after a backward pass, begins a forward
                self._seen.clear()
            self._events = self.recorder.begun
            self._seen.add(graph)
            binding, new = graph.bind(args)
            if new:
                self._bindings = [*(one for one in self._bindings if one.alive), binding]
        self._hook(binding.present().values())
        return GraphRun(next(self._numbers), self._forward, graph, binding, tuple(map(like, args)), links)

    def _end(self, this: GraphRun, result: Any) -> None:
        with self._lock:
            if len(self._left) > _REMEMBERED:
                self._left = {key: entry for key, entry in self._left.items() if entry[0]() is not None}
            for position, value in enumerate(result if isinstance(result, (tuple, list)) else ()):
                if isinstance(value, Tensor):
                    self._left[id(value)] = (weakref.ref(value), this, position)

    # ---- reading ---------------------------------------------------------------------------------------------

    def flows(self, model: nn.Module, *, latest: bool = False) -> list[GradientFlow]:
        """The flows of the kept events that ran through ``model``, oldest first."""
        self.recorder.close_events()
        modules = ModuleMap(model)
        own = {id(parameter) for parameter in model.parameters()}
        made: list[GradientFlow] = []
        for event in reversed(self._events_of(own)):
            found = [part.flow for part in self._parts(event, modules, own) if part.flow is not None]
            made = [*found, *made]
            if latest and made:
                break
        return made

    def _events_of(self, own: set[int]) -> list[EventRuns]:
        """The latest events that went through graphs with these parameters, oldest first; all where there are none."""
        bindings = [b for b in self._bindings if not own or own & set(map(id, b.present().values()))]
        found = dict.fromkeys(event for binding in bindings for event in tuple(binding.events))
        return sorted(found, key=lambda event: event.number)[-HISTORY:]

    def _parts(self, event: EventRuns, modules: ModuleMap, own: set[int]) -> list[EventRecord]:
        arrived = {id(run): slots for run, slots in event.runs}
        chosen = of_model([run for run, _ in event.runs], own)
        forwards: dict[int, list[GraphRun]] = {}
        for run in sorted(chosen, key=lambda r: r.number):
            forwards.setdefault(run.forward, []).append(run)
        return [self._part(event, runs, arrived, modules) for runs in forwards.values()]

    def _part(
        self, event: EventRuns, runs: list[GraphRun], arrived: Mapping[int, Tensor], modules: ModuleMap
    ) -> EventRecord:
        place = {id(run): index for index, run in enumerate(runs)}
        links = [{n: (place[id(o)], p) for n, (o, p) in run.links.items() if id(o) in place} for run in runs]
        parts = [(r.graph.fragment, of, r.binding.present()) for r, of in zip(runs, links, strict=True)]
        joined = join(parts, modules, positional_names(modules.root.forward))
        sites = joined.call_graph.sites
        slots, slot_of, unprobed = together(runs, arrived, joined.numbers)
        return assemble_slots(event, SlotRun(
            runs[0].forward, joined.call_graph, self._report(modules, len(runs)), self._listed(modules),
            joined_shapes(runs, joined.numbers), {n for n, s in enumerate(sites) if not s.output.requires_grad},
            slots, slot_of, unprobed, self.accumulating.get(runs[0].forward),
        ))  # fmt: skip

    def _report(self, modules: ModuleMap, graphs: int) -> CaptureReport:
        inner = self.inner if isinstance(self.inner, str) else getattr(self.inner, "__name__", "a function")
        own = {id(parameter) for _, parameter in modules.parameters}
        return CaptureReport(
            "dynamo", f"compiled by dynamo into {graphs} graph(s), run by {inner}", type(modules.root).__name__,
            modules.root.training, torch.__version__,
            tuple(("dynamo", one.reason) for one in self.refused if one.concerns(own)), recorder="slots",
        )  # fmt: skip

    def _listed(self, modules: ModuleMap) -> list[tuple[int, tuple[str, ...], Tensor]]:
        """The parameters with their numbers; those without a hook get a number that nothing was written to."""
        unseen = itertools.count(self.recorder.parameters.expected)
        return [(self._hooked[p] if p in self._hooked else next(unseen), names, p) for names, p in modules.parameters]


def node_word_or_nothing(node: fx.Node) -> str:
    """The op word of a node that has one."""
    return node_word(node) if node.op in ("call_function", "call_method") else ""


def _is_buffer(node: fx.Node) -> bool:
    """Whether dynamo says that a placeholder is a module's buffer."""
    return "_buffers[" in str(getattr(getattr(node.meta.get("grapharg"), "source", None), "name", ""))


# ---- for the name "fxgrad" -------------------------------------------------------------------------------------

_observers: dict[Any, Observer] = {}  # one per inner compiler; they hold no model, parameter or gradient


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
            mode: str | None = None) -> Callable[..., Any]:  # fmt: skip
    """What ``torch.compile(model, backend="fxgrad")`` calls for each graph.

    Args:
        gm: a graph of dynamo.
        example_inputs: its inputs.
        options: ``{"inner": name or backend}`` says who compiles the graph with probes; ``"eager"`` by default.
        mode: not supported; pass a backend with its own options as ``inner``.

    Raises:
        OptionError: an option has an unknown name, or a mode was asked for.
    """
    unknown = [name for name in options or {} if name not in _OPTIONS]
    if unknown or mode is not None:
        what = f"option {unknown[0]!r}" if unknown else f"mode={mode!r}"
        message = f"the backend 'fxgrad' does not know {what}; it takes options={{'inner': 'inductor'}}"
        raise OptionError(message)
    inner = (options or {}).get("inner", "eager")
    if inner not in _observers:
        _observers[inner] = Observer(inner)
    return _observers[inner](gm, example_inputs)


def flow_of(model: nn.Module) -> GradientFlow:
    """The latest flow of a model whose calls were compiled with ``backend="fxgrad"``.

    Args:
        model: the compiled model, or the original inside of it.

    Raises:
        NoFlowError: no backward pass has run through graphs with this model's parameters.
        CaptureError: ``model`` has no parameters by which its graphs could be found.
    """
    original = compiled_original(model) or model
    if not any(True for _ in original.parameters()):
        message = f"{type(original).__name__} has no parameters to find its graphs by; use fxgrad.gradient_flow"
        raise CaptureError(message)
    found = [flow for observer in list(_observers.values()) for flow in observer.flows(original, latest=True)[-1:]]
    if not found:
        message = (
            f"no gradient flow of {type(original).__name__} is recorded yet: compile it with "
            "torch.compile(model, backend='fxgrad'), call it with gradients enabled and run backward()"
        )
        raise NoFlowError(message)
    return max(found, key=lambda flow: flow.event.backward)


def measured_once(model: nn.Module, step: Callable[[Callable[..., Any]], str]) -> GradientFlow:
    """The flow of one ``step``, which is given what to call instead of ``model`` and returns the loss in words.

    Raises:
        CaptureError: dynamo does not take the model, or nothing of it could be observed.
    """
    refuse_for_dynamo(model)
    observer = Observer("eager")
    words = step(torch.compile(model, backend=observer))
    found = observer.flows(model, latest=True)
    if not found or any(_REENTRANT in reason for reason in observer.unobserved):
        why = "; ".join(observer.unobserved) or "no gradient reached a graph that dynamo made"
        message = f"nothing of {type(model).__name__} could be observed through dynamo: {why}; use capture='eager'"
        raise CaptureError(message)
    return dataclasses.replace(found[-1], event=dataclasses.replace(found[-1].event, loss=words))


def refuse_for_dynamo(model: nn.Module) -> None:
    """Raise for modules that dynamo leaves to Python, so that their values could not be seen.

    Raises:
        CaptureError: the model has a recurrent module of torch.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            message = (
                f"dynamo does not take {path or 'the model'} ({type(module).__name__}): it breaks the graph there; "
                "use capture='eager'"
            )
            raise CaptureError(message)


__all__ = ["Observer", "backend", "flow_of", "measured_once"]
