"""Edge sites: the part of a value's gradient that each of its consumers sends back.

Nothing is put into the forward pass.  An autograd node that a consumer made holds, among its inputs, the very edge to
the value; a hook of that node sees what it sends there.  The nodes of one consumer are those between its outputs and
its inputs, so a call that takes a value through several autograd nodes is found as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fxgrad.torch_support.private import current_backward

if TYPE_CHECKING:
    from fxgrad.capture.captured import Call, Ref
    from fxgrad.probes.forward_record import ForwardRecord

_MOST = 512  # autograd nodes that one call may have made; the longest found in stock models is an LSTM's, about 40
Place = tuple[Node, int]  # an autograd node, and which of its outputs
Unmeasured = tuple[str, str]  # a word of REASONS, and more in words


class EdgeNotes:
    """Where in the autograd graph the values of one forward call are.

    Attributes:
        at: by site; emptied when the call's edges have their hooks.
        unmeasured: by edge number, why it has no hook.
    """

    __slots__ = ("at", "relevant", "unmeasured")

    def __init__(self, relevant: frozenset[int] | None) -> None:
        """``relevant``: sites whose place matters; None: all, since the call graph is not known yet."""
        self.relevant = relevant
        self.at: dict[int, Place] = {}
        self.unmeasured: dict[int, Unmeasured] = {}

    def note(self, site: int, value: Tensor) -> None:
        """A value is there.  It requires grad."""
        if self.relevant is not None and site not in self.relevant:
            return
        node = value.grad_fn
        if node is not None:
            self.at[site] = (node, value.output_nr)
        elif torch.is_grad_enabled():  # a leaf; inside of a custom function nothing has a place
            with contextlib.suppress(RuntimeError):  # a nested leaf of layout strided: torch cannot say where it is
                self.at[site] = (get_gradient_edge(value).node, 0)


class EdgeHook:
    """The hook of an autograd node for one of its inputs.  Observes, returns None, keeps nothing."""

    __slots__ = ("forward_record", "index", "position")
    __torch_unserializable__ = True

    def __init__(self, forward_record: ForwardRecord, index: int, position: int) -> None:
        self.forward_record = forward_record
        self.index = index
        self.position = position

    def __call__(self, passed: Sequence[Tensor | None], received: object) -> None:
        """Hand on what the node passes back over this edge."""
        del received
        gradient = passed[self.position]
        if gradient is not None:
            forward_record = self.forward_record
            forward_record.sink.observe(forward_record, self.index, gradient)


class PartsHook:
    """For a call that sends back a value's part in several pieces: their sum is observed when the last one is there."""

    __slots__ = ("count", "forward_record", "index", "missing", "pieces", "task")
    __torch_unserializable__ = True

    def __init__(self, forward_record: ForwardRecord, index: int, count: int) -> None:
        self.forward_record = forward_record
        self.index = index
        self.count = count
        self.task: int | None = None
        self.missing = 0
        self.pieces: list[Tensor] = []

    def take(self, gradient: Tensor | None) -> None:
        """One of the pieces."""
        if self.task != current_backward() or not self.missing:
            self.task, self.missing, self.pieces = current_backward(), self.count, []
        self.missing -= 1
        if gradient is not None:
            self.pieces.append(gradient)
        if self.missing or not self.pieces:
            return
        with torch.no_grad():
            total = self.pieces[0] if len(self.pieces) == 1 else torch.stack(self.pieces).sum(0)
        self.pieces = []
        forward_record = self.forward_record
        forward_record.sink.observe(forward_record, self.index, total)

    def at(self, position: int) -> Any:
        """The hook of one node."""

        def hook(passed: Sequence[Tensor | None], received: object) -> None:
            del received
            self.take(passed[position])

        return hook


#: Ops whose positional tensor arguments are autograd's inputs in the same order (checked by tests, one by one).
_ORDERED = frozenset({
    "add", "sub", "mul", "div", "pow", "atan2", "matmul", "mm", "bmm", "linear", "cat", "stack", "where", "lerp",
    "addmm", "addcmul", "scaled_dot_product_attention", "bilinear", "mse_loss", "minimum", "maximum", "hypot",
})  # fmt: skip
_LEADING = {"linear": 2, "scaled_dot_product_attention": 3}  # arguments that are in order; a bias, a mask is not
Piece = tuple[Node, int]  # a node, and which of its inputs


