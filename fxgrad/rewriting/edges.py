"""Rules at edges: on the part of a gradient that one consumer sends back.

An edge has no tensor of its own to put a hook on, but autograd has one place for it: the operation of the consumer
whose ``next_functions`` name the producer.  A hook on that operation may replace what it passes back there.  Where a
use is no single such place, the rule is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fxgrad.errors import RuleError
from fxgrad.rewriting.patterns import near
from fxgrad.rewriting.rule import selects
from fxgrad.rewriting.selection import Edges, Surroundings
from fxgrad.rewriting.state import Bound
from fxgrad.rewriting.tally import Tally
from fxgrad.schema import Edge, Site

if TYPE_CHECKING:
    from fxgrad.capture.captured import CallGraph
    from fxgrad.rewriting.apply import NodeRules

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
    """Which edges of a call graph the rules of a model select."""

    def __init__(self, call_graph: CallGraph, sites: Sequence[Site], bound: list[Bound], around: Surroundings) -> None:
        self.by_rule: list[list[Use]] = []
        self.known = [_producer(edge) for edge in call_graph.edges]
        self.consumers: list[dict[str, None]] = []  # by rule: what takes the values that its selection may mean
        nodes = {node.key: node for node in call_graph.nodes}
        number = {site.id: n for n, site in enumerate(sites)}
        of_node: dict[str, list[int]] = {}
        for n, site in enumerate(sites):
            of_node.setdefault(site.key, []).append(n)
        count: dict[tuple[str, str], int] = {}
        for edge in call_graph.edges:
            count[_pair(edge)] = count.get(_pair(edge), 0) + 1
        for _, _, rule in bound:
            where: Any = rule.where
            selected, consumers = [], dict[str, None]()
            for edge in call_graph.edges:
                place, key = number.get(_producer(edge)), edge.consumer.key
                if place is None or not selects(rule, sites[place].id, where.takes_producer, sites[place], around):
                    continue
                consumers[key] = None
                returned = tuple(of_node.get(key, ()))
                words, behind = edge_words(edge), [sites[n] for n in returned]
                if selects(rule, words, where.takes_use, edge, nodes[key], behind, around):
                    selected.append(Use(words, place, returned, count[_pair(edge)]))
            self.by_rule.append(selected)
            self.consumers.append(consumers)


class Running(Protocol):
    """The rewriting of one forward call, as the hooks at its edges see it.

    Attributes:
        fired: whether a hook of the call has run.
        rules, tally: who is told that rules ran at an edge, and what they changed.
    """

    fired: bool
    rules: NodeRules
    tally: Tally

    def measure(self, slot: int, gradient: Tensor) -> None:
        """Record a gradient; at -1 none."""
        ...

    def with_done(self, error: RuleError) -> str:
        """The error's text, and what was rewritten before."""
        ...


class EdgeHook:
    """The hook on the autograd operation that sends a part back; it runs the rules at one edge, in their order."""

    __slots__ = ("bound", "position", "run", "slot", "use")
    __torch_unserializable__ = True

    def __init__(self, run: Running, use: Use, position: int, slot: int) -> None:
        self.run = run
        self.bound: list[Bound] = []
        self.use = use
        self.position = position
        self.slot = slot  # where the part is recorded before the rules, and behind it, after them; -1: nowhere

    def __call__(self, passed: tuple[Tensor | None, ...], received: Any) -> Any:
        """What the operation passes back instead; None where the rules leave it alone."""
        del received
        part = passed[self.position] if self.position < len(passed) else None
        if part is None:
            return None
        self.run.fired = True
        self.run.measure(self.slot, part)
        result = part
        for state, number, rule in self.bound:
            if not state.runs(rule):
                continue
            try:
                note = functools.partial(self.run.tally.note, (self.use.id, id(state), number))
                result = state.one(number, self.use.id, result, note)
            except RuleError as error:
                raise RuleError(self.run.with_done(error)) from (error.__cause__ or error)
        self.run.measure(self.slot + 1 if self.slot >= 0 else -1, result)
        if result is part:
            return None
        self.run.rules.note(self.use.id)
        return (*passed[: self.position], result, *passed[self.position + 1 :])


