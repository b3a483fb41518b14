"""The sink that rewrites at sites: one hook per value runs observation and rules in the order of the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxgrad.errors import RuleError
from fxgrad.rewriting.edges import Attaching, Made, edge_words
from fxgrad.rewriting.hooks import Chain, Entry, LeafChain, Through
from fxgrad.rewriting.resolving import Resolution, nothing_found
from fxgrad.rewriting.rule import Rule, apply_through
from fxgrad.rewriting.state import Bound, State
from fxgrad.rewriting.tally import Tally
from fxgrad.schema import CaptureReport, Edge, Rewritten, Site
from fxgrad.torch_support.leaf_hooks import LeafHooks
from fxgrad.torch_support.private import base_of, current_backward

if TYPE_CHECKING:
    from fxgrad.capture.captured import CallGraph
    from fxgrad.probes.forward_record import ForwardRecord

MARK = "_fxgrad_rewriting"
_KEPT = 64  # call graphs whose resolution is kept, as many as the native recorder follows
_LOST = "the value is changed in place through a view, so that autograd replaced the node that a hook would sit on"
_NO_GRADIENT = "nothing that the value depends on requires a gradient"


def rules_of(model: nn.Module) -> NodeRules | None:
    """The rules that act at the sites of this very model, if there are any."""
    found: NodeRules | None = model.__dict__.get(MARK)
    return found if found is not None and (found.bound or found.at_edges) else None


class NodeRules:
    """The rules at the sites of one model, of all its rewrites, in the order in which they run."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.states: list[State] = []
        self.bound: list[Bound] = []
        self.at_edges: list[Bound] = []
        self._resolved: list[Resolution] = []
        self.backward: int | None = None
        self.done: list[str] = []  # sites rewritten in that backward pass, for error messages
        self.leaves = LeafHooks(LeafChain, Tensor.register_hook)
        self.capture: CaptureReport | None = None  # of the latest call

    def add(self, state: State) -> None:
        """Take in the rules of a rewrite, behind those that are there."""
        self.states.append(state)
        self._refresh()

    def drop(self, state: State) -> None:
        """Forget the rules of a rewrite."""
        self.states = [other for other in self.states if other is not state]
        self._refresh()
        if not self.states:
            self.leaves.remove()

    def _refresh(self) -> None:
        self.bound = [bound for state in self.states for bound in state.of_nodes]
        self.at_edges = [bound for state in self.states for bound in state.of_edges]
        self._resolved = []

    @property
    def through(self) -> bool:
        """Whether a rule acts between what a call returns and takes."""
        return any(rule.through for _, _, rule in self.bound)

    def begin(self, forward_record: ForwardRecord, *, observing: bool) -> Pass:
        """Rules for one forward call."""
        return Pass(self, forward_record, observing=observing)

    def resolve(self, call_graph: CallGraph) -> Resolution:
        """Which rules act where in this call graph."""
        for known in self._resolved:
            if known.call_graph is call_graph:
                return known
        made = self.resolve_anew(call_graph)
        self._resolved = [*self._resolved, made][-_KEPT:]
        return made

    def resolve_anew(self, call_graph: CallGraph) -> Resolution:
        """The same, for a call graph that will not come again."""
        model = self._model()
        if model is None:  # only a model that lives is called
            message = "the model of these rules is gone"
            raise RuntimeError(message)
        return Resolution(call_graph, self.bound, self.at_edges, model)

    def note(self, site: str) -> None:
        """A site is about to be rewritten."""
        task = current_backward()
        if task != self.backward:
            self.backward, self.done = task, []
        self.done.append(site)


