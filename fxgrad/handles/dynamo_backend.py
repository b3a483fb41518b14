"""The ``torch.compile`` backend ``"fxgrad"``: function probes in the graphs of dynamo, then another backend.

``torch.compile(model, backend="fxgrad", options={"inner": "inductor"})`` observes; ``fxgrad.flow_of(model)`` reads.
Dynamo guards its graphs itself, so that a change of Python state, of shapes or of the mode makes a new graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxgrad.capture.agreement import node_word
from fxgrad.capture.calls import positional_names
from fxgrad.capture.dynamo import Fragment, fragment, join
from fxgrad.capture.modules import ModuleMap
from fxgrad.engine.assembly import assemble
from fxgrad.errors import CaptureError, NoFlowError, OptionError
from fxgrad.handles.compilable import explained
from fxgrad.probes.function import copied, fresh
from fxgrad.probes.functionalise import Facts, decide, watch_run
from fxgrad.probes.insert_function import Inserted, insert_function_probes
from fxgrad.probes.recording import Recording
from fxgrad.record.slot_recorder import KeptRuns, SlotFacts, SlotRecorder, kept_of
from fxgrad.schema import CaptureReport, GradientFlow
from fxgrad.torch_support.fake import fake_like, like
from fxgrad.torch_support.private import compiled_original, inner_compiler

_OPTIONS = ("inner",)
_REMEMBERED = 1024
_REENTRANT = "it has a reentrant checkpoint, whose gradients dynamo does not compute as torch does without it"


@dataclass(slots=True, eq=False)
class Graph:
    """One compiled graph of dynamo.

    Attributes:
        module: as dynamo gave it.
        fragment: what it does.
        inserted: the graph with probes.
        shapes: of the value at each site, by what the inputs were like.
    """

    module: fx.GraphModule
    fragment: Fragment
    inserted: Inserted
    shapes: dict[tuple[Any, ...], list[tuple[int, ...]]]

    def shapes_of(self, inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
        """Shapes for inputs like these: a graph may be made for any size, so it runs again without data."""
        if inputs not in self.shapes:
            mode, values = fake_like(inputs)
            self.shapes[inputs] = _shapes(_facts(self.module, mode, values), self.fragment)
        return self.shapes[inputs]


def _facts(gm: fx.GraphModule, mode: Any, values: Sequence[Any]) -> Facts:
    with mode, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return watch_run(gm.graph, gm, values)


def _shapes(facts: Facts, made: Fragment) -> list[tuple[int, ...]]:
    """The shape at each site, by number."""
    shapes: list[tuple[int, ...]] = [()] * made.count
    for node, numbers in made.sites.items():
        fact = facts.of[node]
        layout = fact.layout or facts.of[fact.changed[0]].layout  # an item assignment returns nothing
        for number, (shape, _, _) in zip(numbers, layout, strict=True):
            if number >= 0:
                shapes[number] = shape
    return shapes


@dataclass(slots=True, eq=False)
class GraphRun:
    """One run of a graph.

    Attributes:
        number: in the order in which runs began.
        forward: which forward it belongs to.
        graph: the graph.
        inputs: what they were like.
        links: placeholders that are tensors which an earlier run returned: that run, and the position.
    """

    number: int
    forward: int
    graph: Graph
    inputs: tuple[Any, ...]
    links: dict[int, tuple[GraphRun, int]] = field(default_factory=dict)


class Observer:
    """A backend for ``torch.compile`` that observes.

    Args:
        inner: who compiles the graphs with probes: ``"eager"``, ``"aot_eager"``, ``"inductor"`` or another backend.
    """

    def __init__(self, inner: str | Callable[..., Any] = "eager") -> None:
        self.inner = inner
        self.recorder = SlotRecorder()
        self.unobserved: list[str] = []
        self._hooked = WeakIdKeyDictionary()
        self._numbers = itertools.count()
        self._forward = 0
        self._seen: set[int] = set()
        self._events = 0
        self._left: dict[int, tuple[weakref.ref[Tensor], GraphRun, int]] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        """A new one with the same inner compiler: Lightning copies what ``torch.compile`` was given."""
        del memo
        return Observer(self.inner)

    # ---- compiling -------------------------------------------------------------------------------------------

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Take a graph of dynamo, as every backend."""
        compile_inner: Callable[..., Callable[..., Any]] = inner_compiler(self.inner)
        if not torch.is_grad_enabled():
            return compile_inner(gm, example_inputs)
        try:
            graph = self._observed(gm, example_inputs)
        except Exception as error:  # noqa: BLE001  # a graph that cannot be run without data is compiled as it is
            self.unobserved.append(f"a graph of {len(gm.graph.nodes)} nodes: {type(error).__name__}: {error}")
            return compile_inner(gm, example_inputs)
        if not graph.inserted.size:
            return compile_inner(gm, example_inputs)
        self._hook(example_inputs)
        made = fx.GraphModule(gm, graph.inserted.graph)
        slots = torch.zeros(graph.inserted.size, dtype=torch.float64, requires_grad=True)
        return self._runner(graph, compile_inner(made, [slots, *example_inputs]))

    def _observed(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        if any(node.kwargs.get("use_reentrant") for node in gm.graph.nodes):
            raise CaptureError(_REENTRANT)
        likes = tuple(map(like, inputs))
        facts = _facts(gm, *fake_like(likes))
        owned = [isinstance(value, nn.Parameter) or _is_buffer(node) for node, value in zip(
            (n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True)]  # fmt: skip
        made = fragment(gm.graph, facts.of, inputs, owned)
        decisions = decide(gm.graph, facts, node_word_or_nothing)
        copy = fresh if self.inner == "eager" else copied
        inserted = insert_function_probes(gm.graph, facts, decisions, made.sites, copy)
        return Graph(gm, made, inserted, {likes: _shapes(facts, made)})

    def _hook(self, inputs: Sequence[Any]) -> None:
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in self._hooked:
                number = self._hooked[tensor] = len(self._hooked)
                tensor.register_hook(self.recorder.hook(self.recorder.parameters, number))  # type: ignore[no-untyped-call]
        self.recorder.parameters.expected = len(self._hooked)

    # ---- running ---------------------------------------------------------------------------------------------

    def _runner(self, graph: Graph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            device = next((t.device for t in tensors), torch.device("cpu"))
            slots = torch.zeros(graph.inserted.size, dtype=torch.float64, device=device, requires_grad=True)
            this = self._begin(graph, args)
            result = compiled(slots, *args)
            self.recorder.expect(this, slots)
            self._end(this, result)
            return result

        return torch.compiler.disable(run)  # type: ignore[no-any-return, no-untyped-call]

    def _begin(self, graph: Graph, args: Sequence[Any]) -> GraphRun:
        self.recorder.settle()
        with self._lock:
            links: dict[int, tuple[GraphRun, int]] = {}
            for number, arg in enumerate(args):
                found = self._left.get(id(arg)) if isinstance(arg, Tensor) else None
                if found is not None and found[0]() is arg and graph.fragment.inputs[number] is not None:
                    links[number] = (found[1], found[2])
            linked = any(run.forward == self._forward for run, _ in links.values())
            if not linked and (id(graph) in self._seen or self.recorder.begun != self._events):
                self._forward += 1  # a graph that runs again, or after a backward pass, begins a forward
                self._seen.clear()
            self._events = self.recorder.begun
            self._seen.add(id(graph))
        return GraphRun(next(self._numbers), self._forward, graph, tuple(map(like, args)), links)

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
        self.recorder.settle()
        modules = ModuleMap(model)
        own = {id(parameter) for parameter in model.parameters()}
        made: list[GradientFlow] = []
        for event in reversed(self.recorder.history):
            made = [*self._flows(event, modules, own), *made]
            if latest and made:
                break
        return made

    def _flows(self, event: KeptRuns, modules: ModuleMap, own: set[int]) -> list[GradientFlow]:
        arrived = {id(run): slots for run, slots in event.runs}
        chosen = _of_model([run for run, _ in event.runs], own)
        forwards: dict[int, list[GraphRun]] = {}
        for run in sorted(chosen, key=lambda r: r.number):
            forwards.setdefault(run.forward, []).append(run)
        return [self._flow(event, runs, arrived, modules) for runs in forwards.values()]

    def _flow(
        self, event: KeptRuns, runs: list[GraphRun], arrived: Mapping[int, Tensor], modules: ModuleMap
    ) -> GradientFlow:
        place = {id(run): index for index, run in enumerate(runs)}
        links = [{n: (place[id(o)], p) for n, (o, p) in run.links.items() if id(o) in place} for run in runs]
        fragments = [run.graph.fragment for run in runs]
        joined = join(list(zip(fragments, links, strict=True)), modules, positional_names(modules.root.forward))
        root = modules.root
        recording: Any = Recording(None, runs[0].forward, 0)
        recording.plan = joined.plan
        recording.shapes = _joined_shapes(runs, joined.numbers)
        recording.not_required = {n for n, s in enumerate(joined.plan.sites) if not s.output.requires_grad}
        inner = self.inner if isinstance(self.inner, str) else getattr(self.inner, "__name__", "a function")
        reason = f"compiled by dynamo into {len(runs)} graph(s), run by {inner}"
        recording.report = CaptureReport(
            "dynamo", reason, type(root).__name__, root.training, torch.__version__,
            tuple(("dynamo", why) for why in self.unobserved), recorder="slots",
        )  # fmt: skip
        hooked = {id(p): self._hooked[p] if p in self._hooked else -1 for _, p in modules.parameters}  # noqa: SIM401  # untyped
        unseen = itertools.count(len(self._hooked))
        recording.parameters = [
            (n if (n := hooked[id(p)]) >= 0 else next(unseen), names, p) for names, p in modules.parameters
        ]
        slots, slot_of, unprobed = _together(runs, arrived, joined.numbers)
        kept = kept_of(recording, slots, SlotFacts(len(joined.plan.sites), slot_of, recording.shapes))
        kept.event, kept.parameters = event.number, event.parameters
        return explained(assemble(kept, "the caller's own backward pass", "norm"), unprobed)


def _joined_shapes(runs: Sequence[GraphRun], numbers: Sequence[Mapping[int, int]]) -> list[tuple[int, ...]]:
    """The shape at each site of the joined plan."""
    found: dict[int, tuple[int, ...]] = {}
    for run, of in zip(runs, numbers, strict=True):
        shapes = run.graph.shapes_of(run.inputs)
        found.update({site: shapes[local] for site, local in of.items()})
    return [found[site] for site in range(len(found))]


def _together(
    runs: Sequence[GraphRun], arrived: Mapping[int, Tensor], numbers: Sequence[Mapping[int, int]]
) -> tuple[Tensor, dict[int, int], dict[int, str]]:
    """The slots of all runs in a row, the slot of each site of the joined plan, and the sites without a probe."""
    parts: list[Tensor] = []
    slot_of: dict[int, int] = {}
    unprobed: dict[int, str] = {}
    start = 0
    for run, of in zip(runs, numbers, strict=True):
        inserted = run.graph.inserted
        slots = arrived.get(id(run))
        parts.append(torch.zeros(inserted.size, dtype=torch.float64) if slots is None else slots.to("cpu"))
        for site, local in of.items():
            if local in inserted.slot_of:
                slot_of[site] = start + inserted.slot_of[local]
            elif local in inserted.unprobed:
                unprobed[site] = inserted.unprobed[local]
        start += inserted.size
    return torch.cat(parts), slot_of, unprobed


def _of_model(runs: Sequence[GraphRun], own: set[int]) -> list[GraphRun]:
    """Runs that use a parameter of the model, and runs without parameters that such runs are linked with."""
    chosen: dict[int, GraphRun] = {}
    bare: list[GraphRun] = []
    for run in runs:
        used = {id(p) for r in run.graph.fragment.parameters.values() if isinstance(p := r(), nn.Parameter)}
        if used & own:
            chosen[id(run)] = run
        elif not used:
            bare.append(run)
    for _ in bare:  # from neighbour to neighbour
        before = {id(o) for run in chosen.values() for o, _ in run.links.values()}
        for run in bare:
            if id(run) in before or any(id(o) in chosen for o, _ in run.links.values()):
                chosen[id(run)] = run
    return list(chosen.values()) if own else list(runs)


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