class Attaching:
    """Puts the hooks of all edge rules on the operations of a forward call that has returned.

    Attributes:
        unmeasurable: by edge, why no rule acts there, or why what came there cannot be told.
    """

    def __init__(self, run: Running, uses: Uses, slots: Mapping[str, int], made: Made) -> None:
        self.unmeasurable: dict[str, str] = {}
        self._run = run
        self._uses = uses
        self._slots = slots
        self._made = made
        self._owned = {node for node, _ in made.values()}
        self._hooks: dict[Place, EdgeHook] = {}

    def attach(self, bound: list[Bound]) -> None:
        """All of them.

        Raises:
            RuleError: a rule selects no edge, or only such that are no single place in autograd's graph.
        """
        for entry, selected, consumers in zip(bound, self._uses.by_rule, self._uses.consumers, strict=True):
            state, number, rule = entry
            where: Any = rule.where
            if not selected and number not in state.found and not where.optional:
                raise RuleError(_nothing_found(rule, self._uses, consumers))
            chosen: dict[tuple[int, tuple[int, ...]], list[Use]] = {}
            for use in selected:
                state.found.add(number)
                state.audit.expect((number, use.id))
                chosen.setdefault((use.site, use.consumers), []).append(use)
            refused = [why for together in chosen.values() if (why := self._one(entry, together))]
            if refused and len(refused) == len(chosen):
                raise RuleError(refused[0])

    def _one(self, entry: Bound, together: list[Use]) -> str:
        """Hook the selected uses that one consumer makes of a value; why a rule must be refused there, or nothing."""
        state, number, rule = entry
        use, made = together[0], self._made
        if use.site not in made or not any(site in made for site in use.consumers):
            self._leave(entry, together, "no gradient is passed back there that a hook can see")
            return ""
        places = _places(made[use.site], [made[site] for site in use.consumers if site in made], self._owned)
        if len(places) != use.among or len(together) != use.among:
            self._leave(entry, together, _why_not_single(use, len(places), len(together)))
            return _not_single(rule, use, len(places), len(together))
        for one, place in zip(together, places, strict=True):
            if use.among > 1:
                self.unmeasurable[one.id] = (
                    "its consumer takes the value several times, and which part is which is not known"
                )
            hook = self._hooks.get(place)
            if hook is None:
                slot = -1 if use.among > 1 else self._slots[one.id]
                hook = self._hooks[place] = EdgeHook(self._run, one, place[1], slot)
                place[0].register_hook(hook)
            hook.bound.append(entry)
            state.not_rewritten.pop((number, one.id), None)
        return ""

    def _leave(self, entry: Bound, uses: list[Use], why: str) -> None:
        state, number, _ = entry
        for use in uses:
            self.unmeasurable[use.id] = why
            state.not_rewritten.setdefault((number, use.id), why)


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


def _nothing_found(rule: Any, uses: Uses, consumers: Iterable[str]) -> str:
    where: Edges = rule.where
    listed = list(consumers)
    hint = f"there are {len(uses.known)} edges"
    if listed:  # so the producer is there
        names = ", ".join(map(repr, listed[:5]))
        hint = near(where.consumer, listed) if isinstance(where.consumer, str) else hint
        hint = f"the values that it may mean go to {names}" if hint.startswith("there are") else hint
    elif isinstance(where.producer, str):
        hint = near(where.producer, uses.known)
    return (
        f"rule {rule.name!r} selects {where.words}, but the forward call had no such edge; {hint}. The edges are in "
        "flow.edges of fxgrad.gradient_flow."
    )


def _why_not_single(use: Use, places: int, chosen: int) -> str:
    if chosen != use.among:
        return f"the consumer uses this value {use.among} times, and autograd does not say which is which"
    return f"the consumer sends its part back from {places} places, not from {use.among}"


def _not_single(rule: Any, use: Use, places: int, chosen: int) -> str:
    why = _why_not_single(use, places, chosen)
    if chosen != use.among:
        return f"rule {rule.name!r} cannot rewrite {use.id} alone: {why}; select all of them"
    return (
        f"rule {rule.name!r} cannot rewrite {use.id}: {why}; select the whole value with nodes(...), or what the "
        "consumer returns"
    )
