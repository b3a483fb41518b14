from __future__ import annotations

from itertools import pairwise

import pytest

from fxgrad.render.palette import DROP, LOOKS, Scale, colour, contrast, luminance, text_colour


def test_grey_print_keeps_the_order() -> None:
    greys = [luminance(colour(i / 50)) for i in range(51)]
    assert all(a < b for a, b in pairwise(greys))
    assert greys[-1] - greys[0] > 0.7


def test_text_can_be_read_everywhere() -> None:
    for i in range(101):
        fill = colour(i / 100)
        assert contrast(text_colour(fill), fill) >= 4.5
    for look in LOOKS.values():
        if "fillcolor" in look:
            assert contrast(look["fontcolor"], look["fillcolor"]) >= 4.5


def test_looks_differ_by_more_than_colour() -> None:
    shapes = [(look.get("style"), look.get("shape"), look.get("peripheries")) for look in LOOKS.values()]
    assert len(set(shapes)) == len(LOOKS)


def test_a_drop_differs_from_every_look_in_grey() -> None:
    assert all(float(DROP["penwidth"]) > float(look.get("penwidth", "1")) for look in LOOKS.values())


def test_colours_out_of_range_are_the_ends() -> None:
    assert colour(-1) == colour(0)
    assert colour(2) == colour(1)


def test_a_scale_spans_the_norms_and_never_less_than_two_decades() -> None:
    scale = Scale([1e-6, 1e-2, 0.0, float("nan"), float("inf")])
    assert (scale.share(1e-6), scale.share(1e-2)) == pytest.approx((0.0, 1.0))
    assert Scale([1.0, 1.001]).share(1.0) > 0.99
    assert Scale([]).colour(1.0) == colour(1.0)
    steps = Scale([1e-4, 1.0]).steps()
    assert steps == pytest.approx([1.0, 0.1, 0.01, 1e-3, 1e-4])
