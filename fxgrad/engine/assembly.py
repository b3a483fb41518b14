"""From what was kept of a backward event to a ``GradientFlow``: the one copy to the host happens here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from fxgrad.capture.captured import CallGraph, ParameterRef, Ref, SiteSpec
from fxgrad.capture.names import dtype_word
from fxgrad.engine.failing import failure_of
from fxgrad.record.reading import Measured, read_event
from fxgrad.record.recorder import EventRecord
from fxgrad.schema import (
    REASONS,
    BlindSpot,
    BufferRecord,
    CaptureReport,
    Consumer,
    Edge,
    EventInfo,
    GradientFlow,
    Level,
    Node,
    ParameterRecord,
    Reason,
    Rewritten,
    Site,
    Statistics,
)

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord

#: Stands for the output position of a blind spot that is no output: what happens inside of an external node.
INSIDE = "(inside)"
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_CUTS = frozenset({"detach", "detach_", "data"})


def assemble(event_record: EventRecord, loss: str, level: Level) -> GradientFlow:
    """The flow of one backward event through one forward call."""
    forward_record = event_record.forward_record
    call_graph: CallGraph = forward_record.call_graph
    parameters: list[tuple[int, tuple[str, ...], Tensor]] = forward_record.parameters
    frozen_names = {name for place in forward_record.frozen_places for name in parameters[place][1]}
    forward = forward_record.values
    measured = read_event(event_record, None if forward is None else forward.taken)
    sites = _Sites(call_graph, forward_record, event_record, measured, frozen_names)
    report: CaptureReport = forward_record.report
    return GradientFlow(
        nodes=call_graph.nodes,
        sites=tuple(sites.site(number, spec) for number, spec in enumerate(call_graph.sites)),
        edges=sites.marked(call_graph.edges if forward_record.edges is None else sites.edges()),
        parameters=_parameters(event_record, parameters, measured),
        blind_spots=(*sites.blind_spots(), *sites.blind_edges()),
        calls=call_graph.module_calls,
        capture=dataclasses.replace(report, asked=call_graph.asked),
        event=event_of(event_record, loss, level),
        buffers=() if forward is None else _buffers(forward.buffers, measured.state[len(parameters) :]),
    )


def event_of(event_record: EventRecord, loss: str, level: Level) -> EventInfo:
    """Which backward event it is."""
    forward_record = event_record.forward_record
    return EventInfo(
        event_record.event,
        forward_record.number,
        loss,
        level,
        "node" if forward_record.edges is None else "edge",
        values=forward_record.values is not None,
        accumulating=forward_record.accumulating,
        failed=failure_of(event_record),
        differentiated=forward_record.differentiated,
        loss_ops=forward_record.call_graph.loss or (),
    )


def reading_of(forward_record: ForwardRecord, number: int) -> int | None:
    """Which site's hook has measured a site: that of the first with the very same tensor; None for a part only."""
    while number in forward_record.same:
        number = forward_record.same[number]
    spec = forward_record.graph.sites[number]
    lost = Ref(spec.call, spec.output.position) in forward_record.graph.lost
    return None if lost or number in forward_record.unmeasurable else number