class Pass:
    """The rules during one forward call and its backward passes.

    Attributes:
        fired: whether a gradient has come.
        seen: whether a value has a hook of the native recorder, which observes it; None where hooks are Python's.
        own: sites that Python observes.
    """

    def __init__(self, rules: NodeRules, forward_record: ForwardRecord, *, observing: bool) -> None:
        self.rules = rules
        self.forward_record = forward_record
        self.observing = observing
        self.fired = False
        self.seen: Callable[[Tensor], bool] | None = None
        self.own: set[int] = set()
        self._through = rules.through
        self._table: dict[int, tuple[Bound, ...]] | None = None
        self._after: dict[int, int] = {}
        self._names: tuple[Site, ...] = ()
        self.tally = Tally()
        self._at_edges: dict[str, list[Bound]] = {}
        self._edge_slots: dict[str, int] = {}
        self._unmeasurable: dict[str, str] = {}
        self._chains: dict[int, tuple[weakref.ref[Tensor], Any, Chain]] = {}
        self._made: Made = {}
        self._nodes: set[Any] = set()  # autograd nodes of the values so far, where a rule needs to know them

    # ---- forward -----------------------------------------------------------------------------------------------

    def put(self, value: Tensor, index: int) -> Entry:
        """Put the hook of site ``index`` on ``value``.  A value that has one gets its further site in front of it."""
        entry = Entry(index, own=self.seen is None or index < 0 or value.is_leaf or not self.seen(value))
        if entry.own and not value.is_leaf:
            self.own.add(index)
        if self._unneeded(index):
            return entry
        node = value.grad_fn
        if self.rules.at_edges and node is not None:
            self._made[index] = (node, value.output_nr)
        key = id(value)
        known = self._chains.get(key)
        if known is not None and known[0]() is value and known[1] is node:
            known[2].entries.insert(0, entry)  # a call that returned the very tensor that it was given
            for one in known[2].entries:  # what one passes on is what comes to the next
                one.own = True
                self.own.add(one.index)
            return entry
        chain = Chain(self, entry)
        if node is None and value.is_leaf:
            self.rules.leaves.of(value).chain = chain
            if self.forward_record.leaves is not None:
                self.forward_record.leaves.then(value)
            chain.leaf = True
        else:
            value.register_hook(chain)  # type: ignore[no-untyped-call]
            self.forward_record.computed = True
            if self._through and node is not None:
                node.register_hook(Through(self, entry, self._unfit(value, node)))
        chains = self._chains
        self._chains[key] = (weakref.ref(value, lambda _: chains.pop(key, None)), node, chain)
        return entry

    def sites_at(self, value: Tensor) -> list[int]:
        """The sites whose hook a value has, as it is now."""
        known = self._chains.get(id(value))
        if known is None or known[0]() is not value or known[1] is not value.grad_fn:
            return []
        return [entry.index for entry in known[2].entries]

    def _unfit(self, value: Tensor, node: Any) -> str:
        """Why the autograd node of a value does not stand for the call that returned it; empty where it does."""
        self._nodes.add(node)
        if base_of(value) is not None:
            return "it returned or changed a view, whose autograd operation is that of the view"
        origins = [origin for origin, _ in node.next_functions if origin is not None]
        if all(origin in self._nodes or type(origin).__name__ == "AccumulateGrad" for origin in origins):
            return ""
        return "it is several autograd operations"

    def _unneeded(self, index: int) -> bool:
        """Whether it is known beforehand that nothing happens at a site."""
        if self.observing or self._through or self.rules.at_edges or index < 0:
            return False
        if self._table is None and self.forward_record.call_graph is not None:
            self._take(self.rules.resolve(self.forward_record.graph))
        return self._table is not None and index not in self._table

    def close(self) -> None:
        """The forward has returned: now it is known which site is which.

        Raises:
            RuleError: a rule selects no site, or only sites whose gradient no hook can rewrite.
        """
        self._chains.clear()
        self._nodes.clear()
        resolution = self.rules.resolve(self.forward_record.graph)
        self._take(resolution)
        if resolution.uses is not None:
            attaching = Attaching(self, resolution.uses, resolution.at_edges, self._made)
            attaching.attach(self.rules.at_edges)
            self._edge_slots, self._unmeasurable = resolution.at_edges, attaching.unmeasurable
            for entry, uses in zip(self.rules.at_edges, resolution.uses.by_rule, strict=True):
                for use in uses:
                    self._at_edges.setdefault(use.id, []).append(entry)
        self._made = {}
        lost = self._lost()
        if lost:
            self._table = {number: bound for number, bound in resolution.table.items() if number not in lost}
        for (state, number, rule), sites in zip(self.rules.bound, resolution.by_rule, strict=True):
            self._check(state, number, rule, sites, lost)

    def _take(self, resolution: Resolution) -> None:
        self._table, self._after, self._names = resolution.table, resolution.after, resolution.sites
        escalated = self.forward_record.escalated
        if escalated:  # what a site passes on is measured like what it received
            self.forward_record.escalated = escalated | {self._after[n] for n in escalated if n in self._after}

    def _lost(self) -> set[int]:
        call_graph, unmeasurable = self.forward_record.graph, set(self.forward_record.unmeasurable)
        if not call_graph.lost:
            return unmeasurable
        return unmeasurable | {
            n for n, spec in enumerate(call_graph.sites) if (spec.call, spec.output.position) in call_graph.lost
        }

    def _check(self, state: State, number: int, rule: Rule, sites: list[int], lost: set[int]) -> None:
        where = rule.where
        if not sites and number not in state.found and not getattr(where, "optional", False):
            raise RuleError(nothing_found(rule, self._names))
        for site in sites:
            place = (number, self._names[site].id)
            if number not in state.found or site in lost:
                state.audit.expect(place)
            if site in lost:
                state.not_rewritten.setdefault(place, _LOST)
            elif site in self.forward_record.not_required and self._grad_was_on(site):
                state.not_rewritten.setdefault(place, _NO_GRADIENT)
            else:
                state.not_rewritten.pop(place, None)
        if sites and lost.issuperset(sites):
            names = ", ".join(self._names[site].id for site in sites[:5])
            message = f"rule {rule.name!r} cannot rewrite {names}: {_LOST}. Select the call that made the change."
            raise RuleError(message)
        if sites:
            state.found.add(number)

    def _grad_was_on(self, site: int) -> bool:
        """Values computed without gradients may be computed again by a checkpoint, and then rules act there."""
        call_graph = self.forward_record.graph
        on: bool = call_graph.calls[call_graph.sites[site].call].grad_enabled
        return on

    # ---- backward ----------------------------------------------------------------------------------------------

    def recorded(self, number: int) -> tuple[Rewritten, int] | None:
        """For the flow: what the rules at a site did, and the slot of what they passed on."""
        bound = (self._table or {}).get(number)
        if not bound:
            return None
        return self._recorded(bound, [(number, place) for place in range(len(bound))]), self._after[number]

    def recorded_at_edge(self, edge: Edge) -> tuple[Rewritten, int] | None:
        """For the flow: what the rules at an edge did, and the slot of what came; what went on is in the next one."""
        words = edge_words(edge) if self._at_edges else ""
        bound = self._at_edges.get(words)
        if bound is None:
            return None
        recorded = self._recorded(bound, [(words, id(state), number) for state, number, _ in bound])
        return dataclasses.replace(recorded, reason=self._unmeasurable.get(words)), self._edge_slots[words]

    def _recorded(self, bound: Sequence[Bound], keys: Sequence[Hashable]) -> Rewritten:
        audited = [state.audit.level == "full" for state, _, _ in bound]
        return self.tally.of([rule.name for _, _, rule in bound], keys, audited)

    def gradient(self, entries: list[Entry], gradient: Tensor, *, observe: bool) -> Tensor | None:
        """Run through the sites of one value.  ``observe``: this backward pass goes through the call.

        Raises:
            RuleError: a rule raised or broke its contract.
        """
        self.fired = True
        table = self._known_table()
        observe = observe and self.observing
        result = gradient
        for entry in entries:
            index = entry.index
            if index < 0:
                continue
            if observe and entry.own:
                self.forward_record.sink.observe(self.forward_record, index, result)
            bound = table.get(index)
            if bound is not None:
                result = self._rewrite(index, bound, result)
                if observe and index in self._after:
                    self.forward_record.sink.observe(self.forward_record, self._after[index], result)
        return None if result is gradient else result

    def measure(self, slot: int, gradient: Tensor) -> None:
        """Record a gradient in a slot, where that is wanted."""
        if self.observing and slot >= 0:
            self.forward_record.sink.observe(self.forward_record, slot, gradient)

    def _known_table(self) -> dict[int, tuple[Bound, ...]]:
        if self._table is not None:
            return self._table
        # A backward pass inside of the model's forward: the calls up to here are known, and keep their sites.
        partial = self.forward_record.partial
        assert partial is not None  # noqa: S101  # for mypy: a forward is running
        early = self.rules.resolve_anew(partial())
        self._names = early.sites
        return early.table

    def _rewrite(self, index: int, bound: tuple[Bound, ...], gradient: Tensor) -> Tensor:
        site = self._names[index].id
        result = gradient
        for place, (state, number, rule) in enumerate(bound):
            if rule.through or not state.runs(rule):
                continue
            try:
                result = state.one(number, site, result, functools.partial(self.tally.note, (index, place)))
            except RuleError as error:
                raise RuleError(self.with_done(error)) from (error.__cause__ or error)
        if result is not gradient:
            self.rules.note(site)
        return result

    def passed_back(self, hook: Through, passed: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Any:
        """What a call passes back to its input, after the rules that act there."""
        index = hook.entry.index
        bound = self._known_table().get(index, ()) if index >= 0 else ()
        result = passed
        for place, (state, number, rule) in enumerate(bound):
            if not (rule.through and state.runs(rule)):
                continue
            site = self._names[index].id
            try:
                if hook.unfit:
                    message = f"rule {rule.name!r} cannot act at {site!r}: {hook.unfit}"
                    raise RuleError(message)  # noqa: TRY301  # to be completed below
                new = apply_through(rule, result, received, state.moment(number, site))
            except RuleError as error:
                raise RuleError(self.with_done(error)) from (error.__cause__ or error)
            changed: Any = None
            if new is not None:
                before = new if result[0] is None else result[0]
                changed = state.audit.note((number, site), {"": before}, {"": new})
                result = (new,)
            self.tally.note((index, place), changed)
        if result is passed:
            return None
        self.rules.note(self._names[index].id)
        return result

    def with_done(self, error: RuleError) -> str:
        """The message of an error, with what was rewritten before it."""
        done = self.rules.done if self.rules.backward == current_backward() else []
        if not done:
            return f"{error}. No other site was rewritten in this backward pass; it stops here."
        return (
            f"{error}. The backward pass stops here, half of it rewritten: at {', '.join(done)}. Clear the gradients "
            "with zero_grad() before you go on."
        )
