from __future__ import annotations

from fxgrad.render.palette import DROP, LOOKS, contrast, mixed
from fxgrad.render.themes import THEMES


def test_text_can_be_read_on_every_look() -> None:
    for look in LOOKS.values():
        if "fillcolor" in look:
            assert contrast(look["fontcolor"], look["fillcolor"]) >= 4.5


def test_looks_differ_by_more_than_colour() -> None:
    shapes = [(look.get("style"), look.get("shape"), look.get("peripheries")) for look in LOOKS.values()]
    assert len(set(shapes)) == len(LOOKS)


def test_a_drop_differs_from_every_look_in_grey() -> None:
    assert all(float(DROP["penwidth"]) > float(look.get("penwidth", "1")) for look in LOOKS.values())


def test_words_and_marks_can_be_read_on_both_grounds() -> None:
    for theme in THEMES.values():
        for ground in (theme.paper, theme.ground):
            assert contrast(theme.ink, ground) >= 7
            assert contrast(theme.faint, ground) >= 4.5
            assert contrast(theme.accent, ground) >= 3
            assert contrast(theme.line, ground) >= 3


def test_a_mix_lies_between() -> None:
    assert mixed("#000000", "#ffffff", 0.5) == "#808080"
    assert mixed("#102030", "#ffffff", 0.0) == "#102030"
