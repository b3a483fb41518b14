"""The engine of a graph module: one instrumented graph for each kind of call, learned at its first run and then run.

Python state is baked into a graph, as with torch.fx.  What is known to matter makes a graph of its own: the structure
of the arguments, train or eval of each module, autocast; so does a module, parameter or buffer that was swapped.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxgrad.capture.captured import CallGraph
from fxgrad.capture.compare import DisagreementError, agree
from fxgrad.capture.containers import Rebuild
from fxgrad.capture.learning import LearningRun
from fxgrad.capture.proxies import around
from fxgrad.capture.symbolic import Span, refusal
from fxgrad.capture.tracing import call_key, faithful_trace, may_return_tensor, modes_of, stand_ins
from fxgrad.engine.step import Engine, Options
from fxgrad.probes.edges import EdgeNotes
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.probes.insert import compiled, insert_probes
from fxgrad.probes.probe import current, probe, put
from fxgrad.torch_support.structure import tensors_in

_KEPT = 8  # kinds of calls whose graphs are kept: train and eval, with and without an optional argument
_EDITED = "the graph was edited, and has no probe here"


@dataclass(slots=True, eq=False)
class Kind:
    """The graph for one kind of call.

    Attributes:
        key: what the graph depends on.
        modes: which modules were training, by path.
        example: arguments of this kind, without numbers.
        graph: with probes.
        spans: the calls of inlined modules.
        rebuild: gives results their container types.
        function: the code of the graph; None until it is generated.
        code: its text.
        call_graph: what the graph does, once it has run; None again after an edit.
        places: by probe, the number of its call in the call graph.
        unprobed: by site, why it has no probe.
        edited: whether a user changed the graph, which then need not do what the model does.
        checked: whether it was compared with the model's own run.
    """

    key: Any
    modes: Mapping[str, bool]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    graph: fx.Graph
    spans: list[Span]
    rebuild: Rebuild
    function: Callable[..., Any] | None = None
    code: str = ""
    call_graph: CallGraph | None = None
    places: dict[int, int] = field(default_factory=dict)
    unprobed: Mapping[int, str] = field(default_factory=dict)
    edited: bool = False
    checked: bool = False

    def learned(self, call_graph: CallGraph, numbers: Mapping[fx.Node, int]) -> None:
        """It has run: ``numbers`` says which call of the call graph each node is."""
        without = self.nodes_without_probe()
        self.call_graph = call_graph
        self.places = {n.meta["fxgrad"]["probe"]: c for n, c in numbers.items() if "probe" in n.meta.get("fxgrad", {})}
        table = call_graph.site_table
        bare = (site for node, call in numbers.items() if node in without for site in table[call])
        self.unprobed = {site: _EDITED for site in bare if site >= 0}

    def nodes_without_probe(self) -> frozenset[fx.Node]:
        """The nodes that no probe stands behind, though they may return a tensor."""
        present = {node.args[1] for node in self.graph.nodes if node.target is probe}
        return frozenset(
            node for node in self.graph.nodes
            if node.target is not probe and may_return_tensor(node)
            and node.meta.get("fxgrad", {}).get("probe") not in present
        )  # fmt: skip

    def fits(self, key: Any, modes: Mapping[str, bool]) -> bool:
        """Whether it is the graph for such a call; a module that was not there then may be in any mode."""
        return bool(self.key == key) and all(modes.get(path, mode) == mode for path, mode in self.modes.items())


class GraphEngine(Engine):
    """Runs a model by its graphs.

    Attributes:
        holder: gives the graph module that shows the graphs, if any; the code runs on it.
        shown: the kind that it shows.
        checks: whether the first run of a graph is compared with the model's own.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], options: Options) -> None:
        super().__init__(model, forward, options)
        self.holder: Callable[[], Any] = _nobody
        self.shown: Kind | None = None
        self.checks = options.capture != "symbolic"
        self._kinds: list[Kind] = []
        self._rebuilt = 0
        self._signature = inspect.signature(forward)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The graphs that are kept, latest last."""
        return tuple(self._kinds)

    def shown_by(self, module: nn.Module) -> None:
        """``module`` shows the graphs."""
        self.holder = weakref.ref(module)

    # ---- kinds of calls --------------------------------------------------------------------------------------

    def kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The graph for such a call, traced where there is none.

        Raises:
            CaptureError: the model cannot be traced faithfully; the message says why.
        """
        self.modules.refresh()
        if self.modules.rebuilt != self._rebuilt:
            self._rebuilt = self.modules.rebuilt
            self._kinds = [kind for kind in self._kinds if kind.edited]
        key, modes = call_key(args, kwargs), modes_of(self.modules)
        found = next((kind for kind in self._kinds if kind.fits(key, modes)), None)
        if found is None:
            found = self._traced(key, modes, args, kwargs)
            self.add(found)
        return found

    def add(self, kind: Kind) -> None:
        """Keep a graph; another for the same kind of call goes."""
        others = (other for other in self._kinds if other is not kind and not other.fits(kind.key, kind.modes))
        self._kinds = [*others, kind][-_KEPT:]

    def edited(self, graph: fx.Graph, function: Callable[..., Any], code: str) -> None:
        """A user changed the graph that is shown: this is its code now, and what it does is to be learned anew."""
        kind = self.shown
        if kind is not None:
            kind.graph, kind.function, kind.code = graph, function, code
            kind.edited, kind.call_graph = True, None
            self.add(kind)

    def _traced(self, key: Any, modes: Mapping[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        made = faithful_trace(self.modules, self.forward, args, kwargs, checked=self.checks)
        nodes = [node for node in made.graph.nodes if may_return_tensor(node)]
        graph = insert_probes(made.graph, {node: number for number, node in enumerate(nodes)})
        return Kind(key, modes, (stand_ins(args), stand_ins(kwargs)), graph, made.spans, made.rebuild)

    def forget_call_graphs(self) -> None:
        """Parameters were moved or cast: what the graphs do is to be learned anew."""
        for kind in self._kinds:
            kind.call_graph = None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position where they can be, so that ``gm(x)`` and ``gm(x=x)`` are one kind of call."""
        if not kwargs:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    # ---- running ---------------------------------------------------------------------------------------------

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.holder()
        if module is None:
            return self.forward(*args, **kwargs)
        args, kwargs = self._bound(args, kwargs)
        kind = self.kind_of(args, kwargs)
        self.display(kind)
        if self.checks and not (kind.checked or kind.edited):
            return self.forward(*args, **kwargs)
        return self._run(kind, args, kwargs)

    def _record(self, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._bound(args, kwargs)
        kind = self.kind_of(args, kwargs)
        self.display(kind)
        forward_record.report = self._report("symbolic", "python", _reason(kind, self.options.capture))
        if self.checks and not (kind.checked or kind.edited):
            return self._check(kind, forward_record, args, kwargs)
        if kind.call_graph is None:
            return self._learn(kind, forward_record, args, kwargs)
        forward_record.follow(kind.call_graph, kind.places)
        if self._recorders.record_for(forward_record):
            forward_record.report = dataclasses.replace(forward_record.report, recorder="native")
        forward_record.unprobed = kind.unprobed
        forward_record.escalated = frozenset(kind.call_graph.escalated)
        if forward_record.edges is not None:
            forward_record.edges = EdgeNotes(kind.call_graph.beside_edges)
        outer, current.forward_record = current.forward_record, forward_record
        try:
            return self._run(kind, args, kwargs)
        finally:
            current.forward_record = outer

    def _run(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.holder()
        if kind.function is None and module is not None:
            module.generate()  # what it shows is what runs
        if kind.function is None:
            kind.function = compiled(kind.graph)
        outer, around.grad = around.grad, torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(around.grad):  # gives the mode back, whatever the switches and errors do
                root = self.model if module is None else module
                return kind.rebuild(kind.function(root, *(tensor for _, tensor in tensors_in((args, kwargs)))))
        finally:
            around.grad = outer

    def _learn(self, kind: Kind, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph node by node, and write down what each node returned."""
        run = LearningRun(self.modules, forward_record, put, None)
        run.unprobed = kind.nodes_without_probe()
        with torch.set_grad_enabled(True):
            result, numbers = run.run_graph(kind, args, kwargs, self._names)
        kind.learned(forward_record.graph, numbers)
        forward_record.unprobed = kind.unprobed
        self._previous = forward_record.call_graph
        return result

    def _check(self, kind: Kind, forward_record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own Python under observation, and compare the graph with what it did.

        Raises:
            CaptureError: they differ; the message says where.
        """
        self._previous = None  # constants are to be written down as they are now
        report = forward_record.report
        result = self._run_python(forward_record, args, kwargs, "")
        forward_record.report = report
        try:
            numbers = agree(kind.graph, forward_record.graph)
        except DisagreementError as error:
            raise refusal(self.model, [str(error)]) from error
        kind.checked = True
        kind.learned(forward_record.graph, numbers)
        return result

    # ---- the graph module ------------------------------------------------------------------------------------

    def show(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the graph module show the graph for such a call.

        Raises:
            CaptureError: the model cannot be traced faithfully; the message says why.
        """
        self.display(self.kind_of(args, kwargs))

    def display(self, kind: Kind) -> None:
        """Have the graph module show this graph."""
        if self.shown is not kind:
            module = self.holder()
            if module is not None:
                self.shown = kind
                module.show(kind)


def _reason(kind: Kind, capture: str) -> str:
    if kind.edited:
        return "a graph module was asked for, and its graph was edited"
    if capture == "symbolic":
        return "asked for"
    return (
        "a graph module was asked for; its graph made the same calls, with the same constants, as the model's own run"
    )


def _nobody() -> None:
    return None
