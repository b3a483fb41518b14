"""DOT text is compared with files in ``tests/golden``; FXGRAD_OVERWRITE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxgrad.errors import FlowFileError, OptionError
from tests import flows

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "chain": (flows.chain(), {}),
    "residual_rms": (flows.residual(), {"norm": "rms"}),
    "special": (flows.special(), {}),
    "nested_folded": (flows.nested(4, 3), {"depth": 1}),
    "nested_clusters": (flows.nested(2, 2), {"depth": 2, "norm": "max_abs"}),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name) -> None:
    flow, options = CASES[name]
    text = flow.to_dot(**options)
    file = GOLDEN / f"{name}.dot"
    if os.environ.get("FXGRAD_OVERWRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    assert flow.to_dot(**options) == text


def test_every_look_is_there_and_in_the_legend() -> None:
    text = flows.special().to_dot()
    for words in ("12 NaN", "3 NaN", "8 Inf", "0 (all zero)", "below float32's range", "above float32's range"):
        assert (words in text) == (words != "12 NaN")
    for look in ("legend_zero", "legend_nonfinite", "legend_outside_range", "legend_not_measured"):
        assert look in text


def test_labels_say_shape_dtype_norm_and_gain_and_tooltips_the_source() -> None:
    text = flows.chain(2).to_dot()
    assert r"/op0\nfunction\n2x4 float32\n0.01, x0.1" in text
    assert "/home/user/net.py:4" in text
    assert "zero_count 0" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "l3"}, "'l2_norm', 'rms', 'max_abs'"),
        ({"depth": -1}, "at least 0"),
        ({"depth": True}, "at least 0"),
        ({"fold": 1}, "True or False"),
        ({"colour": "red"}, "no option 'colour'; they have norm, depth, fold"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(OptionError, match=said):
        flows.chain().to_dot(**options)


def test_a_norm_that_was_not_measured() -> None:
    with pytest.raises(OptionError, match="statistics='full'"):
        flows.chain(level="norm").to_dot(norm="max_abs")


def test_writing(tmp_path) -> None:
    path = tmp_path / "flow.dot"
    assert flows.chain().to_dot(path) == path.read_text(encoding="utf-8")
    with pytest.raises(FlowFileError):
        flows.chain().to_dot(tmp_path / "none" / "flow.dot")