class FoundEdge(NamedTuple):
    """Where the part of one edge site arrives: pieces that add up to it.

    ``source``: the site of the value; ``starts``: sites of what the consumer returned, with their autograd nodes.
    """

    number: int
    source: int
    starts: Sequence[tuple[int, Node]]
    pieces: Sequence[Piece]


def hook_edges(forward_record: ForwardRecord) -> None:
    """When a forward call has returned: put a hook on every edge of values that are used more than once."""
    start = len(forward_record.graph.sites)
    try:
        for edge in found_edges(forward_record):
            _put(forward_record, start + edge.number, edge.pieces)
    finally:
        forward_record.notes.at.clear()


def found_edges(forward_record: ForwardRecord) -> Iterator[FoundEdge]:
    """The edges of values that are used more than once; the reasons of the others go into ``unmeasured``."""
    search = _Search(forward_record)
    unmeasured = forward_record.notes.unmeasured
    for ref, consumer, numbers in forward_record.graph.fan_out_groups:
        found = search.pieces(ref, consumer)
        if isinstance(found, list) and len(numbers) > 1 and len(found) != 1:
            call = forward_record.graph.calls[consumer]
            if len(found) != len(numbers) or not _in_order(call, ref):
                found = (
                    "untraceable_use",
                    "it is taken as several arguments, and which is which cannot be told",
                )
        if not isinstance(found, list):
            unmeasured.update(dict.fromkeys(numbers, found))
            continue
        source, starts = search.sites[ref], search.starts(ref, consumer)
        if len(numbers) == 1:
            yield FoundEdge(numbers[0], source, starts, found)
            if len(found) > 1:  # said where they don't come
                unmeasured[numbers[0]] = ("untraceable_use", "it comes in pieces, and one was missing")
            continue
        for number, piece in zip(numbers, found, strict=False):
            yield FoundEdge(number, source, starts, [piece])
        for number in numbers[len(found) :]:
            unmeasured[number] = ("merged_use", "")


def _in_order(call: Call, ref: Ref) -> bool:
    """Whether autograd lists what the call took in the order of its arguments."""
    name = getattr(call.function, "__name__", call.function)
    if call.word not in _ORDERED or str(name).startswith("__r"):
        return False
    further = [*call.args[_LEADING.get(call.word, len(call.args)) :], *call.kwargs.values()]
    return ref not in _refs_in(further)


def _refs_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)) and not hasattr(value, "position"):
            yield from _refs_in(value)
        elif hasattr(value, "position"):
            yield value


def _put(forward_record: ForwardRecord, index: int, pieces: Sequence[Piece]) -> None:
    if len(pieces) == 1:
        node, position = pieces[0]
        node.register_hook(EdgeHook(forward_record, index, position))
        return
    parts = PartsHook(forward_record, index, len(pieces))
    for node, position in pieces:
        node.register_hook(parts.at(position))


_Value = tuple[int, str]  # the number of a call, and the position in what it returned: a ``Ref``


