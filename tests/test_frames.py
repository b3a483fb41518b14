"""Tidy tables of flows."""

from __future__ import annotations

import csv
import io
import math
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.errors import OptionError
from fxgrad.frames import COLUMNS, rows
from fxgrad.schema import History
from tests import flows


def history():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with fxgrad.watch(net, statistics="full") as watch:
        for _ in range(3):
            net(torch.ones(5, 4)).sum().backward()
        return watch.history


def test_a_row_for_each_value_and_step_with_the_flow_s_own_numbers() -> None:
    found = history()
    listed = rows(found)
    assert len(listed) == sum(len(flow) for flow in found)
    assert sorted({row["step"] for row in listed}) == [0, 1, 2]
    for row in listed:
        site = found[row["step"]].site(row["key"])
        assert row["l2_norm"] == site.l2_norm
        assert row["rms"] == site.rms
        assert row["module"] == site.module_path
        assert tuple(row) == COLUMNS


def test_parameters() -> None:
    listed = rows(history(), "parameters")
    assert [row["key"] for row in listed[:4]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert listed[0]["module"] == "0"
    assert listed[0]["shape"] == "8x4"
    assert all(row["l2_norm"] > 0 for row in listed)


def test_csv(tmp_path) -> None:
    flow = flows.special()
    text = flow.to_csv(tmp_path / "flow.csv")
    assert (tmp_path / "flow.csv").read_text(encoding="utf-8") == text
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row["key"] for row in read] == [site.key for site in flow.sites]
    by_key = {row["key"]: row for row in read}
    assert float(by_key["/fine"]["l2_norm"]) == 1.0
    assert by_key["/blind"]["l2_norm"] == ""
    assert by_key["/nan"]["nan_count"] == "3"
    assert History([flow]).to_csv() == text


def test_frames_and_parquet(tmp_path, monkeypatch) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    found = history()
    frame = found.to_pandas()
    assert list(frame.columns) == list(COLUMNS)
    course = frame[frame["key"] == "0"].set_index("step")["l2_norm"]
    assert course.to_dict() == {n: flow.site("0").l2_norm for n, flow in enumerate(found)}
    assert math.isnan(flows.special().to_pandas().set_index("key").loc["/blind", "l2_norm"])
    monkeypatch.chdir(tmp_path)
    found[0].to_json("flow.json")
    words = ["render", "flow.json", "-o", "flow.parquet", "-o", "flow.csv"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert pandas.read_parquet("flow.parquet").equals(found[0].to_pandas())
    assert len(pandas.read_csv("flow.csv")) == len(found[0])


def test_without_pandas_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # importing it raises ImportError
    with pytest.raises(OptionError, match=r"pip install 'fxgrad\[pandas\]'"):
        flows.chain().to_pandas()
    assert flows.chain().to_csv().startswith("step,key,")


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="'values' or 'parameters'"):
        flows.chain().to_csv(of="edges")  # type: ignore[arg-type]
