from __future__ import annotations

import pytest

from fxgrad.render.lettering import middle, wide, wrapped
from tests import flows


@pytest.mark.parametrize("word", [*flows.NASTY, "one two three " * 20, "WWWW" * 30])
def test_nothing_is_wider_than_its_room_and_no_letter_is_lost(word) -> None:
    lines = wrapped(word, 120, 11)
    assert all(wide(line, 11) <= 120 for line in lines)
    assert "".join("".join(lines).split()) == "".join(word.split())
    assert wide(middle(word, 120, 11), 11) <= 120


def test_a_name_is_shortened_in_the_middle() -> None:
    cut = middle("features.denseblock3.denselayer17.norm1", 120, 11)
    assert cut.startswith("feat") and cut.endswith("norm1") and "…" in cut
    assert middle("fc", 120, 11) == "fc"
