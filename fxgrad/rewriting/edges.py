"""Rules at edges: on the part of a gradient that one consumer sends back.

An edge has no tensor of its own to put a hook on, but autograd has one place for it: the operation of the consumer
whose ``next_functions`` name the producer.  A hook on that operation may replace what it passes back there.  Where a
use is no single such place, the rule is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxgrad.errors import RuleError
from fxgrad.rewriting.patterns import near
from fxgrad.rewriting.selection import Edges
from fxgrad.rewriting.state import Bound
from fxgrad.schema import Edge

Made = dict[int, tuple[Any, int]]  # site -> the autograd node of its value, and which of its outputs
Place = tuple[Any, int]  # an autograd node, and which of its inputs
_BOUND = 256  # autograd nodes of one call that are looked at


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a value that rules select.

    Attributes:
        id: producer, consumer and argument in words.
        site: number of the producer's site.
        consumers: numbers of the sites of the consumer.
        among: how many uses of this value the consumer makes.
    """

    id: str
    site: int
    consumers: tuple[int, ...]
    among: int


class Uses:
    """Which edges of a plan the rules of a model select."""

    def __init__(self, plan: Any, sites: Any, bound: list[Bound]) -> None:
        self.by_rule: list[list[Use]] = []
        nodes = {node.key: node for node in plan.nodes}
        number = {site.id: n for n, site in enumerate(sites)}
        of_node: dict[str, list[int]] = {}
        for n, site in enumerate(sites):
            of_node.setdefault(site.key, []).append(n)
        count: dict[tuple[str, str], int] = {}
        for edge in plan.edges:
            count[_pair(edge)] = count.get(_pair(edge), 0) + 1
        for _, _, rule in bound:
            where: Any = rule.where
            selected = []
            for edge in plan.edges:
                site, key = number.get(_producer(edge)), edge.consumer.key
                if site is not None and where.matches(sites[site], nodes[key], edge.consumer.argument):
                    selected.append(Use(edge_words(edge), site, tuple(of_node.get(key, ())), count[_pair(edge)]))
            self.by_rule.append(selected)
        self.known = [_producer(edge) for edge in plan.edges]


class EdgeHook:
    """The hook on the autograd operation that sends a part back."""

    __slots__ = ("bound", "position", "run", "use")
    __torch_unserializable__ = True

    def __init__(self, run: Any, bound: Bound, use: Use, position: int) -> None:
        self.run = run
        self.bound = bound
        self.use = use
        self.position = position

    def __call__(self, passed: tuple[Tensor | None, ...], received: Any) -> Any:
        """What the operation passes back instead; None where the rule leaves it alone."""
        del received
        state, number, rule = self.bound
        part = passed[self.position] if self.position < len(passed) else None
        if part is None or not state.runs(rule):
            return None
        self.run.fired = True
        try:
            tell = functools.partial(self.run.tally.note, (self.use.id, id(state), number))
            result = state.one(number, self.use.id, part, tell)
        except RuleError as error:
            raise RuleError(self.run.with_done(error)) from (error.__cause__ or error)
        if result is part:
            return None
        self.run.rules.note(self.use.id)
        return (*passed[: self.position], result, *passed[self.position + 1 :])


def attach(run: Any, bound: list[Bound], uses: Uses, made: Made) -> None:
    """Put the hooks of all edge rules on the operations of a forward call that has returned.

    Raises:
        RuleError: a rule selects no edge, or one that is no single place in autograd's graph.
    """
    owned = {node for node, _ in made.values()}
    for entry, selected in zip(bound, uses.by_rule, strict=True):
        state, number, rule = entry
        where: Any = rule.where
        if not selected and number not in state.found and not where.optional:
            raise RuleError(_nothing_found(rule, uses))
        chosen: dict[tuple[int, tuple[int, ...]], list[Use]] = {}
        for use in selected:
            state.found.add(number)
            state.audit.expect((number, use.id))
            chosen.setdefault((use.site, use.consumers), []).append(use)
        for together in chosen.values():
            use = together[0]
            if use.site not in made or not any(site in made for site in use.consumers):
                state.not_rewritten.setdefault((number, use.id), "no gradient is passed back there that a hook can see")
                continue
            places = _places(made[use.site], [made[site] for site in use.consumers if site in made], owned)
            if len(places) != use.among or len(together) != use.among:
                raise RuleError(_not_single(rule, use, len(places), len(together)))
            for one, (node, position) in zip(together, places, strict=True):
                node.register_hook(EdgeHook(run, entry, one, position))


def _places(producer: tuple[Any, int], consumers: Iterable[tuple[Any, int]], owned: set[Any]) -> list[Place]:
    """Where the operations of a call send something back to the value of a producer; none where they are too many."""
    queue = list(dict.fromkeys(node for node, _ in consumers))
    if producer[0] in queue:
        return []  # the call returned the very tensor that it was given
    seen, found = set(queue), list[Place]()
    while queue and len(seen) < _BOUND:
        node = queue.pop(0)
        for position, (previous, output) in enumerate(node.next_functions):
            if previous is None:
                continue
            if previous is producer[0] and output == producer[1]:
                found.append((node, position))
            elif previous not in seen and previous not in owned:  # one more operation of the same call
                seen.add(previous)
                queue.append(previous)
    return [] if queue else found


def _pair(edge: Edge) -> tuple[str, str]:
    return _producer(edge), edge.consumer.key


def _producer(edge: Edge) -> str:
    return edge.producer + edge.output_position


def edge_words(edge: Edge) -> str:
    """An edge in words, unique in a flow."""
    return f"{_producer(edge)} -> {edge.consumer.key} {edge.consumer.argument}"


def _nothing_found(rule: Any, uses: Uses) -> str:
    where: Edges = rule.where
    hint = near(where.producer, uses.known) if isinstance(where.producer, str) else f"there are {len(uses.known)} edges"
    return (
        f"rule {rule.name!r} selects {where.words}, but the forward call had no such edge; {hint}. The edges are in "
        "flow.edges of fxgrad.gradient_flow."
    )


def _not_single(rule: Any, use: Use, places: int, chosen: int) -> str:
    if chosen != use.among:
        return (
            f"rule {rule.name!r} cannot rewrite {use.id} alone: the consumer uses this value {use.among} times, and "
            "autograd does not say which is which; select all of them"
        )
    return (
        f"rule {rule.name!r} cannot rewrite {use.id}: the consumer sends its part back from {places} places, not from "
        f"{use.among}; select the whole value with nodes(...), or what the consumer returns"
    )
