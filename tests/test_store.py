from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxgrad
from fxgrad.errors import FlowFileError
from fxgrad.schema import Statistics
from fxgrad.store import from_json, to_json
from tests import flows

FLOWS = [flows.chain(), flows.chain(level="norm"), flows.residual(), flows.special(), flows.nested(2, 3)]


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_equals_its_own_copy_from_a_file(flow, tmp_path) -> None:
    path = tmp_path / "flow.json"
    text = flow.to_json(path)
    assert path.read_text(encoding="utf-8") == text
    assert fxgrad.load(path) == flow
    assert flow.to_json() == text
    json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("word", flows.NASTY)
def test_any_name_survives(word) -> None:
    flow = flows.named(word)
    assert from_json(to_json(flow)) == flow


@given(norm=st.floats(allow_nan=True), numel=st.integers(0, 2**70), count=st.none() | st.integers(0, 10**12))
def test_any_number_survives(norm, numel, count) -> None:
    node = flows.node("/op")
    made = Statistics("full", numel, norm, norm, None, norm, -norm, count, 0, 0, 0, 0, 0)
    flow = flows.flow([node], [flows.site(node, made)], [])
    assert from_json(to_json(flow)) == flow


def test_nan_equals_nan() -> None:
    assert Statistics("norm", 4, math.nan) == Statistics("norm", 4, math.nan)
    assert Statistics("norm", 4, math.nan) != Statistics("norm", 4, 0.0)
    assert hash(Statistics("norm", 4, math.nan)) == hash(Statistics("norm", 4, math.nan))


def test_every_truncation_is_damage() -> None:
    text = to_json(flows.chain(1)).rstrip()
    for length in range(0, len(text), 7):
        with pytest.raises(FlowFileError, match="here"):
            from_json(text[:length], "here")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], 2, "newer than 1"),
        (["version"], "1", "version is '1'"),
        (["format"], "other", "is no flow"),
        (["flow"], None, "holds no flow"),
        (["flow", "nodes", 0, "call_index"], True, "must be of type int"),
        (["flow", "nodes", 0, "key"], 3, "must be of type str"),
        (["flow", "sites", 1, "node"], 99, "belongs to no node"),
        (["flow", "sites", 1, "statistics", "l2_norm"], "big", "must be a number"),
        (["flow", "sites", 1, "shape"], 4, "must be a list"),
        (["flow", "blind_spots", 0, "reason"], "shy", "none of"),
        (["flow", "edges", 0, "producer"], "/nowhere", "unknown node"),
        (["flow", "event"], {}, "lacks fields"),
    ],
)
def test_damage_is_named(path, value, said, tmp_path) -> None:
    content = json.loads(to_json(flows.chain(2)))
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FlowFileError, match=said) as error:
        fxgrad.load(file)
    assert str(file) in str(error.value)


def test_unknown_fields_are_damage() -> None:
    content = json.loads(to_json(flows.chain(1)))
    content["flow"]["nodes"][0]["colour"] = "red"
    with pytest.raises(FlowFileError, match="colour"):
        from_json(json.dumps(content))


def test_bare_nan_is_no_json() -> None:
    with pytest.raises(FlowFileError, match="NaN"):
        from_json('{"format": NaN}')


def test_missing_and_unwritable_files(tmp_path) -> None:
    with pytest.raises(FlowFileError, match="cannot be read"):
        fxgrad.load(tmp_path / "none.json")
    with pytest.raises(FlowFileError, match="cannot be written"):
        flows.chain().to_json(tmp_path / "no" / "folder" / "flow.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "flow.json"
    flows.chain(1).to_json(path)
    before = path.read_text(encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(FlowFileError, match="No space"):
        flows.chain(2).to_json(path)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["flow.json"]