class _Sites:
    """Sites and blind spots of one forward record."""

    def __init__(
        self,
        call_graph: CallGraph,
        forward_record: ForwardRecord,
        event_record: EventRecord,
        measured: Measured,
        frozen: set[str],
    ) -> None:
        self.call_graph = call_graph
        self.forward_record = forward_record
        self.event_record = event_record
        self.found = measured.sites
        self.values = dict(enumerate(measured.values))
        for one, other in forward_record.same.items():  # the native recorder takes a tensor once
            self.values[one] = self.values.get(one) or self.values.get(other)
        self.activity, self.channels = measured.activity, measured.channels
        self.frozen = frozen
        self.number = call_graph.site_numbers
        self.failures = event_record.failures
        self.source = {site: self._first(site) for site in forward_record.same}
        self.consumers: dict[Ref, list[int]] = {}
        for number, call in enumerate(call_graph.calls):
            for _, ref in call.uses():
                self.consumers.setdefault(ref, []).append(number)
        self.reasons: dict[Ref, tuple[Reason, str]] = {}
        self.cuts: dict[Ref, str] = {}
        self._explain()

    def statistics(self, number: int) -> Statistics | None:
        """Statistics of a site; None for one whose hook saw a part only."""
        reading = reading_of(self.forward_record, number)
        return self.found[reading] if reading is not None and reading < len(self.found) else None

    def _first(self, site: int) -> int:
        """The site with a hook whose value is the very tensor that ``site`` is."""
        while site in self.forward_record.same:
            site = self.forward_record.same[site]
        return site

    def site(self, number: int, spec: SiteSpec) -> Site:
        """The schema's site."""
        output = spec.output
        reading = self.event_record.readings[number] if number < len(self.event_record.readings) else None
        shape = None if reading is not None else self.forward_record.shape_of(number)
        source = self.source.get(number)
        return Site(
            node=self.call_graph.nodes[spec.call],
            output_position=output.position,
            shape=tuple(reading[1]) if reading is not None else output.shape if shape is None else shape,
            dtype=dtype_word(output.dtype),
            device=str(output.device),
            statistics=self.statistics(number),
            derived_from=None if source is None else self.call_graph.site_id(source),
            rewritten=self._rewritten(number),
            value=None if _is_unwritten(self.call_graph.nodes[spec.call]) else self.values.get(number),
            activity=self.activity.get(number),
            channels=self.channels.get(number),
        )

    def _rewritten(self, number: int) -> Rewritten | None:
        """What rewrite rules made of the gradient of a site."""
        recorded = None if self.forward_record.rewriting is None else self.forward_record.rewriting.recorded(number)
        if recorded is None:
            return None
        rewritten: Rewritten = recorded[0]
        return self._with_norms(rewritten, self.statistics(number), number, recorded[1])

    def _with_norms(self, rewritten: Rewritten, before: Statistics | None, slot: int, behind: int) -> Rewritten:
        """With the statistics of what came to the rules, whose slot is ``slot``, and of what is in that ``behind``."""
        after = self.found[behind] if behind < len(self.found) else None
        reason = rewritten.reason
        if reason is None and (before is None or after is None):
            failed = [self.event_record.failures[n] for n in (slot, behind) if n in self.event_record.failures]
            reason = failed[0] if failed else "no gradient came to the rules in this backward pass"
        return dataclasses.replace(rewritten, before=before, after=after, reason=reason)

    def blind_spots(self) -> tuple[BlindSpot, ...]:
        """Every tensor without a measured gradient, with its reason."""
        spots = [
            BlindSpot(self.call_graph.nodes[ref.call].key, ref.position, reason, detail, cut=self.cuts.get(ref))
            for ref, (reason, detail) in self.reasons.items()
        ]
        spots += [
            BlindSpot(
                self.call_graph.nodes[number].key, INSIDE, "inside_leaf", f"{REASONS['inside_leaf']} ({call.word})"
            )
            for number, call in enumerate(self.call_graph.calls)
            if call.op == "external"
        ]
        return tuple(spots)

    # ---- edges ----------------------------------------------------------------------------------------------

    def edges(self) -> tuple[Edge, ...]:
        """The edges with the part of each: its own measurement, or that of a value which is used only there."""
        measured = {use: self._part(index) for index, use in enumerate(self.call_graph.fan_out)}
        return tuple(
            dataclasses.replace(edge, statistics=measured[use] if use in measured else self._whole(use[0]))
            for edge, use in zip(self.call_graph.edges, self.call_graph.uses, strict=True)
        )

    def marked(self, edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """The edges with what rewrite rules at them did."""
        if self.forward_record.rewriting is None:
            return edges
        found = []
        for edge in edges:
            recorded = self.forward_record.rewriting.recorded_at_edge(edge)
            if recorded is not None:
                rewritten, slot = recorded
                before = self.found[slot] if slot < len(self.found) else None
                rewritten = self._with_norms(rewritten, before, slot, slot + 1)
                edge = dataclasses.replace(edge, rewritten=rewritten)  # noqa: PLW2901
            found.append(edge)
        return tuple(found)

    def _part(self, index: int) -> Statistics | None:
        number = len(self.call_graph.sites) + index
        known = number < len(self.found) and number not in self.event_record.failures
        return self.found[number] if known else None

    def _whole(self, ref: Ref) -> Statistics | None:
        if self.call_graph.hidden or self.forward_record.differentiated:
            return None  # something else than its uses may send back a part
        return self.statistics(self.number[ref]) if ref in self.number else None

    def blind_edges(self) -> Iterator[BlindSpot]:
        """Every unmeasured use of a value whose gradient was measured, with its reason."""
        place = {use: index for index, use in enumerate(self.call_graph.fan_out)}
        for use in self.call_graph.uses if self.forward_record.edges is not None else ():
            ref, call, argument = use
            index = place.get(use)
            known = self._whole(ref) if index is None else self._part(index)
            if known is not None or ref not in self.number or self.statistics(self.number[ref]) is None:
                continue
            reason, more = self._why_no_part(index)
            detail = REASONS[reason] + (f" ({more})" if more else "")
            consumer = Consumer(self.call_graph.nodes[call].key, argument)
            yield BlindSpot(self.call_graph.nodes[ref.call].key, ref.position, reason, detail, consumer)

    def _why_no_part(self, index: int | None) -> tuple[Reason, str]:
        if index is None:
            return "untraceable_use", "something that cannot be seen may use the value too"
        failure = self.event_record.failures.get(len(self.call_graph.sites) + index)
        if failure is not None:
            return "statistic_failed", failure
        reason, detail = self.forward_record.notes.unmeasured.get(index, ("not_reached", ""))
        return cast("Reason", reason), detail

    # ---- why a tensor has no gradient ----------------------------------------------------------------------

    def _explain(self) -> None:
        reached = self._reached()
        for number, call in enumerate(self.call_graph.calls):
            for output in call.outputs:
                ref = Ref(number, output.position)
                site = self.number.get(ref)
                if site is not None and self.statistics(site) is not None:
                    continue
                reason, more = self._reason(ref, site, reached=ref in reached)
                self.reasons[ref] = (reason, REASONS[reason] + (f" ({more})" if more else ""))

    def _reason(  # noqa: PLR0911  # one return a reason, in the order in which they exclude each other
        self, ref: Ref, site: int | None, *, reached: bool
    ) -> tuple[Reason, str]:
        call = self.call_graph.calls[ref.call]
        if site is None:
            return "integer", ""
        if site in self.forward_record.unmeasurable or ref in self.call_graph.lost:
            return "changed_through_view", ""
        if site in self.failures:
            return "statistic_failed", self.failures[site]
        if self.source.get(site) in self.failures:
            return "statistic_failed", self.failures[self.source[site]]
        if not call.grad_enabled:
            return "reentrant_checkpoint" if call.checkpointed else "no_grad_region", ""
        if site not in self.forward_record.not_required:
            return self._not_reached(ref, site, reached=reached)
        if call.word in _CUTS:
            self.cuts[ref] = self.call_graph.nodes[ref.call].key
            return "detached", f"by {self.cuts[ref]}"
        return self._inherited(ref)

    def _not_reached(self, ref: Ref, site: int, *, reached: bool) -> tuple[Reason, str]:
        """Why no gradient came to a value that requires one."""
        if self.event_record.raised is not None:
            return "not_reached", "the backward pass raised before it came here"
        if site in self.forward_record.unprobed:
            return "no_probe", self.forward_record.unprobed[site]
        cut = self._cut_below(ref)
        if cut is not None:
            self.cuts[ref] = cut
            return "detached", f"all that uses it goes through {cut}"
        return ("not_reached", "") if reached else ("output_unused", "")

    def _cut_below(self, ref: Ref) -> str | None:
        """The key of a node that cuts the gradient between an unreached value and what the loss uses, if any."""
        queue, seen, cut = [ref], {ref}, None
        without = {None, *self.forward_record.not_required}
        while queue:
            for number in self.consumers.get(queue.pop(), ()):
                call = self.call_graph.calls[number]
                if call.op == "output":
                    return None
                below = [Ref(number, out.position) for out in call.outputs]
                # An integer or boolean output carries no gradient on either.
                if below and all(self.number.get(b) in without for b in below):
                    cut = cut or self.call_graph.nodes[number].key
                    continue
                queue += [b for b in below if b not in seen]
                seen.update(below)
        return cut

    def _inherited(self, ref: Ref) -> tuple[Reason, str]:
        """Why nothing that a value depends on requires a gradient."""
        call = self.call_graph.calls[ref.call]
        causes = [self.reasons[used] for _, used in call.uses() if used in self.reasons]
        for wanted in ("detached", "no_grad_region", "reentrant_checkpoint"):
            if any(reason == wanted for reason, _ in causes):
                cut = next(used for _, used in call.uses() if self.reasons.get(used, ("", ""))[0] == wanted)
                key = self.cuts[ref] = self.cuts.get(cut, self.call_graph.nodes[cut.call].key)
                return "detached", f"by {key}" if wanted == "detached" else f"it depends on {key}, computed without"
        direct = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, ParameterRef)]
        if call.frozen or any(v.name in self.frozen for v in direct) or any(r == "frozen" for r, _ in causes):
            return "frozen", ""
        return "no_grad_required", ""

    def _reached(self) -> set[Ref]:
        """Values from which a measured value, or the model's output, can be reached along the graph."""
        reached: set[Ref] = set()
        good: set[int] = set()
        for number in range(len(self.call_graph.calls) - 1, -1, -1):
            call = self.call_graph.calls[number]
            refs = [Ref(number, output.position) for output in call.outputs]
            for ref in refs:
                site = self.number.get(ref)
                measured = site is not None and site < len(self.found) and self.found[site] is not None
                if (
                    measured
                    or (site is not None and self.statistics(site) is not None)
                    or any(consumer in good for consumer in self.consumers.get(ref, ()))
                ):
                    reached.add(ref)
            if any(ref in reached for ref in refs):
                good.add(number)
        return reached


