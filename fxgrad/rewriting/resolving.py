"""Which rules act where in the graph of a forward call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxgrad.rewriting.edges import Uses
from fxgrad.rewriting.patterns import near
from fxgrad.rewriting.rule import Rule, selects
from fxgrad.rewriting.selection import Nodes, Outputs, Surroundings, op_word
from fxgrad.rewriting.state import Bound
from fxgrad.schema import Site

if TYPE_CHECKING:
    from fxgrad.capture.captured import CallGraph


class Resolution:
    """Which rules act at which sites of one call graph."""

    def __init__(self, call_graph: CallGraph, bound: list[Bound], at_edges: list[Bound], model: nn.Module) -> None:
        self.call_graph = call_graph
        self.sites = bare_sites(call_graph)
        around = Surroundings(model, _returned(call_graph))
        self.table: dict[int, tuple[Bound, ...]] = {}
        self.by_rule: list[list[int]] = []
        for entry in bound:
            where: Any = entry[2].where
            numbers = [
                number for number, site in enumerate(self.sites)
                if selects(entry[2], site.id, where.matches, site, around)
            ]  # fmt: skip
            self.by_rule.append(numbers)
            for number in numbers:
                self.table[number] = (*self.table.get(number, ()), entry)
        self.uses = Uses(call_graph, self.sites, at_edges, around) if at_edges else None
        #: A gradient after the rules is recorded behind the sites and edge sites: site -> index.
        behind = len(self.sites) + len(call_graph.fan_out)
        self.after = {number: behind + n for n, number in enumerate(sorted(self.table))}
        #: Behind these what comes to each edge, and next to it what goes on: edge in words -> index.
        behind += len(self.after)
        used = () if self.uses is None else dict.fromkeys(use.id for uses in self.uses.by_rule for use in uses)
        self.at_edges = {words: behind + 2 * n for n, words in enumerate(used)}


def bare_sites(call_graph: CallGraph) -> tuple[Site, ...]:
    """The sites of a call graph, without statistics."""
    return tuple(
        Site(call_graph.nodes[spec.call], spec.output.position, spec.output.shape, _dtype_word(spec.output.dtype),
             str(spec.output.device), None)
        for spec in call_graph.sites
    )  # fmt: skip


def _dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _returned(call_graph: CallGraph) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for call in call_graph.module_calls:
        found[call.path] = found.get(call.path, frozenset()) | frozenset(call.outputs)
    return found


def nothing_found(rule: Rule, sites: tuple[Site, ...]) -> str:
    """What is said of a rule that selects no site."""
    where = rule.where
    hint = f"there are {len(sites)} sites"
    if isinstance(where, Nodes) and isinstance(where.path, str):
        hint = near(where.path, (word for site in sites for word in (site.id, site.key, site.module_path) if word))
    elif isinstance(where, Outputs) and isinstance(where.path, str):
        hint = near(where.path, (site.module_path for site in sites if site.module_path))
    elif isinstance(where, Nodes) and where.op:
        hint = near(where.op[0], (op_word(site) for site in sites if op_word(site)))
    return (
        f"rule {rule.name!r} selects {where.words}, but the forward call had no such site; {hint}. "
        "fxgrad.gradient_flow lists the sites; pass optional=True where a model may do without."
    )
