"""The pass: requires -> edit -> ensures -> lint, on a copy of the graph.

Behind every node that may return a tensor stands a probe; who used the node's value uses the probe's.  The number of
the probe is kept among our facts on the node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fxgrad.probes.probe import probe

#: Our facts on a probe itself; the spans are those of the node before it.
_OWN = {"path": "", "type": "", "source": None, "grad_enabled": True}


def insert_probes(graph: fx.Graph, numbers: Mapping[fx.Node, int]) -> fx.Graph:
    """A copy of ``graph`` with a probe behind each node in ``numbers``, which gives its number.

    Raises:
        ValueError: ``graph`` has no output, or has probes already.
    """
    _require(graph)
    result = fx.Graph()
    now: dict[fx.Node, fx.Node] = {}  # by node, what its users take
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        now[node] = result.node_copy(node)
    for node in placeholders:  # all probes of placeholders go behind the last placeholder
        _probe_behind(result, node, now, numbers)
    for node in graph.nodes:
        if node.op == "output":
            result.output(fx.node.map_arg(node.args[0], now.__getitem__))
        elif node.op != "placeholder":
            now[node] = result.node_copy(node, now.__getitem__)
            _probe_behind(result, node, now, numbers)
    _ensure(result, len(numbers))
    result.lint()
    return result


def _require(graph: fx.Graph) -> None:
    if not any(node.op == "output" for node in graph.nodes):
        message = "probes can only be put into a graph that has an output"
        raise ValueError(message)
    if any(node.target is probe for node in graph.nodes):
        message = "the graph has probes already"
        raise ValueError(message)


def _probe_behind(graph: fx.Graph, node: fx.Node, now: dict[fx.Node, fx.Node], numbers: Mapping[fx.Node, int]) -> None:
    number = numbers.get(node)
    if number is None:
        return
    copy = now[node]
    facts = copy.meta.get("fxgrad", {})
    copy.meta["fxgrad"] = {**facts, "probe": number}
    changes = node.target is operator.setitem  # returns nothing, changes its argument
    value = copy.args[0] if changes else copy
    put = graph.create_node("call_function", probe, (value, number), name=f"{copy.name}_probe")
    put.meta["fxgrad"] = {**_OWN, "spans": facts.get("spans", ())}
    if not changes:
        now[node] = put


def _ensure(graph: fx.Graph, expected: int) -> None:
    found = sum(node.target is probe for node in graph.nodes)
    if found != expected:
        message = f"{found} probes were inserted where {expected} were wanted"
        raise RuntimeError(message)


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of ``(root module, *placeholders)``: modules and parameters are read from the root."""
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<eval_with_key>.fxgrad", "exec"), names)  # noqa: S102  # code that torch.fx generated
    function: Callable[..., Any] = names["forward"]
    return function
