"""The pass: requires -> edit -> ensures -> lint, on a copy of the graph.

Behind every node that may return a tensor stands a probe; who used the node's value uses the probe's.  The number of
the probe is kept among our facts on the node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fxgrad.instrumentation.probe import probe


def insert_probes(graph: fx.Graph, numbers: Mapping[fx.Node, int]) -> fx.Graph:
    """A copy of ``graph`` with a probe behind each node in ``numbers``, which gives its number.

    Raises:
        ValueError: ``graph`` has no output, or has probes already.
    """
    _require(graph)
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = result.graph_copy(graph, val_map=copies)
    result.output(returned)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    others = [node for node in graph.nodes if node.op != "placeholder"]
    for node in [*reversed(placeholders), *others]:  # all probes of placeholders go behind the last placeholder
        if node in numbers:
            _probe_behind(result, copies[node], numbers[node])
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


def _probe_behind(graph: fx.Graph, node: fx.Node, number: int) -> None:
    changed = node.args[0] if node.target is operator.setitem else None  # returns nothing, changes its argument
    # Placeholders come first in a graph; a probe behind one goes behind the last.
    place = node
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    node.meta["fxgrad"] = {**node.meta.get("fxgrad", {}), "probe": number}
    with graph.inserting_after(place):
        put = graph.call_function(probe, (node if changed is None else changed, number))
    spans = node.meta["fxgrad"].get("spans", ())
    put.meta["fxgrad"] = {"path": "", "type": "", "source": None, "grad_enabled": True, "spans": spans}
    if changed is None:
        node.replace_all_uses_with(put, delete_user_cb=lambda user: user is not put)


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