def _parameters(
    event_record: EventRecord, parameters: Sequence[tuple[int, tuple[str, ...], Tensor]], measured: Measured
) -> tuple[ParameterRecord, ...]:
    own, found, values = event_record.parameters, measured.parameters, dict(enumerate(measured.state))
    window = event_record.forward_record.window
    rewritten: dict[int, Rewritten] = {} if window is None else window.recorded()
    reduced = event_record.forward_record.reduced  # all of them, or none in this pass
    came = any(n < len(found) and found[n] is not None for n, names, _ in parameters if names[0] in reduced)
    frozen, records = event_record.forward_record.frozen_places, []
    for place, (number, names, parameter) in enumerate(parameters):
        statistics = found[number] if number < len(found) else None
        reason: Reason | None = None
        if statistics is None:
            reason = "frozen" if place in frozen else "not_reached"
            if reason == "not_reached" and names[0] in reduced and not came:
                reason = "not_reduced"
            if own is not None and number in own.failures:
                reason = "statistic_failed"
        records.append(ParameterRecord(
            name=names[0], aliases=names[1:], shape=tuple(parameter.shape), dtype=dtype_word(parameter.dtype),
            device=str(parameter.device), requires_grad=place not in frozen, statistics=statistics, reason=reason,
            value=values.get(place), registered=names[0] not in event_record.forward_record.outside,
            rewritten=rewritten.get(id(parameter)),
        ))  # fmt: skip
    return tuple(records)


def _is_unwritten(node: Node) -> bool:
    """Whether a node returns memory that nobody has written to yet: its values say nothing."""
    return node.key.rpartition("/")[2].partition("#")[0] in _UNWRITTEN


def _buffers(buffers: Sequence[tuple[str, Tensor]], values: Sequence[Statistics | None]) -> tuple[BufferRecord, ...]:
    return tuple(
        BufferRecord(name, tuple(buffer.shape), dtype_word(buffer.dtype), str(buffer.device), value)
        for (name, buffer), value in zip(buffers, values, strict=False)
        if value is not None
    )
