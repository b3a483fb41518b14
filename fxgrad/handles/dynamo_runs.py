"""The graphs of dynamo and their runs: with which parameters each ran, and the events that went through them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.dynamo import Fragment
from fxgrad.probes.functionalise import Facts, watch_run
from fxgrad.probes.insert_function import Inserted
from fxgrad.record.recorder import HISTORY
from fxgrad.record.slot_recorder import EventRuns
from fxgrad.torch_support.fake import fake_like


@dataclass(slots=True, eq=False)
class Binding:
    """The parameters and buffers of one model, as a graph takes them.

    Attributes:
        tensors: weak references, by placeholder.
        events: the latest ones that went through the graph with them.
    """

    tensors: dict[int, weakref.ref[Tensor]]
    events: deque[EventRuns] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def alive(self) -> bool:
        """Whether any of them is still there, or there never were any."""
        return not self.tensors or any(tensor() is not None for tensor in self.tensors.values())

    def present(self) -> dict[int, Tensor]:
        """Those that are still there."""
        found = ((number, tensor()) for number, tensor in self.tensors.items())
        return {number: tensor for number, tensor in found if tensor is not None}


@dataclass(frozen=True, slots=True)
class Refused:
    """A graph that could not be observed: why, and whose parameters it takes."""

    reason: str
    owners: tuple[weakref.ref[Tensor], ...]

    def concerns(self, parameters: set[int]) -> bool:
        """Whether it is one of the model with these parameters."""
        return any(id(owner()) in parameters for owner in self.owners)


@dataclass(slots=True, eq=False)
class Graph:
    """One compiled graph of dynamo.

    Attributes:
        module: as dynamo gave it.
        fragment: what it does.
        inserted: the graph with probes.
        shapes: of the value at each site, by what the inputs were like.
        bindings: the parameters that it ran with, a model each.
    """

    module: fx.GraphModule
    fragment: Fragment
    inserted: Inserted
    shapes: dict[tuple[Any, ...], list[tuple[int, ...]]]
    bindings: list[Binding] = field(default_factory=list)

    def bind(self, args: Sequence[Any]) -> tuple[Binding, bool]:
        """The parameters of this run, and whether they are new: one graph serves all models of a class."""
        for binding in reversed(self.bindings):
            if all(tensor() is args[number] for number, tensor in binding.tensors.items()):
                return binding, False
        made = Binding({number: weakref.ref(args[number]) for number in self.fragment.parameters})
        self.bindings = [*(one for one in self.bindings if one.alive), made]
        return made, True

    def shapes_of(self, inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
        """Shapes for inputs like these: a graph may be made for any size, so it runs again without data."""
        if inputs not in self.shapes:
            mode, values = fake_like(inputs)
            self.shapes[inputs] = shapes_by_site(facts_of_run(self.module, mode, values), self.fragment)
        return self.shapes[inputs]


def facts_of_run(gm: fx.GraphModule, mode: Any, values: Sequence[Any]) -> Facts:
    """What a run of a graph without data tells."""
    with mode, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return watch_run(gm.graph, gm, values)


def shapes_by_site(facts: Facts, made: Fragment) -> list[tuple[int, ...]]:
    """The shape at each site, by number."""
    shapes: list[tuple[int, ...]] = [()] * made.count
    for node, numbers in made.sites.items():
        fact = facts.of[node]
        layout = fact.layout or facts.of[fact.changed[0]].layout  # an item assignment returns nothing
        for number, (shape, _, _) in zip(numbers, layout, strict=True):
            if number >= 0:
                shapes[number] = shape
    return shapes


@dataclass(eq=False)
class GraphRun:
    """One run of a graph.  The autograd graph holds it, and others hold it weakly.

    Attributes:
        number: in the order in which runs began.
        forward: which forward it belongs to.
        graph, binding: the graph, and the parameters that it ran with.
        inputs: what they were like.
        links: placeholders that are tensors which an earlier run returned: that run, and the position.
    """

    number: int
    forward: int
    graph: Graph
    binding: Binding
    inputs: tuple[Any, ...]
    links: dict[int, tuple[GraphRun, int]] = field(default_factory=dict)


def joined_shapes(runs: Sequence[GraphRun], numbers: Sequence[Mapping[int, int]]) -> list[tuple[int, ...]]:
    """The shape at each site of the joined call graph."""
    found: dict[int, tuple[int, ...]] = {}
    for run, of in zip(runs, numbers, strict=True):
        shapes = run.graph.shapes_of(run.inputs)
        found.update({site: shapes[local] for site, local in of.items()})
    return [found[site] for site in range(len(found))]


def together(
    runs: Sequence[GraphRun], arrived: Mapping[int, Tensor], numbers: Sequence[Mapping[int, int]]
) -> tuple[Tensor, dict[int, int], dict[int, str]]:
    """The slots of all runs in a row, the slot of each site of the joined call graph, and the sites without a probe."""
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


def of_model(runs: Sequence[GraphRun], own: set[int]) -> list[GraphRun]:
    """Runs that use a parameter of the model, and runs without parameters that such runs are linked with."""
    chosen: dict[int, GraphRun] = {}
    bare: list[GraphRun] = []
    for run in runs:
        used = {id(tensor) for tensor in run.binding.present().values() if isinstance(tensor, nn.Parameter)}
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
