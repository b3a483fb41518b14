"""The pass of the function engine: probes as ``autograd.Function`` calls, and in-place changes made on copies.

The new graph takes the slots as its first argument.  Behind each change or probe, later readers of the same tensor
object, by whatever node they name it, read the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxgrad.probes.function import fresh, probe, probe_each, unbind
from fxgrad.probes.functionalise import Decisions, Fact, Facts

_CONTAINER = "it is returned in a container that cannot be made again around a probe"


@dataclass(slots=True)
class Inserted:
    """The result of the pass.

    Attributes:
        graph: takes ``(slots, *placeholders of the original)``.
        slot_of: by site number, the slot; sites that are one value have one slot.
        unprobed: by site number, why it has none.
    """

    graph: fx.Graph
    slot_of: dict[int, int] = field(default_factory=dict)
    unprobed: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(set(self.slot_of.values()))


def insert_function_probes(
    graph: fx.Graph, facts: Facts, decisions: Decisions, sites: Mapping[fx.Node, Sequence[int]],
    copy: Callable[[Any], Any] = fresh,
) -> Inserted:  # fmt: skip
    """A copy of ``graph`` with a probe behind each node in ``sites``.

    Args:
        graph: the graph; it is not changed.
        facts: of a run of it.
        decisions: see ``functionalise.decide``.
        sites: by node, the site number of each tensor that it returns (or changes, for an item assignment), in order;
            -1 for none.
        copy: makes the copy that an in-place op changes.
    """
    return _Pass(facts, decisions, sites, copy).run(graph)


class _Pass:
    def __init__(
        self, facts: Facts, decisions: Decisions, sites: Mapping[fx.Node, Sequence[int]], copy: Callable[[Any], Any]
    ) -> None:
        self.copy = copy
        self.facts = facts
        self.decisions = decisions
        self.sites = dict(sites)
        self.current: dict[fx.Node, fx.Node] = {}
        self.holders: dict[int, list[fx.Node]] = {}
        self.made = Inserted(fx.Graph())

    def run(self, graph: fx.Graph) -> Inserted:
        result = self.made.graph
        slots = result.placeholder("slots")
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._copy(node)
        self.slots = result.call_function(unbind, (slots,))
        for node in placeholders:
            self._probe(node)
        for node in graph.nodes:
            if node.op == "output":
                result.output(fx.node.map_arg(node.args[0], lambda n: self.current[n]))
            elif node.op != "placeholder":
                self._copy(node)
                self._probe(node)
        result.lint()
        return self.made

    def _fact(self, node: fx.Node) -> Fact:
        return self.facts.of.get(node, Fact())

    def _copy(self, node: fx.Node) -> None:
        target = self.decisions.on_copy.get(node)
        if target is not None:
            self._rename(target, self.made.graph.call_function(self.copy, (self.current[target],)))
        first = self.decisions.same.get(node)
        if first is not None and node.target in (operator.getitem, getattr):
            self.current[node] = self.current[first]  # another name of one element
        else:
            self.current[node] = self.made.graph.node_copy(node, lambda n: self.current[n])
        fact = self._fact(node)
        if fact.tensor:
            self.holders.setdefault(fact.objects[0], []).append(node)

    def _rename(self, node: fx.Node, new: fx.Node) -> None:
        """All nodes that name the tensor object of ``node`` name ``new`` from now on."""
        for holder in (node, *self.holders.get(self._fact(node).objects[0], ())):
            self.current[holder] = new

    def _probe(self, node: fx.Node) -> None:
        numbers = self.sites.get(node, ())
        if all(number < 0 for number in numbers):
            return
        fact = self._fact(node)
        value = node if fact.objects else next(iter(fact.changed), node)  # an item assignment returns nothing
        reason = self.decisions.unprobed.get(node) or self.decisions.unprobed.get(value)
        if reason is not None:
            self._leave(numbers, reason)
        elif self._fact(value).tensor:
            self._probe_tensor(node, value, numbers[0])
        elif fact.several and len(numbers) == len(fact.objects):
            indices = tuple(number if number < 0 else self._slot(number) for number in numbers)
            self.current[node] = self.made.graph.call_function(probe_each, (self.current[node], self.slots, indices))
        elif not self._elements(node, numbers):
            self._leave(numbers, _CONTAINER)

    def _probe_tensor(self, node: fx.Node, value: fx.Node, number: int) -> None:
        first = self.decisions.same.get(node)
        if first is not None:  # one value, one gradient
            shared = self.sites.get(first, (-1,))[0]
            if shared in self.made.slot_of:
                self.made.slot_of[number] = self.made.slot_of[shared]
                return
        new = self.made.graph.call_function(probe, (self.current[value], self.slots, self._slot(number)))
        self._rename(value, new)
        self.current[node] = new

    def _slot(self, number: int) -> int:
        return self.made.slot_of.setdefault(number, self.made.size)

    def _leave(self, numbers: Sequence[int], reason: str) -> None:
        self.made.unprobed.update({number: reason for number in numbers if number >= 0})

    def _elements(self, node: fx.Node, numbers: Sequence[int]) -> bool:
        """Probe behind the nodes that take a tensor out of a named tuple, if nothing else uses that."""
        objects = self._fact(node).objects
        takers = {user: self._fact(user) for user in node.users}
        if len(objects) != len(numbers):
            return False
        for user, fact in takers.items():
            if user.target not in (operator.getitem, getattr) or not fact.tensor or fact.objects[0] not in objects:
                return False
        for user, fact in takers.items():
            if user not in self.decisions.same:
                self.sites[user] = (numbers[objects.index(fact.objects[0])],)
        return True
