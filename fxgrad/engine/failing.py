"""Where a backward pass that raised has stopped, and why, as far as the graph of calls and the record tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxgrad.capture.captured import Call, CallGraph, ParameterRef, Ref, facts_of_arguments
from fxgrad.capture.names import in_place
from fxgrad.record.raising import Seen
from fxgrad.record.recorder import EventRecord
from fxgrad.schema import Failure, FailureCause

_CHANGED = "modified by an inplace operation"
_FREED = "backward through the graph a second time"
_RETURNED = ("returned an invalid gradient", "returned an incorrect number of gradients")
_SHAPE = re.compile(r"\[[\w.]+ \[(?P<shape>[\d, ]*)\]\](?:, which is output \d+ of (?P<maker>\w+))?")
_LONGEST = 300  # characters of an exception's message
_MAX_NORM = "max_norm"


@dataclass(frozen=True, slots=True)
class _Cause:
    word: FailureCause
    detail: str
    culprit: str | None = None
    value: str | None = None


def failure_of(event_record: EventRecord) -> Failure | None:
    """What is known of the backward pass, for the flow of one forward call; None where it did not raise."""
    raised = event_record.raised
    if raised is None:
        return None
    own, seen = _Reached(event_record), raised.exception
    reached = [
        found
        for part in raised.parts
        if part.forward_record.call_graph is not None and (found := _Reached(part)).last >= 0
    ]
    stop = reached[0] if reached else own  # the earliest forward call: its nodes come last in a backward pass
    cause = _cause(stop, seen, reached[1:])
    return Failure(
        exception=None if seen is None else seen.type,
        message=None if seen is None else _first_line(seen.message),
        site=own.site,
        node=own.call_graph.nodes[own.stopped].key
        if stop.event_record is event_record and own.stopped is not None
        else None,
        cause=cause.word,
        detail=cause.detail,
        culprit=cause.culprit if stop.event_record is event_record else None,
        value=cause.value,
    )


def _first_line(message: str) -> str:
    line = (message.strip().splitlines() or [""])[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _short(source: str) -> str:
    """``file:line`` without the folders."""
    return source.replace(chr(92), "/").rpartition("/")[2]


class _Reached:
    """How far the pass came in one forward call.

    Attributes:
        last: number of the call whose result was the last that a gradient reached; -1 where there is none.
        stopped: number of the call at which the pass stopped; None where all that it had come to was done.
    """

    def __init__(self, event_record: EventRecord) -> None:
        event_record.finish()
        self.event_record = event_record
        self.call_graph: CallGraph = event_record.forward_record.call_graph
        self.sites = {
            n
            for n, reading in enumerate(event_record.readings)
            if reading is not None and n < len(self.call_graph.sites)
        }
        # A node runs before those that were made before it, so that the first call is the last that was reached.  The
        # gradient of an argument may come at any time.
        calls = {self.call_graph.sites[n].call for n in self.sites}
        inner = [number for number in calls if self.call_graph.calls[number].op != "placeholder"]
        self.last = min(inner, default=max(calls, default=-1))
        self.stopped = self.last if self.last >= 0 and self._unfinished(self.last) else None

    @property
    def site(self) -> str | None:
        """``Site.id`` of the last site that was reached."""
        here = [n for n in self.sites if self.call_graph.sites[n].call == self.last]
        return self.call_graph.site_id(min(here)) if here else None

    def _unfinished(self, number: int) -> bool:
        """Whether a call has yet to send back a gradient to something that it takes."""
        call, forward_record = self.call_graph.calls[number], self.event_record.forward_record
        unknown = {*forward_record.not_required, *forward_record.unmeasurable, *forward_record.unprobed}
        for _, ref in call.uses():
            site = self.call_graph.site_numbers.get(ref)
            while site is not None and site in forward_record.same:
                site = forward_record.same[site]
            if site is not None and site not in unknown and site not in self.sites and ref not in self.call_graph.lost:
                return True
        readings = self.event_record.parameters.readings if self.event_record.parameters is not None else []
        names = set(facts_of_arguments(call)[1])
        return any(
            parameter.requires_grad and names.intersection(known) and (n >= len(readings) or readings[n] is None)
            for n, known, parameter in forward_record.parameters
        )

    def words(self, number: int) -> str:
        """A call with its source line."""
        node = self.call_graph.nodes[number]
        return node.key if node.source is None else f"{node.key} ({_short(node.source)})"

    def named(self, ref: Ref) -> str:
        """The id of a value."""
        return self.call_graph.nodes[ref.call].key + ref.position


def _cause(stop: _Reached, seen: Seen | None, later: list[_Reached]) -> _Cause:
    if seen is None:
        return _inferred(stop, later)
    if _FREED in seen.message:
        return _freed(stop, later)
    if _CHANGED in seen.message:
        return _changed(stop, _Named.by(seen.message)) or _Cause(
            "changed_in_place", "something that it needs was changed in place"
        )
    said = _first_line(seen.message) or "it said no more"
    if any(words in seen.message for words in _RETURNED):
        return _Cause("custom_function", said)
    if seen.where is not None:
        function = stop.stopped is not None and stop.call_graph.calls[stop.stopped].op == "external"
        return _Cause("custom_function" if function else "python", f"{said}, raised at {_short(seen.where)}")
    return _Cause("unknown", said)


def _inferred(stop: _Reached, later: list[_Reached]) -> _Cause:
    """Without the exception."""
    if stop.event_record.freed:
        return _freed(stop, later)
    changed = _changed(stop, None)
    if changed is not None:
        return changed
    if stop.stopped is not None and stop.call_graph.calls[stop.stopped].op == "external":
        return _Cause("custom_function", "its own backward raised, or returned what torch does not take")
    return _Cause("unknown", "fxgrad did not see the exception")


# ---- a freed graph -------------------------------------------------------------------------------------------------


def _freed(stop: _Reached, later: list[_Reached]) -> _Cause:
    if not later:
        return _Cause("second_backward", "the backward pass went through this forward call a second time")
    first = max((stop.call_graph.sites[n].call for n in stop.sites), default=stop.last)
    value = stop.named(Ref(first, stop.call_graph.calls[first].outputs[0].position))
    entry = _entry(later[0])
    into = "" if entry is None else f" as {entry}"
    detail = (
        f"the backward pass went through an earlier forward call a second time: its {stop.words(first)} was carried "
        f"on and used again in forward call {later[0].event_record.forward_record.number}{into}"
    )
    return _Cause("second_backward", detail, value=value)


def _entry(later: _Reached) -> str | None:
    """Where a later forward call takes a value of an earlier one: an argument, or what no call of its own made."""
    call_graph = later.call_graph
    for number in sorted({call_graph.sites[n].call for n in later.sites}):
        call = call_graph.calls[number]
        if call.op == "placeholder" or (call.op == "external" and not any(call.refs)):
            return call_graph.nodes[number].key
    return None


# ---- changed in place ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Named:
    """What torch says of the tensor that was changed: its shape, and the autograd operation that made it."""

    shape: tuple[int, ...]
    maker: str

    @staticmethod
    def by(message: str) -> _Named | None:
        found = _SHAPE.search(message)
        if found is None:
            return None
        return _Named(tuple(int(n) for n in found["shape"].split(",") if n.strip()), (found["maker"] or "").lower())


def _changed(stop: _Reached, said: _Named | None) -> _Cause | None:
    """Which of the things that the call at which it stopped needs was changed; ``said``: what torch says of it."""
    if stop.stopped is None:
        return None
    call = stop.call_graph.calls[stop.stopped]
    needs = [*(ref for _, ref in call.uses()), *(Ref(stop.stopped, output.position) for output in call.outputs)]
    memory = _memories(stop.call_graph)
    own = {memory[ref]: ref for ref in reversed(needs)}
    for number in range(stop.stopped + 1, len(stop.call_graph.calls)):
        for ref in stop.call_graph.calls[number].changed:
            if memory[ref] in own:
                return _by_call(stop, number, stop.named(own[memory[ref]]))
    names = (*facts_of_arguments(call)[1], *_seen_through_views(stop.call_graph, [memory[ref] for ref in needs]))
    for number, name in _written(stop.call_graph, names):
        if number != stop.stopped:
            return _by_call(stop, number, name)
    for name in names:
        if name in stop.event_record.forward_record.changed:
            return _from_outside(stop, name)
    if said is None:
        return None
    fitting = [ref for ref in needs if _shape(stop, ref) == said.shape]
    made = [ref for ref in fitting if said.maker.startswith(stop.call_graph.calls[ref.call].word.replace("_", ""))]
    value = next((stop.named(ref) for ref in (*made, *fitting)), None)
    what = value or f"a tensor of shape {said.shape} that it had saved"
    return _Cause("changed_in_place", f"{what} was changed in place outside of the model's forward", value=value)


def _shape(stop: _Reached, ref: Ref) -> tuple[int, ...] | None:
    site = stop.call_graph.site_numbers.get(ref)
    return None if site is None else stop.event_record.forward_record.shape_of(site)


class _Memories(dict[Ref, Ref]):
    """Values without an entry have memory of their own."""

    def __missing__(self, ref: Ref) -> Ref:
        return ref


def _memories(call_graph: CallGraph) -> _Memories:
    """By value, the first value that has the same memory: that of which it is a view, or the very same tensor."""
    found = _Memories()
    for number, call in enumerate(call_graph.calls):
        for output, same, base in zip(call.outputs, call.same_object, call.bases, strict=False):
            earlier = same if base is None else base
            if earlier is not None:
                found[Ref(number, output.position)] = found[earlier]
    return found


def _seen_through_views(call_graph: CallGraph, memories: list[Ref]) -> list[str]:
    """Names of the parameters and buffers of which these are views."""
    found: dict[Ref, list[str]] = {}
    for call in call_graph.calls:
        for base in call.bases:
            if base is not None and base.call < 0:
                found.setdefault(base, []).extend(facts_of_arguments(call)[1])
    return [name for memory in memories for name in found.get(memory, ())]


def _by_call(stop: _Reached, number: int, value: str) -> _Cause:
    call = stop.call_graph.calls[number]
    how = " (max_norm scales rows of the table in place)" if _max_norm(call) else ""
    return _Cause(
        "changed_in_place",
        f"{value} was changed in place by {stop.words(number)}{how}, and its backward needs it as it was",
        culprit=stop.call_graph.nodes[number].key, value=value,
    )  # fmt: skip


def _from_outside(stop: _Reached, name: str) -> _Cause:
    changed, listed = stop.event_record.forward_record.changed, stop.event_record.forward_record.parameters
    trained = sum(parameter.requires_grad for _, _, parameter in listed)
    most = len(changed) > 1 and 2 * len(changed) >= trained
    by = "as an optimizer step does" if most else "by an optimizer step or another write"
    return _Cause(
        "changed_in_place", f"parameter {name} was changed in place between the forward and the backward pass, {by} "
        f"({len(changed)} of {trained} trainable parameters were)", value=name,
    )  # fmt: skip


def _written(call_graph: CallGraph, names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Calls that change a parameter or buffer among ``names``."""
    for number, call in enumerate(call_graph.calls):
        if call.args and isinstance(call.args[0], ParameterRef) and in_place(call.word) and call.args[0].name in names:
            yield number, call.args[0].name
        elif _max_norm(call):
            yield from ((number, name) for name in facts_of_arguments(call)[1] if name in names)


def _max_norm(call: Call) -> bool:
    """Whether it is an embedding that scales rows of its table in place."""
    limit: Any = None
    if call.op == "call_module":
        limit = next((one.number for one in call.settings if one.argument == _MAX_NORM), None)
    elif call.word in ("embedding", "embedding_bag"):
        limit = call.kwargs.get(_MAX_NORM, call.args[3] if len(call.args) > 3 else None)  # noqa: PLR2004
    return isinstance(limit, (int, float))


__all__ = ["failure_of"]
