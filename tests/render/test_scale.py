"""The scale means the same in every picture: decades against the gradient at the loss side."""

from __future__ import annotations

import colorsys
import math
from itertools import pairwise

import pytest

from fxgrad.render.palette import contrast, luminance, text_colour
from fxgrad.render.scale import DECADES, Size, colour, scale_of
from fxgrad.schema import Statistics
from tests import flows

EVERY = range(-DECADES, DECADES + 1)


def rgb(decades: float) -> list[int]:
    text = colour(decades)
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def test_neutral_is_bright_and_both_ends_are_dark() -> None:
    light = [luminance(colour(n)) for n in EVERY]
    assert light[DECADES] > 0.85
    assert all(a < b for a, b in pairwise(light[: DECADES + 1]))
    assert all(a > b for a, b in pairwise(light[DECADES:]))
    assert max(light[0], light[-1]) < 0.06


def test_below_is_blue_and_above_is_red_also_to_colour_blind_eyes() -> None:
    """Deuteranopia and protanopia keep blue against yellow: the blue part against the mean of red and green."""
    for n in range(1, DECADES + 1):
        for decades, sign in ((-n, 1), (n, -1)):
            red, green, blue = rgb(decades)
            assert sign * (blue - (red + green) / 2) > 20


def test_no_colour_is_grey() -> None:
    for n in EVERY:
        red, green, blue = (part / 255 for part in rgb(n))
        assert colorsys.rgb_to_hsv(red, green, blue)[1] > 0.12


def test_each_decade_has_a_colour_of_its_own_and_text_that_reads_on_it() -> None:
    colours = [colour(n) for n in EVERY]
    assert len(set(colours)) == len(colours)
    assert all(contrast(text_colour(one), one) >= 4.5 for one in colours)
    assert colour(-40) == colour(-DECADES)
    assert colour(math.inf) == colour(DECADES)
    assert colour(0.3) == colour(0) == colour(-0.4) != colour(-0.6)


def test_grey_print_tells_above_from_below() -> None:
    size = Size(1.0, relative=True)
    assert not any(size.striped(10.0**-n) for n in range(40))
    assert all(size.striped(10.0**n) for n in range(1, 40))
    bars = [size.bar(10.0**n) for n in (-30, -6, -3, 0, 3, 6, 30)]
    assert bars == ["▁", "▁", "▃", "▅", "▇", "█", "█"]


def test_neutral_is_what_the_loss_sent_in() -> None:
    flow = flows.chain(4, factor=0.1)  # norms 1e-4, 1e-3, 1e-2, 1e-1 towards the loss
    size = scale_of(flow)
    assert size.relative
    assert size.reference == pytest.approx(0.1)
    assert size.colour(0.1) == colour(0)
    assert size.colour(1e-4) == colour(-3)
    assert size.words(1e-4) == "x0.001"


def test_the_colours_of_two_models_mean_the_same() -> None:
    one, two = flows.chain(4, factor=0.1), flows.chain(9, factor=0.5)
    for flow in (one, two):
        size = scale_of(flow)
        assert size.colour(size.reference / 100) == colour(-2)


def test_an_absolute_scale_on_request_and_where_nothing_is_measured() -> None:
    assert scale_of(flows.chain(4), scale="absolute") == Size(1.0, relative=False)
    blank = flows.flow([flows.node("/a")], [flows.site(flows.node("/a"), None)], [])
    assert scale_of(blank) == Size(1.0, relative=False)
    assert scale_of(blank).words(3.0) == ""


def test_nan_at_the_loss_side_is_no_reference() -> None:
    nodes = [flows.node("/a"), flows.node("/b"), flows.node("output", "output")]
    sites = [flows.site(nodes[0], flows.full(0.5)), flows.site(nodes[1], flows.full(1.0, nan=3))]
    flow = flows.flow(nodes, sites, [("/a", "/b", "args[0]"), ("/b", "output", "args[0]")])
    assert scale_of(flow).reference == 0.5
    zero = flows.flow(nodes, [sites[0], flows.site(nodes[1], Statistics("norm", 8, 0.0))], [])
    assert scale_of(zero).reference == 0.5
