"""Does a symbolic trace say what the eager front end saw?  Call by call, constant by constant.

Calls that return no tensor (sizes, shapes, arithmetic on them) are nodes of a trace only; the eager record holds
their results as constants.  Everything else must be the same call of the same function in the same module on the same
values.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from fxgrad.capture.captured import Call, CallGraph, Opaque, ParameterRef, Ref, constant
from fxgrad.capture.names import METADATA, canonical, in_place, op_word
from fxgrad.capture.proxies import set_grad


class _Unknown(NamedTuple):
    """A value that is no tensor: known when the graph runs."""


class _Several(NamedTuple):
    """What a call returned that holds several tensors."""

    call: int
    position: str


class _Built(NamedTuple):
    """A named tuple or dataclass put together from values."""

    items: tuple[Any, ...]


_UNKNOWN = _Unknown()
_NO_FACTS: Mapping[str, Any] = {"path": "", "type": "", "source": None, "grad_enabled": True, "spans": ()}


class DisagreementError(Exception):
    """Where trace and record differ, in words."""


def agree(graph: fx.Graph, call_graph: CallGraph) -> dict[fx.Node, int]:
    """Which call of the record each node of the trace is.  Probes in it are taken for what they return.

    Raises:
        DisagreementError: they differ; the message says where.
    """
    return _Comparison(call_graph).run(graph)


def node_word(node: fx.Node) -> str:
    """The op word of a node of a trace."""
    if node.op == "call_method":
        return canonical(str(node.target))
    if node.target is getattr:
        return str(node.args[1])
    return op_word(node.target)  # type: ignore[arg-type]


def node_stem(node: fx.Node) -> str:
    """The node key without its call index."""
    if node.op == "call_module":
        return str(node.target)
    return f"{facts_of(node)['path']}/{node_word(node)}"


def facts_of(node: fx.Node) -> Mapping[str, Any]:
    """Our facts on a node; of one that a user put into the graph, what is true of it there."""
    facts: Mapping[str, Any] = node.meta.get("fxgrad", _NO_FACTS)
    return facts


def is_probe(node: fx.Node) -> bool:
    """Whether a node is a probe, which hands on what it takes."""
    return bool(getattr(node.target, "fxgrad_probe", False))


class _Comparison:
    def __init__(self, call_graph: CallGraph) -> None:
        self.calls = call_graph.calls
        self.next = 0
        self.env: dict[fx.Node, Any] = {}
        self.moved: dict[Ref, Ref] = {}
        self.found: dict[fx.Node, int] = {}

    def run(self, graph: fx.Graph) -> dict[fx.Node, int]:
        for node in graph.nodes:
            if node.op == "placeholder":
                self._take(node, "placeholder")
            elif node.op == "get_attr":
                self.env[node] = ParameterRef(str(node.target))
            elif node.op == "output":
                self._output(node)
            elif isinstance(node.target, type):
                self.env[node] = _Built((*node.args, *node.kwargs.values()))
            elif is_probe(node):
                self.env[node] = self.env[node.args[0]]
            elif node.target is not set_grad:
                self._call(node)
        if self.next != len(self.calls):
            message = f"the record has {self.calls[self.next].key_stem} where the trace has ended"
            raise DisagreementError(message)
        return self.found

    def _take(self, node: fx.Node, op: str) -> None:
        call = self._peek()
        if call is None or call.op != op:
            message = f"the trace has {node.name} ({node.op}) where the record has {call.key_stem if call else 'ended'}"
            raise DisagreementError(message)
        self._accept(node, call)

    def _peek(self) -> Call | None:
        return self.calls[self.next] if self.next < len(self.calls) else None

    def _call(self, node: fx.Node) -> None:
        call = self._peek()
        if call is not None and call.op == "external":
            message = f"{call.key_stem} ({call.source}) is code that no trace can hold"
            raise DisagreementError(message)
        stem = node_stem(node)
        if call is not None and call.key_stem == stem and self._same_arguments(node, call):
            self._check_mode(node, call)
            self._accept(node, call)
            return
        if not self._no_tensor(node):
            seen = f"{call.key_stem} ({call.source})" if call is not None else "ended"
            message = f"the trace has {stem} ({facts_of(node)['source']}) where the model ran {seen}"
            if call is not None and call.key_stem == stem:
                message = (
                    f"the arguments of {stem} ({call.source}) differ: {_shown(node.args)} in the trace, "
                    f"{_shown(call.args)} in the model's own run before"
                )
            raise DisagreementError(message)
        self.env[node] = self._element(node)

    def _check_mode(self, node: fx.Node, call: Call) -> None:
        if facts_of(node)["grad_enabled"] != call.grad_enabled:
            message = f"gradients are on in one and off in the other at {call.key_stem} ({call.source})"
            raise DisagreementError(message)

    def _accept(self, node: fx.Node, call: Call) -> None:
        number = self.next
        self.next += 1
        self.found[node] = number
        positions = [output.position for output in call.outputs]
        self.env[node] = Ref(number, "") if positions == [""] else _Several(number, "")
        for output, before in zip(call.outputs, call.same_object, strict=True):
            if before is not None:
                self.moved[before] = Ref(number, output.position)
        if in_place(call.word) and call.args and isinstance(call.args[0], Ref):
            self.moved[call.args[0]] = Ref(number, "")

    def _element(self, node: fx.Node) -> Any:
        """What a node that the record doesn't hold stands for: an element of several tensors, or no tensor."""
        if node_word(node) == "getitem" and isinstance(node.args[0], fx.Node):
            owner, index = self.env[node.args[0]], node.args[1]
            if isinstance(owner, _Several):
                owner = self._parts(owner)
            if isinstance(owner, _Built) and isinstance(index, slice):
                simple = not any(isinstance(part, fx.Node) for part in (index.start, index.stop, index.step))
                return _Built(owner.items[index]) if simple else _UNKNOWN
            if isinstance(owner, _Built) and isinstance(index, int) and -len(owner.items) <= index < len(owner.items):
                return owner.items[index]
        return _UNKNOWN

    def _parts(self, owner: _Several) -> _Built:
        """The elements of a tuple or list that a call returned."""
        known = {output.position for output in self.calls[owner.call].outputs}
        parts: list[Ref | _Several] = []
        while any(position.startswith(f"{owner.position}[{len(parts)}]") for position in known):
            position = f"{owner.position}[{len(parts)}]"
            parts.append(Ref(owner.call, position) if position in known else _Several(owner.call, position))
        return _Built(tuple(parts))

    def _no_tensor(self, node: fx.Node) -> bool:
        word = node_word(node)
        if word in METADATA:
            return True
        inputs = [self.env[used] for used in node.all_input_nodes]
        if word == "getitem" and inputs and isinstance(inputs[0], (_Several, _Built, _Unknown)):
            return True
        if node.op == "call_method" and word == "item":
            return True
        return bool(inputs) and all(isinstance(value, _Unknown) for value in inputs)

    def _output(self, node: fx.Node) -> None:
        call = self._peek()
        if call is None or call.op != "output":
            message = f"the trace has ended where the model ran {call.key_stem if call else 'nothing'}"
            raise DisagreementError(message)
        if not self._same(node.args[0], call.args[0]):
            message = "the trace returns other values than the model did"
            raise DisagreementError(message)
        self._accept(node, call)

    # ---- arguments -------------------------------------------------------------------------------------------

    def _same_arguments(self, node: fx.Node, call: Call) -> bool:
        args = list(node.args)
        seen = list(call.args)
        if node.target is getattr:
            args = args[:1]
        if dict(node.kwargs).keys() != call.kwargs.keys() or len(args) != len(seen):
            return self._same_when_bound(node, call)
        if not all(self._same(node.kwargs[key], value) for key, value in call.kwargs.items()):
            return False
        if all(self._same(one, two) for one, two in zip(args, seen, strict=True)):
            return True
        commutes = call.word in ("add", "mul") and len(args) == 2  # noqa: PLR2004  # 2 * x runs as x * 2
        return commutes and self._same(args[0], seen[1]) and self._same(args[1], seen[0])

    def _same_when_bound(self, node: fx.Node, call: Call) -> bool:
        """Compare by parameter: torch's Python functions hand their defaults on when they are observed."""
        if not isinstance(call.function, types.FunctionType):
            return False
        try:
            signature = inspect.signature(call.function)
            traced = signature.bind(*node.args, **node.kwargs)
            seen = signature.bind(*call.args, **call.kwargs)
        except (TypeError, ValueError):
            return False
        traced.apply_defaults()
        seen.apply_defaults()
        return all(self._same(traced.arguments[name], seen.arguments[name]) for name in signature.parameters)

    def _same(self, traced: Any, seen: Any) -> bool:
        if isinstance(traced, fx.Node):
            value = self.env[traced]
            return self._same_value(value, seen)
        if isinstance(traced, (Ref, _Several)):
            return self._same_value(traced, seen)
        if isinstance(traced, (tuple, list)):
            fits = isinstance(seen, (tuple, list)) and len(traced) == len(seen)
            return fits and all(self._same(one, two) for one, two in zip(traced, seen, strict=True))
        if isinstance(traced, dict):
            fits = isinstance(seen, dict) and list(map(str, traced)) == list(seen)
            return fits and all(self._same(one, two) for one, two in zip(traced.values(), seen.values(), strict=True))
        if isinstance(traced, slice):
            return isinstance(seen, slice) and all(
                self._same(getattr(traced, part), getattr(seen, part)) for part in ("start", "stop", "step")
            )
        held = constant(traced)
        return type(held) is type(seen) and bool(held == seen or held != held)  # noqa: PLR0124  # NaN is NaN here

    def _same_value(self, value: Any, seen: Any) -> bool:
        if isinstance(value, _Unknown):
            return not _holds_tensor(seen)
        if isinstance(value, _Several):
            return self._whole(value, seen)
        if isinstance(value, _Built):
            items = tuple(seen.values()) if isinstance(seen, dict) else seen
            return self._same(value.items, items)
        return bool(self._current(value) == seen)

    def _whole(self, value: _Several, seen: Any) -> bool:
        """A tuple handed on as it was returned."""
        if isinstance(seen, (tuple, list)):
            return all(
                self._whole(_Several(value.call, f"{value.position}[{index}]"), item) for index, item in enumerate(seen)
            )
        return isinstance(seen, Ref) and self._current(Ref(value.call, value.position)) == seen

    def _current(self, value: Any) -> Any:
        while value in self.moved and self.moved[value] != value:
            value = self.moved[value]
        return value


def _shown(args: Any) -> str:
    """Arguments with their constants and a word for each tensor, short."""
    words = ["tensor" if isinstance(a, (fx.Node, Ref, ParameterRef)) else repr(a)[:40] for a in args]
    return f"({', '.join(words)})"


def _holds_tensor(seen: Any) -> bool:
    if isinstance(seen, (tuple, list)) and not isinstance(seen, (Ref, ParameterRef, Opaque)):
        return any(_holds_tensor(item) for item in seen)
    return isinstance(seen, (Ref, ParameterRef)) or (isinstance(seen, Opaque) and seen.text == "tensor")
