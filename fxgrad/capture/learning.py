"""The first run of a trace that no eager record stands behind: node by node, writing down what each returned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.capture.agreement import node_stem, node_word
from fxgrad.capture.captured import ModuleSpan, Ref
from fxgrad.capture.eager import Session
from fxgrad.capture.names import METADATA
from fxgrad.capture.proxies import set_grad
from fxgrad.capture.symbolic import Span, Trace
from fxgrad.capture.values import Values
from fxgrad.structure import tensors_in


class LearningRun(Session):
    """Runs a trace once with the eager front end's bookkeeping, so that both make the same plan."""

    def run_trace(
        self, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
    ) -> tuple[Any, dict[fx.Node, int]]:
        """What the model returns, and which call of the plan each node is."""
        self._trace = trace
        self._numbers: dict[fx.Node, int] = {}
        self._line: str | None = None
        inputs = self._placeholders(args, kwargs, names)
        values = iter([tensor for _, tensor in tensors_in((args, kwargs))])
        env: dict[fx.Node, Any] = {}
        left = Counter(used for node in trace.graph.nodes for used in node.all_input_nodes)
        left.update(used for span in trace.spans for used in _nodes_in((span.inputs, span.outputs)))
        self._open: list[tuple[Span, tuple[Ref, ...]]] = []
        result = None
        for index, node in enumerate(trace.graph.nodes):
            self._enter_spans(index, env)
            if node.op == "placeholder":
                env[node] = next(values)
                self._numbers[node] = index
            elif node.op == "output":
                result = trace.rebuild(_filled(node.args[0], env))
            else:
                env[node] = self._step(node, env)
            self._leave_spans(index, env, left)
            for used in node.all_input_nodes:
                _drop(used, env, left)
        self._finish(result, inputs)
        self._values = Values()
        return result, self._numbers

    def _held_values(self) -> set[Ref]:
        return set()  # generated code keeps nothing; what this run holds is its own

    def _source(self) -> str | None:
        return self._line

    def _step(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        facts = node.meta.get("fxgrad", {})
        self._line = facts.get("source")
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
        facts = node.meta["fxgrad"]
        self._path, self._type = facts["path"], facts["type"]
        if getattr(node.target, "__name__", "") == "getattr":
            args = args[:1]
        elif word in ("add", "mul") and len(args) == 2 and not isinstance(args[0], Tensor):  # noqa: PLR2004  # 2 * x
            args = args[::-1]  # runs as x * 2, and the eager front end cannot see it otherwise
        self._note_changed(args)
        self._add(node.op, node.target, word, node_stem(node), node.target, refs, args, kwargs, found)
        self._numbers[node] = len(self.calls) - 1

    def _enter_spans(self, index: int, env: dict[fx.Node, Any]) -> None:
        for span in self._trace.spans:
            if span.first == index:
                self._open.append((span, self._refs_in(span.inputs, env)))

    def _leave_spans(self, index: int, env: dict[fx.Node, Any], left: Counter[fx.Node]) -> None:
        for span, inputs in [entry for entry in reversed(self._open) if entry[0].last == index + 1]:
            self.spans.append(ModuleSpan(span.path, span.type, inputs, self._refs_in(span.outputs, env)))
            self._open = [entry for entry in self._open if entry[0] is not span]
            for used in _nodes_in((span.inputs, span.outputs)):
                _drop(used, env, left)

    def _refs_in(self, structure: Any, env: dict[fx.Node, Any]) -> tuple[Ref, ...]:
        refs = (self._lookup(t) for n in _nodes_in(structure) if n in env for _, t in tensors_in(env[n]))
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


def _nodes_in(structure: Any) -> list[fx.Node]:
    """The nodes of the proxies in a structure of arguments."""
    if isinstance(structure, fx.Proxy):
        return [structure.node]
    if isinstance(structure, (tuple, list)):
        return [node for item in structure for node in _nodes_in(item)]
    if isinstance(structure, dict):
        return [node for item in structure.values() for node in _nodes_in(item)]
    return []
