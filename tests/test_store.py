from __future__ import annotations

import copy
import json
import math
import os
import stat
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxgrad
from fxgrad.errors import FlowFileError, OptionError
from fxgrad.schema import (
    REASONS,
    BlindSpot,
    CaptureReport,
    Consumer,
    Edge,
    EventInfo,
    GradientFlow,
    Node,
    ParameterRecord,
    Site,
    Statistics,
)
from fxgrad.store import from_json, to_json, write_whole
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


@pytest.mark.parametrize("word", [*flows.NASTY, "a file name that is no text: \udc80"])
def test_any_name_survives(word, tmp_path) -> None:
    flow = flows.named(word)
    assert from_json(to_json(flow)) == flow
    flow.to_json(tmp_path / "flow.json")
    assert fxgrad.load(tmp_path / "flow.json") == flow


WORDS = st.text(st.characters(codec=None), max_size=12)
NUMBERS = st.floats(allow_nan=True)
COUNTS = st.none() | st.integers(0, 2**63)


@st.composite
def some_statistics(draw: st.DrawFn) -> Statistics | None:
    if draw(st.booleans()):
        return draw(st.none() | st.builds(Statistics, st.just("norm"), st.integers(0), NUMBERS))
    extremes = [draw(st.none() | NUMBERS) for _ in range(4)]
    return Statistics("full", draw(st.integers(0)), draw(NUMBERS), *extremes, *(draw(COUNTS) for _ in range(6)))


@st.composite
def some_flows(draw: st.DrawFn) -> GradientFlow:
    keys = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    line = st.none() | WORDS
    nodes = [
        Node(key, *(draw(WORDS) for _ in range(5)), draw(st.integers(0, 9)), draw(line))  # type: ignore[call-arg]
        for key in keys
    ]
    consumers = st.builds(Consumer, st.sampled_from(keys), WORDS)
    shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
    sites = st.builds(
        Site, st.sampled_from(nodes), WORDS, shapes, WORDS, WORDS, some_statistics(), st.none() | consumers, line
    )
    reasons = st.sampled_from(sorted(REASONS))
    several = {"max_size": 4}
    return GradientFlow(
        tuple(nodes),
        tuple(draw(st.lists(sites, **several))),
        tuple(draw(st.lists(st.builds(Edge, st.sampled_from(keys), WORDS, consumers, some_statistics()), **several))),
        tuple(draw(st.lists(st.builds(
            ParameterRecord, WORDS, shapes, WORDS, WORDS, st.booleans(), some_statistics(),
            st.lists(WORDS).map(tuple), st.none() | reasons,
        ), **several))),
        tuple(draw(st.lists(st.builds(BlindSpot, st.sampled_from(keys), WORDS, reasons, WORDS), **several))),
        draw(st.builds(
            CaptureReport, st.sampled_from(["symbolic", "eager"]), WORDS, WORDS, st.booleans(), WORDS,
            st.lists(st.tuples(WORDS, WORDS)).map(tuple),
        )),
        draw(st.builds(EventInfo, st.integers(0), st.integers(0), WORDS, st.sampled_from(["norm", "full"]))),
    )  # fmt: skip


