"""One instrumented forward call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.probes.edges import EdgeNotes
from fxgrad.probes.probe import put
from fxgrad.record.loss import look_at_the_loss
from fxgrad.torch_support.private import without_torch_function
from fxgrad.torch_support.private_passes import versions_of
from fxgrad.torch_support.structure import tensors_in

if TYPE_CHECKING:
    from fxgrad.capture.captured import CallGraph
    from fxgrad.record.native import Written
    from fxgrad.record.recorder import Part


class ForwardRecord:
    """Takes probes during one forward call and gradients during its backward passes.

    Attributes:
        sink: what hooks call.
        number: of the forward call since watching began.
        shapes: of the value at each site, in site order.
        not_required: sites whose value required no gradient in this call.
        unmeasurable: sites whose hook cannot tell the value's gradient (views of memory changed in place).
        call_graph: the graph of the call, set when the forward has returned.
        report: which front end ran, and why.
        parameters: the model's parameters at this call, as (number, names, tensor).
        expected: how many slots to prepare.
        leaves: the hooks on leaf tensors, which outlive the call.
        computed: whether any value but a leaf has a hook.
        differentiated: whether a backward pass through the call was itself recorded by autograd (``create_graph``).
        same: sites whose value is the very tensor of an earlier site, with that site, whose hook serves both.
        edges: where values are in the autograd graph; None where edges are not measured.
        unprobed: sites that nobody put a probe at, with the reason.
        rewriting: the rewrite rules of this call, which then put the hooks; None without rules.
        window: what rules at parameters do from this call to the next; None without such rules.
        partial: gives the graph of the calls so far, while the model's own Python runs.
        values: measures the values in the forward pass; None where they are not asked for.
        accumulating: whether a parameter had a gradient when the forward began; None where unknown.
        slots: by slot of the native recorder, the sites that it is; None where Python hooks write.
        sizes: of the values behind the slots.
        deviation: how the call left the courses that the native recorder knew; None where it didn't.
        written: the statistics of the values that were taken in C++, if any.
        units: the active units of activations that were counted in C++: slot, axis, counts.
        record: what C++ hooks of probes write to, a slot for each site; None where the hooks are Python's.
        end: of the calling thread, autograd's number when the forward had returned; None before.
        recomputed: whether a part of the forward runs again in the backward pass, under the Python recorder.
        outside: names of parameters that are not registered.
        reduced: names of those whose gradients ``fully_shard`` adds up over the ranks.
        versions: of the parameters when the forward had returned.
        frozen: places of the parameters that required no gradient then; None before, and where nobody looked.
        freed, changed, settled: see ``fxgrad.record.owners.Owner``.
    """

    __slots__ = (
        "__weakref__", "accumulating", "call_graph", "changed", "computed", "deviation", "differentiated", "edges",
        "end", "escalated", "expected", "freed", "frozen", "leaves", "not_required", "number", "outside", "parameters",
        "part", "partial", "places", "recomputed", "record", "reduced", "report", "rewriting", "same", "settled",
        "shapes", "sink", "sizes", "slots", "task", "units", "unmeasurable", "unprobed", "values", "versions",
        "window", "written",
    )  # fmt: skip
    again = False  # this is no second run of a checkpointed region

    def __init__(self, sink: Any, number: int, expected: int) -> None:
        self.sink = sink
        self.number = number
        self.expected = expected
        self.shapes: list[Any] = []
        self.not_required: set[int] = set()
        self.unmeasurable: set[int] = set()
        self.leaves: Any = None
        self.computed = False
        self.differentiated = False
        self.task: int | None = None
        self.part: Part | None = None
        self.call_graph: CallGraph | None = None
        self.report: Any = None
        self.parameters: Any = ()
        self.escalated: frozenset[int] = frozenset()
        self.rewriting: Any = None
        self.partial: Callable[[], CallGraph] | None = None
        self.window: Any = None
        self.edges: EdgeNotes | None = None
        self.values: Any = None
        self.accumulating: bool | None = None
        self.same: dict[int, int] = {}
        self.unprobed: Mapping[int, str] = {}
        self.places: Mapping[int, int] = {}
        self.slots: Sequence[Sequence[int]] | None = None
        self.sizes: Any = None
        self.record: Any = None
        self.written: Any = None
        self.units: Sequence[tuple[int, int, Tensor]] = ()
        self.deviation: Any = None
        self.settled = False
        self.recomputed = False
        self.versions: Sequence[int] = ()
        self.freed = False
        self.frozen: frozenset[int] | None = None
        self.outside: frozenset[str] = frozenset()
        self.reduced: frozenset[str] = frozenset()
        self.changed: tuple[str, ...] = ()
        self.end: int | None = None

    @property
    def graph(self) -> CallGraph:
        """The graph of the call, which is known once the forward has returned."""
        assert self.call_graph is not None  # noqa: S101  # for mypy
        return self.call_graph

    @property
    def notes(self) -> EdgeNotes:
        """What is noted for edges, where they are measured."""
        assert self.edges is not None  # noqa: S101  # for mypy
        return self.edges

    def shape_of(self, site: int) -> tuple[int, ...] | None:
        """Of the value at a site in this call; None where that is not known."""
        if self.slots is not None:
            while site in self.same:
                site = self.same[site]
            slot = next((slot for slot, sites in enumerate(self.slots) if site in sites), None)
            return None if slot is None else tuple(self.sizes.at(slot))
        return tuple(self.shapes[site]) if site < len(self.shapes) else None

    # ---- what C++ hooks ask ----------------------------------------------------------------------------------

    def native_begins(self, written: Written) -> bool:
        """A backward pass begins to write."""
        begun: bool = self.sink.native_begins(self, written)
        return begun

    def native_takes(self, slot: int, gradient: Tensor) -> None:
        """A gradient that the native reductions do not take."""
        for site in self.sites_of(slot):
            self.sink.observe(self, site, gradient)

    def sites_of(self, slot: int) -> Sequence[int]:
        """The sites of a slot of C++ hooks."""
        if self.slots is None:
            return (slot,)
        return self.slots[slot] if slot < len(self.slots) else ()

    def native_again(self, slot: int) -> bool:
        """A second gradient of a value in one pass."""
        again: bool = self.sink.native_again(self, slot)
        return again

    def native_failed(self, slot: int, why: str) -> None:
        """A statistic that could not be written."""
        for site in self.sites_of(slot):
            self.sink.native_failed(self, site, why)

    def native_differentiated(self) -> None:
        """A backward pass is being differentiated."""
        self.invalidate()

    def reached(self) -> None:
        """A backward pass comes to this call: see what the loss did with its outputs."""
        look_at_the_loss(self.call_graph, self.end)

    def invalidate(self) -> None:
        """A backward pass is being differentiated: what a call saved may send back more than its result's users do."""
        self.differentiated = True

    def abandoned(self) -> None:
        """The forward has raised: the graph goes, whose nodes hold us."""
        if self.edges is not None:
            self.edges.at.clear()

    def returned(self) -> None:
        """The forward has returned."""
        self.versions = self._versions()
        self.frozen = self._frozen()

    def _frozen(self) -> frozenset[int]:
        return frozenset(place for place, one in enumerate(self.parameters) if not one[2].requires_grad)

    @property
    def frozen_places(self) -> frozenset[int]:
        """Places of the parameters that require no gradient: when the forward had returned, or else now."""
        return self._frozen() if self.frozen is None else self.frozen

    def _versions(self) -> Sequence[int]:
        return versions_of(self.parameters, getattr(self.sink, "library", None))

    def raising(self) -> None:
        """A backward pass is raising: which parameters are not as the forward left them?"""
        with without_torch_function():
            now = self._versions()
        pairs = zip(self.parameters, self.versions, now, strict=False)
        self.changed = tuple(names[0] for (_, names, _), before, after in pairs if before != after)

    def passed(self, *, freed: bool) -> None:
        """A backward pass is over."""
        self.freed = self.freed or freed

    def follow(self, call_graph: CallGraph, places: Mapping[int, int]) -> None:
        """Take the probes of a graph with these calls; ``places``: by probe, the number of its call."""
        self.call_graph = call_graph
        self.places = places
        self.shapes = [()] * len(call_graph.sites)

    def probe(self, value: Any, number: int) -> None:
        """Put hooks on the tensors that the node behind which probe ``number`` stands has returned."""
        call = self.places.get(number)
        if call is None:  # it returned no tensor when the graph was first run
            return
        sites = self.graph.probe_table[call]
        if self.values is not None:
            tensors = [tensor for _, tensor in tensors_in(value)]
            self.values.returned(self.graph.calls, call, tensors, self.graph.site_table[call])
        if isinstance(value, Tensor):
            self._tensor(value, sites[0])
            return
        for site, (_, tensor) in zip(sites, tensors_in(value), strict=False):
            self._tensor(tensor, site)

    def _tensor(self, value: Tensor, site: int) -> None:
        if site < 0:
            return
        self.shapes[site] = () if value.is_nested else value.shape
        if not value.requires_grad or not torch.is_grad_enabled():
            self.not_required.add(site)
            return
        if self.edges is not None:
            self.edges.note(site, value)
        put(self, value, site)
