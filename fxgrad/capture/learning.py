"""The first run of a graph: node by node, writing down what each returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxgrad.capture.captured import ModuleSpan, Ref
from fxgrad.capture.compare import facts_of, is_probe, node_stem, node_word
from fxgrad.capture.containers import Rebuild
from fxgrad.capture.eager import Session
from fxgrad.capture.names import METADATA
from fxgrad.capture.proxies import set_grad
from fxgrad.capture.symbolic import Span
from fxgrad.capture.values import Values
from fxgrad.torch_support.structure import tensors_in


class Traced(Protocol):
    """A graph with the module calls in it, and what gives its results their container types."""

    graph: fx.Graph
    spans: list[Span]
    rebuild: Rebuild


class LearningRun(Session):
    """Runs a graph once with the eager front end's bookkeeping, so that both make the same call graph.

    Attributes:
        unprobed: nodes that get no hook, since nobody put a probe behind them.
    """

    unprobed: frozenset[fx.Node] = frozenset()

    def run_graph(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
    ) -> tuple[Any, dict[fx.Node, int]]:
        """What the model returns, and which call of the call graph each node is."""
        graph, spans = traced.graph, traced.spans
        self._numbers: dict[fx.Node, int] = {}
        self._line: str | None = None
        self._node: fx.Node | None = None
        self._given = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = self._placeholders(args, kwargs, names)
        values = iter([tensor for _, tensor in tensors_in((args, kwargs))])
        env: dict[fx.Node, Any] = {}
        nodes = list(graph.nodes)
        self._prepare(nodes, spans)
        left = Counter(used for node in nodes for used in node.all_input_nodes)
        left.update(
            self._named[name] for span in spans for name in (*span.inputs, *span.outputs) if name in self._named
        )
        result = None
        for index, node in enumerate(nodes):
            self._enter_spans(node, env)
            if node.op == "placeholder":
                env[node] = next(values)
                self._numbers[node] = index
            elif node.op == "output":
                result = traced.rebuild(_filled(node.args[0], env))
            elif is_probe(node):
                env[node] = env[node.args[0]]
            else:
                self._node = node
                env[node] = self._step(node, env)
            self._leave_spans(node, env, left)
            for used in node.all_input_nodes:
                _drop(used, env, left)
        self._finish(result, inputs)
        self._values = Values()
        return result, self._numbers

    def _prepare(self, nodes: Sequence[fx.Node], spans: Sequence[Span]) -> None:
        """Where each span begins and ends in this graph, which may have been edited."""
        self._named = {node.name: node for node in nodes}
        self._begin: dict[fx.Node, list[int]] = {}
        self._end: dict[fx.Node, list[int]] = {}
        self._module_calls = spans
        self._open: dict[int, tuple[Ref, ...]] = {}
        first: dict[int, fx.Node] = {}
        last: dict[int, fx.Node] = {}
        for node in nodes:
            for span in facts_of(node)["spans"]:
                first.setdefault(span, node)
                last[span] = node
        for span in sorted(first):
            self._begin.setdefault(first[span], []).append(span)
            self._end.setdefault(last[span], []).insert(0, span)  # inner ones, which began later, return earlier

    def _source(self) -> str | None:
        return self._line

    def _has_hook(self, tensor: Tensor, site: int) -> bool:
        node = self._given[len(self.calls) - 1] if self._node is None else self._node
        return node in self.unprobed or super()._has_hook(tensor, site)

    def _step(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        self._line = facts_of(node)["source"]
        if node.op == "get_attr":
            value: Any = self.modules.root
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return value
        if node.op == "call_module":
            return self._step_into_leaf(node, args, kwargs)
        refs = self._refs(args, kwargs)
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target is not set_grad and not isinstance(node.target, type):
            self._write(node, refs, args, kwargs, result)
        return result

    def _step_into_leaf(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.modules.root.get_submodule(str(node.target))
        inputs = self._refs(args, {})
        result = module(*args, **kwargs)
        place = self.modules.places[id(module)]
        if any(True for _ in tensors_in(result)):
            self._record_leaf(place, inputs, args, kwargs, result)
            self._numbers[node] = len(self.calls) - 1
        given = tuple(ref for ref in inputs if ref is not None)
        returned = tuple(ref for ref in self._refs((result,), {}) if ref is not None)
        self.spans.append(ModuleSpan(place.path, place.type, given, returned))
        return result

    def _write(
        self, node: fx.Node, refs: tuple[Ref | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        word = node_word(node)
        if word in METADATA or (word == "getitem" and not isinstance(args[0], Tensor)):
            return
        found = [("", args[0])] if word == "setitem" else list(tensors_in(result))
        if not found or isinstance(result, torch.Size):
            return
        facts = facts_of(node)
        self._path, self._type = facts["path"], facts["type"]
        if node.target is getattr:
            args = args[:1]
        elif word in ("add", "mul") and len(args) == 2 and not isinstance(args[0], Tensor):  # noqa: PLR2004  # 2 * x
            args = args[::-1]  # runs as x * 2, and the eager front end cannot see it otherwise
        self._note_changed(args)
        self._add(node.op, node.target, word, node_stem(node), node.target, refs, args, kwargs, found)
        self._numbers[node] = len(self.calls) - 1

    def _enter_spans(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        for number in self._begin.get(node, ()):
            self._open[number] = self._refs_named(self._module_calls[number].inputs, env)

    def _leave_spans(self, node: fx.Node, env: dict[fx.Node, Any], left: Counter[fx.Node]) -> None:
        for number in self._end.get(node, ()):
            span = self._module_calls[number]
            returned = self._refs_named(span.outputs, env)
            self.spans.append(ModuleSpan(span.path, span.type, self._open.pop(number), returned))
            for name in (*span.inputs, *span.outputs):
                if name in self._named:
                    _drop(self._named[name], env, left)

    def _refs_named(self, names: Sequence[str], env: dict[fx.Node, Any]) -> tuple[Ref, ...]:
        values = (env[node] for name in names if (node := self._named.get(name)) in env)
        refs = (self._lookup(tensor) for value in values for _, tensor in tensors_in(value))
        return tuple(ref for ref in refs if ref is not None)


def _filled(structure: Any, env: dict[fx.Node, Any]) -> Any:
    """A structure of nodes with their values, in plain containers."""
    if isinstance(structure, fx.Node):
        return env[structure]
    if isinstance(structure, tuple):
        items = [_filled(item, env) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, list):
        return [_filled(item, env) for item in structure]
    if isinstance(structure, dict):
        return {key: _filled(item, env) for key, item in structure.items()}
    return structure


def _drop(node: fx.Node, env: dict[fx.Node, Any], left: Counter[fx.Node]) -> None:
    """Let go of a value after its last use, as plain Python would."""
    left[node] -= 1
    if not left[node]:
        env.pop(node, None)