@given(some_flows())
def test_any_flow_survives(flow) -> None:
    text = to_json(flow)
    assert from_json(text) == flow
    assert to_json(from_json(text)) == text


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
    for length in range(len(text)):
        with pytest.raises(FlowFileError, match="here"):
            from_json(text[:length], "here")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], 6, "newer than 5"),
        (["version"], 1, "before the first release"),
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


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value inside ``content``."""
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from places(inner, (*path, step))


def changed(content: Any, path: tuple[Any, ...], *value: object) -> str:
    """The text with another value at ``path``, or with none."""
    result = inner = copy.deepcopy(content)
    for step in path[:-1]:
        inner = inner[step]
    if value:
        inner[path[-1]] = value[0]
    else:
        del inner[path[-1]]
    return json.dumps(result)


def test_a_wrong_type_anywhere_is_damage() -> None:
    content = json.loads(to_json(flows.residual()))
    for path in places(content):
        for wrong in ({"odd": 1}, [[[]]], 1.5, "odd words", True):
            text = changed(content, path, wrong)
            try:
                flow = from_json(text, "here")
            except FlowFileError as error:
                assert str(error).startswith("here")  # noqa: PT017  # most places refuse, some may take it
            else:
                assert json.loads(to_json(flow)) == json.loads(text), path
                assert type(wrong) in (str, float, bool), path


def test_a_missing_field_anywhere_is_damage() -> None:
    content = json.loads(to_json(flows.residual()))
    for path in places(content):
        if isinstance(path[-1], str):
            with pytest.raises(FlowFileError, match="here"):
                from_json(changed(content, path), "here")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "9" * 5000])
def test_numbers_beyond_the_range_are_damage(number) -> None:
    text = to_json(flows.chain(1)).replace('"l2_norm":0.1,', f'"l2_norm":{number},')
    with pytest.raises(FlowFileError, match="here"):
        from_json(text, "here")


def test_unknown_fields_are_damage() -> None:
    content = json.loads(to_json(flows.chain(1)))
    content["flow"]["nodes"][0]["colour"] = "red"
    with pytest.raises(FlowFileError, match="colour"):
        from_json(json.dumps(content))


def test_bare_nan_is_no_json() -> None:
    with pytest.raises(FlowFileError, match="NaN"):
        from_json('{"format": NaN}')


def test_missing_and_unwritable_files(tmp_path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "null\0byte"):
        with pytest.raises(FlowFileError, match="cannot be read"):
            fxgrad.load(path)
    (tmp_path / "latin.json").write_bytes(b'{"format": "\xe4"}')
    with pytest.raises(FlowFileError, match="cannot be read"):
        fxgrad.load(tmp_path / "latin.json")
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


def test_text_that_cannot_be_encoded_leaves_nothing_behind(tmp_path) -> None:
    with pytest.raises(FlowFileError, match="cannot be written"):
        write_whole(tmp_path / "flow.svg", "\udc80")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_a_new_file_and_an_old_one_keeps_its_mode(tmp_path) -> None:
    umask = os.umask(0o022)
    try:
        flows.chain(1).to_json(tmp_path / "new.json")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o644
    (tmp_path / "new.json").chmod(0o640)
    flows.chain(2).to_json(tmp_path / "new.json")
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path) -> None:
    (tmp_path / "real.json").write_text("old", encoding="utf-8")
    (tmp_path / "link.json").symlink_to("real.json")
    flows.chain(1).to_json(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert fxgrad.load(tmp_path / "real.json") == flows.chain(1)
    (tmp_path / "null").symlink_to(os.devnull)
    flows.chain(1).to_json(tmp_path / "null")
    assert (tmp_path / "null").is_char_device()


# ---- series ----------------------------------------------------------------------------------------------------------


def test_a_series_equals_its_own_copy_and_shares_equal_nodes(tmp_path) -> None:
    path = tmp_path / "series.json"
    series = (flows.special(), flows.special(), flows.chain(3))
    fxgrad.save_series(series, path)
    assert fxgrad.load_series(path) == series
    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert len(content["nodes"]) == len(set(flows.special().nodes) | set(flows.chain(3).nodes))
    assert content["flows"][1]["nodes"] == list(range(len(flows.special().nodes)))


@pytest.mark.parametrize("word", flows.NASTY)
def test_any_name_survives_in_a_series(word, tmp_path) -> None:
    fxgrad.save_series([flows.named(word)] * 2, tmp_path / "series.json")
    assert fxgrad.load_series(tmp_path / "series.json") == (flows.named(word),) * 2


def test_a_single_flow_is_a_series_of_one(tmp_path) -> None:
    flows.chain(2).to_json(tmp_path / "flow.json")
    fxgrad.save_series(flows.chain(2), tmp_path / "series.json")
    for name in ("flow.json", "series.json"):
        assert fxgrad.load_series(tmp_path / name) == (flows.chain(2),)


def test_load_sends_a_series_to_load_series(tmp_path) -> None:
    fxgrad.save_series([flows.chain(2)], tmp_path / "series.json")
    with pytest.raises(FlowFileError, match=r"series of flows .* fxgrad\.load_series\(path\)"):
        fxgrad.load(tmp_path / "series.json")


@pytest.mark.parametrize("given", [[], [1], "flow.json", None, 3])
def test_only_flows_make_a_series(given, tmp_path) -> None:
    with pytest.raises(OptionError, match=r"save_series takes flows, such as watch\.history, but was given"):
        fxgrad.save_series(given, tmp_path / "series.json")
    assert not (tmp_path / "series.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content["flows"][0]["nodes"].append(99), "a node that is not there"),
        (lambda content: content["flows"][0]["nodes"].append(True), "must be of type int"),
        (lambda content: content["flows"][0].pop("event"), "lacks fields"),
        (lambda content: content.update(flows=[]), "no flows"),
        (lambda content: content.update(flows=[1]), "is no flow"),
        (lambda content: content.update(nodes=None), "must be a list"),
        (lambda content: content.update(version=99), "Upgrade fxgrad"),
        (lambda content: content.update(version=1), "before the first release"),
        (lambda content: content.update(format="other"), "is no flow"),
    ],
)
def test_damage_in_a_series_is_named(change, said, tmp_path) -> None:
    path = tmp_path / "series.json"
    fxgrad.save_series([flows.chain(2)] * 2, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FlowFileError, match=said):
        fxgrad.load_series(path)
