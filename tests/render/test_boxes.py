from __future__ import annotations

import pytest

from fxgrad.render.boxes import READABLE, boxes_of
from tests import flows


def paths(flow, depth, fold=True):
    return [box.path or box.nodes[0].key for box in boxes_of(flow, depth, fold=fold)[0]]


def test_depth_zero_collapses_all_modules() -> None:
    assert paths(flows.nested(4, 3), 0) == ["input:x", "body", "output"]


def test_repeated_blocks_fold() -> None:
    boxes, number = boxes_of(flows.nested(4, 3), 1, fold=True)
    assert [len(box.blocks) for box in boxes] == [0, 4, 0]
    assert number["body.3.op2"] == 1
    assert paths(flows.nested(4, 3), 1, fold=False) == ["input:x", "body.0", "body.1", "body.2", "body.3", "output"]
    assert len(boxes_of(flows.nested(2, 3), 1, fold=True)[0]) == 4  # two are no run


def test_the_deepest_level_shows_every_node() -> None:
    assert len(paths(flows.nested(4, 3), 9)) == 14


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
