"""The gradient of each block over steps: in a terminal without matplotlib, and as a figure with it."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

import fxgrad
from fxgrad import presenter
from fxgrad.cli import app
from fxgrad.errors import OptionError, SiteNotFoundError
from fxgrad.render.course import course_of, course_text
from fxgrad.schema import History, Series
from tests import diagnoses, flows


def series(steps=30, length=6):
    """From step to step the values far from the loss get less."""
    made = [flows.chain(length, factor=0.9 - 0.02 * n) for n in range(steps)]
    return History(
        dataclasses.replace(flow, event=dataclasses.replace(flow.event, backward=n)) for n, flow in enumerate(made)
    )


def test_a_line_for_each_block_and_a_cell_for_each_step_with_the_flow_s_numbers() -> None:
    found = series()
    course = course_of(found)
    assert [line.name for line in course.lines] == [f"/op{n}" for n in range(6)]
    assert course.steps == tuple(range(30))
    for line in course.lines:
        assert list(line.values) == [flow.site(line.name).l2_norm for flow in found]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("steps", [1, 30, 300])
def test_it_fits_the_width(width, steps) -> None:
    flow = series(1)[0]
    found = History(flow for _ in range(steps))
    assert max(map(cell_len, course_text(course_of(found), width).splitlines())) <= width


def test_a_fading_gradient_fades_from_left_to_right() -> None:
    rows = course_text(course_of(series()), 80).splitlines()[1:]
    bars = rows[0].split()[1]
    assert bars[0] == "▅" and bars[-1] in "▁▂▃"
    assert list(bars) == sorted(bars, reverse=True)


def test_chosen_values_and_findings_are_told(monkeypatch) -> None:
    monkeypatch.setattr(presenter, "diagnose", lambda flow: diagnoses.every())
    rows = course_text(course_of([*series(3), nan()], values=["/op2"]), 80).splitlines()
    assert [row.split()[0] for row in rows].count("/op2") == 2
    assert rows[2].split()[1] == "▅▅▅!"
    assert "ERROR dead at /op1: from backward 0 on, 4x" in rows
    with pytest.raises(SiteNotFoundError):
        course_of(series(), values=["/nothing"])


def nan():
    flow = flows.chain(6)
    sites = tuple(
        dataclasses.replace(site, statistics=flows.full(1.0, nan=2)) if site.key == "/op1" else site
        for site in flow.sites
    )  # fmt: skip
    return dataclasses.replace(flow, sites=sites, event=dataclasses.replace(flow.event, backward=3))


def test_the_command(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    found = series()
    fxgrad.save_series(found, "series.json")
    result = CliRunner().invoke(app, ["plot", "series.json", "--value", "/op3"])
    assert result.exit_code == 0, result.output
    assert result.output == course_text(course_of(found, values=["/op3"]), 60)
    found[0].to_json("flow.json")
    assert CliRunner().invoke(app, ["plot", "flow.json"]).output.startswith("Net: nothing wrong found")
    assert CliRunner().invoke(app, ["plot", "flow.json", "-o", "flow.gif"]).exit_code == 2


def test_figures(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    found = series()
    figure = found.plot(tmp_path / "heat.png", values=["/op3"])
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    above, below = figure.axes[:2]
    assert [label.get_text() for label in below.get_yticklabels()] == [f"/op{n}" for n in range(6)]
    assert len(below.patches) == 6 * 30
    lines = {line.get_label(): list(line.get_ydata()) for line in above.get_lines()}
    assert lines["/op3"] == [flow.site("/op3").l2_norm for flow in found]
    profile = found[0].plot().axes[0]
    assert profile.get_yscale() == "log"
    assert list(profile.get_lines()[0].get_ydata()) == [site.l2_norm for site in found[0].sites if site.measured]
    monkeypatch.chdir(tmp_path)
    fxgrad.save_series(found, "series.json")
    assert CliRunner().invoke(app, ["plot", "series.json", "-o", "x.svg", "-o", "x.pdf"]).exit_code == 0
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_without_matplotlib_or_flows_it_says_what_to_do(monkeypatch) -> None:
    with pytest.raises(OptionError, match="run a backward pass"):
        History().plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for one in (flows.chain(), series()):
        with pytest.raises(OptionError, match=r"pip install 'fxgrad\[plot\]'"):
            one.plot()


def test_the_loss_stands_above_the_heat_map_where_it_was_noted() -> None:
    found = History(series(5))
    steps = tuple(flow.event.backward for flow in found)
    losses = (2.5, 2.25, None, 0.5, 0.75)
    noted = found.with_notes({"loss": Series("loss", "", steps, losses), "rate": Series("rate", "", steps, (0.1,) * 5)})
    figure = noted.plot(values=["/op2"])
    above, _, _, _ = figure.axes  # the last is the bar of colours
    (line,) = above.get_lines()
    assert line.get_label() == "loss"
    assert [y for y in line.get_ydata() if y == y] == [2.5, 2.25, 0.5, 0.75]  # NaN where there is none
    assert len(found.plot().axes) == 3
    assert course_text(course_of(noted, notes=noted.notes), 80).splitlines()[1] == "loss: 2.5 … 0.75, at least 0.5"
