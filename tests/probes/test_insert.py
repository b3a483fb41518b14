"""The pass itself: what it requires, edits and ensures."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from fxgrad.probes.insert import compiled, insert_probes
from fxgrad.probes.probe import current, probe


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[int, object]] = []

    def probe(self, value: object, site: int) -> None:
        self.seen.append((site, value))


def traced() -> fx.Graph:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = x * 2
            return h + h, torch.relu(y)

    return fx.Tracer().trace(Net())


def numbered(graph: fx.Graph) -> dict[fx.Node, int]:
    nodes = [node for node in graph.nodes if node.op != "output"]
    return {node: number for number, node in enumerate(nodes)}


def test_each_user_takes_the_probe_and_the_original_stays() -> None:
    graph = traced()
    before = str(graph)
    result = insert_probes(graph, numbered(graph))
    assert str(graph) == before
    for node in result.nodes:
        if node.target is not probe:
            assert all(used.target is probe for used in node.all_input_nodes)
    result.lint()


def test_the_probe_returns_the_very_object() -> None:
    value = torch.ones(2)
    assert probe(value, 0) is value
    marker = object()
    assert probe(marker, 0) is marker


def test_compiled_code_calls_the_recording_in_order_and_computes_the_same() -> None:
    graph = traced()
    function = compiled(insert_probes(graph, numbered(graph)))
    x, y = torch.randn(3), torch.randn(3)
    watcher = Watcher()
    current.forward_record = watcher
    try:
        total, positive = function(nn.Module(), x, y)
    finally:
        current.forward_record = None
    assert torch.equal(total, x * 2 + x * 2)
    assert torch.equal(positive, torch.relu(y))
    assert [site for site, _ in watcher.seen] == [0, 1, 2, 3, 4]
    assert watcher.seen[0][1] is x


def test_item_assignment_is_probed_on_what_it_changes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = graph.call_function(torch.clone, (x,))
    write = graph.call_function(operator.setitem, (h, 0, 1.0))
    graph.output(h)
    result = insert_probes(graph, {write: 7})
    watcher = Watcher()
    current.forward_record = watcher
    try:
        out = compiled(result)(nn.Module(), torch.zeros(2))
    finally:
        current.forward_record = None
    assert watcher.seen == [(7, out)] or watcher.seen[0][1] is out
    assert out.tolist() == [1.0, 0.0]


def test_what_the_pass_requires() -> None:
    with pytest.raises(ValueError, match="output"):
        insert_probes(fx.Graph(), {})
    graph = traced()
    once = insert_probes(graph, numbered(graph))
    with pytest.raises(ValueError, match="already"):
        insert_probes(once, numbered(once))