class _Search:
    """Finds the autograd edges that one consumer has to a value."""

    def __init__(self, forward_record: ForwardRecord) -> None:
        self.call_graph = forward_record.graph
        self.forward_record = forward_record
        self.at: Mapping[int, Place] = forward_record.notes.at
        self.sites = cast("Mapping[_Value, int]", self.call_graph.site_numbers)
        self.uses = cast("Mapping[_Value, list[tuple[int, str]]]", self.call_graph.uses_of)

    def pieces(self, ref: _Value, consumer: int) -> list[Piece] | Unmeasured:
        """The edges of call number ``consumer`` to ``ref``, in the order of the arguments, or why there are none."""
        call = self.call_graph.calls[consumer]
        target, outputs = self._of(ref), self._results(consumer)
        if call.op == "output" or target is None or not outputs:
            return self._nowhere(ref, consumer)
        if target in outputs:
            return self._through(consumer)
        borders = self._borders(call)
        if borders is None:
            return ("untraceable_use", "an input of the consumer was changed through a view")
        found = _edges_to(outputs, target, borders)
        if found is None:
            return ("untraceable_use", "the consumer made too many autograd nodes")
        return found or ("detached", f"by {self.call_graph.nodes[consumer].key}")

    def starts(self, ref: _Value, consumer: int) -> list[tuple[int, Node]]:
        """From where the edges of a consumer are found: what it returned, or those who use that very tensor did."""
        target = self._of(ref)
        found = []
        for output in self.call_graph.calls[consumer].outputs:
            result = (consumer, output.position)
            place = self._of(result)
            if place is not None and place != target:
                found.append((self.sites[result], place[0]))
            elif place is not None:
                for user in dict.fromkeys(number for number, _ in self.uses.get(result, ())):
                    found += self.starts(result, user)
        return found

    def _results(self, consumer: int) -> list[Place]:
        outputs = ((consumer, output.position) for output in self.call_graph.calls[consumer].outputs)
        return [found for output in outputs if (found := self._of(output)) is not None]

    def _nowhere(self, ref: _Value, consumer: int) -> Unmeasured:
        """Why a value, or what its consumer returned, has no place in the autograd graph."""
        call = self.call_graph.calls[consumer]
        if call.op == "output":
            return ("used_outside", "")
        results = [(consumer, output.position) for output in call.outputs]
        if any(self._lost(value) for value in (ref, *results)):
            return ("changed_through_view", "")
        if not call.grad_enabled:
            inside = (
                "untraceable_use",
                "it ran without gradients, perhaps inside of a function with a backward of its own",
            )
            return inside if self.call_graph.hidden else ("no_grad_region", "")
        if self._of(ref) is None:
            return ("untraceable_use", "it was computed where no graph was recorded")
        return ("detached", f"by {self.call_graph.nodes[consumer].key}")

    def _lost(self, ref: _Value) -> bool:
        return (
            ref in cast("AbstractSet[_Value]", self.call_graph.lost)
            or self.sites.get(ref) in self.forward_record.unmeasurable
        )

    def _of(self, ref: _Value) -> Place | None:
        site = self.sites.get(ref)
        return None if site is None else self.at.get(site)

    def _through(self, consumer: int) -> list[Piece] | Unmeasured:
        """The consumer returned the very tensor: what it sends back is what its own consumers do."""
        output = self.call_graph.calls[consumer].outputs[0]
        ref = (consumer, output.position)
        total: list[Piece] = []
        for user in dict.fromkeys(number for number, _ in self.uses.get(ref, ())):
            found = self.pieces(ref, user)
            if not isinstance(found, list):
                if found[0] == "detached":
                    continue
                return found
            total += found
        return total or ("output_unused", "")

    def _borders(self, call: Call) -> set[Node] | None:
        """The autograd nodes of the consumer's inputs, where it ends; None where one of them is not known."""
        borders = set()
        for _, ref in call.uses():
            site = self.sites.get(ref)
            if site is None or site in self.forward_record.not_required:
                continue
            place = self._place_of_base(ref) if self._lost(ref) else self.at.get(site)
            if place is None:
                return None
            borders.add(place[0])
        return borders

    def _place_of_base(self, ref: _Value) -> Place | None:
        """Of a view that a call changes in place: where its base is, whose node takes its place in the graph.

        None where the base is not known or is changed by more calls than one, whose parts would be taken together.
        """
        base = self._base(ref)
        if base is None or self._changes[base] != 1:
            return None
        return self._of(base)

    @cached_property
    def _changes(self) -> Counter[Any]:
        """How many changes in place, by calls, each value has seen, itself or through a view."""
        return Counter(
            one for call in self.call_graph.calls for ref in call.changed for one in {ref, self._base(ref)} - {None}
        )

    def _base(self, ref: _Value) -> Any:
        if ref[0] < 0:  # memory that no value is known of
            return None
        call = self.call_graph.calls[ref[0]]
        return next((b for out, b in zip(call.outputs, call.bases, strict=False) if out.position == ref[1]), None)


def _edges_to(outputs: Sequence[Place], target: Place, borders: set[Node]) -> list[Piece] | None:
    """The inputs of nodes between ``outputs`` and ``borders`` that are ``target``, in the order of the inputs.

    None where the consumer made more than ``_MOST`` nodes.
    """
    found: list[Piece] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, int]] = [(node, 0) for node, _ in reversed(outputs)]
    while stack:
        node, position = stack.pop()
        if position == 0:
            if node in seen or node in borders:
                continue
            seen.add(node)
            if len(seen) > _MOST:
                return None
        inputs = node.next_functions or ()  # a custom function whose result nobody kept has none any more
        if position >= len(inputs):
            continue
        stack.append((node, position + 1))
        before, number = inputs[position]
        if before is target[0] and number == target[1]:
            found.append((node, position))
        elif before is not None:
            stack.append((before, 0))
    return found
