from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from fxgrad.render.boxes import READABLE, boxes_of
from tests import flows


def paths(flow, depth, fold=True):
    return [box.name for box in boxes_of(flow, depth, fold=fold)[0]]


def test_depth_zero_collapses_all_modules() -> None:
    assert paths(flows.nested(4, 3), 0) == ["input:x", "body", "output"]


def test_repeated_blocks_fold() -> None:
    boxes, number = boxes_of(flows.nested(4, 3), 1, fold=True)
    assert [len(box.blocks) for box in boxes] == [0, 4, 0]
    assert number["body.3.op2"] == 1
    assert paths(flows.nested(4, 3), 1, fold=False) == ["input:x", "body.0", "body.1", "body.2", "body.3", "output"]
    assert len(boxes_of(flows.nested(2, 3), 1, fold=True)[0]) == 4  # two are no run


def test_the_deepest_level_shows_every_node() -> None:
    assert len(paths(flows.nested(4, 3), 9, fold=False)) == 14


@pytest.mark.parametrize(("blocks", "per_block"), [(2, 3), (16, 11), (48, 12), (3, 500)])
def test_automatic_depth_stays_readable(blocks, per_block) -> None:
    assert len(boxes_of(flows.nested(blocks, per_block), None, fold=True)[0]) <= READABLE


def test_a_box_has_the_sites_that_leave_it() -> None:
    boxes, _ = boxes_of(flows.nested(2, 3), 1, fold=True)
    assert [site.id for site in boxes[1].outputs] == ["body.0.op2"]


def test_every_node_is_in_exactly_one_box() -> None:
    flow = flows.nested(5, 4)
    for depth in range(4):
        boxes, number = boxes_of(flow, depth, fold=True)
        assert set(number) == {node.key for node in flow.nodes}
        assert set(number.values()) == set(range(len(boxes)))


def alternating(pairs, wide=()):
    """A linear map and an activation in turns; the shapes of those in ``wide`` differ."""
    nodes = [flows.node("input:x", "placeholder")]
    for n in range(pairs):
        nodes += [flows.node(f"fc{n}", "call_module", "Linear"), flows.node(f"/tanh#{n}", call_index=n)]
    nodes.append(flows.node("output", "output"))
    sites = [flows.site(node, flows.full(0.5**n)) for n, node in enumerate(reversed(nodes[:-1]))][::-1]
    sites = [dataclasses.replace(s, shape=(9, 9)) if s.key in wide else s for s in sites]
    uses = [(one.key, two.key, "args[0]") for one, two in pairwise(nodes)]
    return flows.flow(nodes, sites, uses)


def test_a_pattern_of_several_values_that_repeats_is_one_box() -> None:
    boxes, number = boxes_of(alternating(40), None, fold=True)
    assert [len(box.blocks) for box in boxes] == [0, 40, 0]
    assert [part.kind for part in boxes[1].blocks[0].parts] == ["Linear", "tanh"]
    assert number["fc7"] == number["/tanh#7"] == 1


def test_another_size_breaks_a_run() -> None:
    boxes, _ = boxes_of(alternating(9, wide={"fc4"}), None, fold=True)
    assert [len(box.blocks) for box in boxes] == [0, 4, 0, 4, 0, 0]


def test_equal_values_side_by_side_are_no_run() -> None:
    """Query, key and value: three maps of one value, none of which feeds the next."""
    names = ["q", "k", "v"]
    nodes = [flows.node("/x"), *(flows.node(name, "call_module", "Linear") for name in names), flows.node("/attend")]
    sites = [flows.site(node, flows.full(1.0 + n)) for n, node in enumerate(nodes)]
    uses = [("/x", name, "args[0]") for name in names] + [
        (name, "/attend", f"args[{n}]") for n, name in enumerate(names)
    ]
    assert len(boxes_of(flows.flow(nodes, sites, uses), None, fold=True)[0]) == 5


def test_a_flat_model_of_many_different_values_still_fits() -> None:
    nodes = [flows.node(f"/op{n}") for n in range(500)]
    uses = [(one.key, two.key, "args[0]") for one, two in pairwise(nodes)]
    flow = flows.flow(nodes, [flows.site(n, flows.full(2.0**-i)) for i, n in enumerate(nodes)], uses)
    boxes, number = boxes_of(flow, None, fold=True)
    assert len(boxes) <= READABLE
    assert set(number) == {node.key for node in nodes}
    assert all(number[a.key] <= number[b.key] for a, b in pairwise(nodes))
