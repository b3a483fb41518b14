from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from fxgrad.render.columns import Parts, Room, arrange

SCREEN = Room(1000, 850)


def chain(count: int, size=(150.0, 50.0)) -> Parts:
    return Parts([size] * count, [()] * count, [(n, n + 1) for n in range(count - 1)])


def columns(layout) -> list[float]:
    return sorted({round(x) for x, _ in layout.boxes.values()})


@pytest.mark.parametrize("count", [1, 2, 8, 20, 40])
def test_a_chain_fits_on_a_screen(count) -> None:
    layout = arrange(chain(count), SCREEN)
    assert layout is not None
    assert layout.width <= SCREEN.width and layout.height <= SCREEN.height
    assert set(layout.boxes) == set(range(count))
    assert set(layout.edges) == set(chain(count).edges)


def test_one_column_where_that_fits_and_more_where_it_does_not() -> None:
    assert len(columns(arrange(chain(8), SCREEN))) == 1
    assert len(columns(arrange(chain(20), SCREEN))) == 2


@pytest.mark.parametrize("parts", [chain(40), Parts(chain(30).sizes, [("a",)] * 15 + [("b",)] * 15, chain(30).edges)])
def test_boxes_do_not_overlap(parts) -> None:
    layout = arrange(parts, SCREEN)
    places = [
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for (x, y), (w, h) in zip((layout.boxes[n] for n in range(len(parts.sizes))), parts.sizes, strict=True)
    ]
    for one, two in combinations(places, 2):
        assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]
    for left, top, right, bottom in places:
        assert left >= -1 and top >= -1 and right <= layout.width + 1 and bottom <= layout.height + 1


def test_a_column_begins_where_few_edges_are_cut() -> None:
    """Two halves of eleven boxes, each full of edges, joined by one: the cut is between them."""
    edges = [(a, b) for start in (0, 11) for a, b in combinations(range(start, start + 11), 2) if b - a < 4]
    layout = arrange(Parts([(150.0, 50.0)] * 22, [()] * 22, [*edges, (10, 11)]), SCREEN)
    left = {n for n, (x, _) in layout.boxes.items() if x < layout.width / 2}
    assert left == set(range(11))


def test_nested_skips_lie_beside_each_other_as_in_a_u_net() -> None:
    skips = [(n, 19 - n) for n in range(1, 9, 3)]
    layout = arrange(Parts([(150.0, 50.0)] * 20, [()] * 20, [*chain(20).edges, *skips]), SCREEN)
    heights = [(layout.boxes[a][1], layout.boxes[b][1]) for a, b in skips]
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(heights))


def test_many_edges_from_column_to_column_are_named_and_not_drawn() -> None:
    edges = [(a, b) for a, b in combinations(range(30), 2)]
    layout = arrange(Parts([(150.0, 50.0)] * 30, [()] * 30, edges), SCREEN)
    assert set(layout.edges) >= set(layout.stubs)
    named = {head for _, head in layout.stubs}
    assert named and all(head in named for tail, head in edges if (tail, head) not in layout.edges)
    assert layout.width < 3 * SCREEN.width


def test_a_large_graph_is_laid_out_in_time_and_not_as_one_tall_column() -> None:
    layout = arrange(chain(3000), SCREEN)
    assert layout.height < 1.6 * layout.width
