"""Runs and comparisons in the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.render.page.course import STEP, run_of
from fxgrad.render.scale import scale_of
from fxgrad.run_file import RunFile
from fxgrad.schema import GradientFlow, History
from tests import flows


def step_of(number: int, factor: float = 0.5, nan: bool = False) -> GradientFlow:
    """The flow of a step: ``factor`` is passed on by each of six functions, the last of them may turn NaN."""
    flow = flows.chain(6, factor * (1 + number / 100))
    sites = [replace(s, statistics=replace(s.statistics, nan_count=2)) if nan and s.measured else s for s in flow.sites]
    return replace(flow, sites=tuple(sites), event=replace(flow.event, backward=number))


def history(count: int = 20, factor: float = 0.5, bad: int | None = None) -> History:
    return History(step_of(n, factor, nan=bad is not None and n >= bad) for n in range(count))


def moment(found) -> str:
    return found.page.locator(".moment").inner_text()


def test_codes_tell_norms_to_a_fifth_of_a_percent():
    run = run_of(history())
    site = run.rows.index(next(n for n, one in enumerate(run.shown.sites) if one.key == "/op2"))
    for event, flow in enumerate(history()):
        told = 10 ** (run.l2_norm[site * len(run.steps) + event] / STEP)
        assert told == pytest.approx(flow.site("/op2").l2_norm, rel=2e-3)


def test_the_first_bad_flow_is_the_one_that_is_kept_whole():
    run = run_of(history(bad=7))
    assert run.bad == tuple(range(7, 20))
    assert run.shown.event.backward == 7
    assert run_of(history()).shown.event.backward == 19


def test_a_long_run_of_many_values_keeps_the_boundaries_of_blocks(monkeypatch):
    monkeypatch.setattr("fxgrad.render.page.course._VALUES", 60)
    run = run_of(
        History(replace(flows.nested(10, 5), event=replace(flows.chain().event, backward=n)) for n in range(3))
    )
    assert len(run.rows) <= 20 and len(run.l2_norm) <= 60
    ids = [run.shown.sites[place].id for place in run.rows]
    assert "body.9.op4" in ids


def test_no_flow_is_an_error_of_ours():
    with pytest.raises(OptionError, match="no backward pass was recorded"):
        History().to_html()


def test_the_slider_goes_through_the_events(opened):
    runs = history()
    found = opened(runs.to_html(findings=()))
    assert "backward 19, 20 of 20" in moment(found)
    slider = found.page.get_by_role("slider")
    slider.fill("4")
    found.page.wait_for_function("() => document.querySelector('.moment').textContent.startsWith('backward 4,')")
    flow = runs[4]
    assert found.fill_of("/op2") == scale_of(flow).colour(flow.site("/op2").l2_norm)
    slider.focus()
    found.page.keyboard.press("ArrowRight")
    found.page.wait_for_function("() => document.querySelector('.moment').textContent.startsWith('backward 5,')")


def test_it_opens_at_the_first_bad_event_and_leads_back_to_it(opened):
    found = opened(history(bad=7).to_html(findings=()))
    assert "backward 7" in moment(found)
    assert "nonfinite" in found.seen("/op2").locator(".back").get_attribute("class")
    found.page.get_by_role("slider").fill("2")
    found.page.wait_for_function("() => document.querySelector('.moment').textContent.startsWith('backward 2,')")
    assert "nonfinite" not in found.seen("/op2").locator(".back").get_attribute("class")
    found.page.get_by_role("button", name="First bad: backward 7").click()
    assert "backward 7" in moment(found)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_a_run_and_a_comparison(opened, theme):
    for text in (history(bad=7).to_html(), fxgrad.compare(history(), history(20, 0.05)).to_html()):
        assert opened(text, color_scheme=theme).serious_faults() == []


def test_it_plays(opened):
    found = opened(history(6).to_html(findings=()))
    found.page.get_by_role("button", name="Play").click()
    found.page.wait_for_function("() => document.querySelector('.moment').textContent.startsWith('backward 5,')")
    found.page.get_by_role("button", name="Play").wait_for()


def test_a_click_in_the_heat_map_goes_to_step_and_block(opened):
    found = opened(history(20).to_html(findings=()))
    canvas = found.page.locator(".heat canvas")
    names = found.page.locator(".heat .names li").all_inner_texts()
    width = canvas.bounding_box()["width"]
    canvas.click(position={"x": width * 0.26, "y": names.index("/op3") * 11 + 5})
    assert "backward 5," in moment(found)
    assert found.panel().startswith("/op3")


def test_a_value_has_its_course_over_the_run(opened):
    found = opened(history().to_html(findings=()), "#at=%2Fop2")
    assert "Over the run" in found.panel()
    assert found.page.get_by_role("img", name="20 backward passes").count() >= 1


def test_a_step_is_part_of_the_address(opened):
    found = opened(history().to_html(findings=()), "#step=3")
    assert "backward 3," in moment(found)


def test_a_run_file_gives_the_same_page(tmp_path):
    runs = history(5)
    with RunFile.create(tmp_path / "run.fxgrad") as file:
        for flow in runs:
            file.append(flow)
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        assert run.to_html(findings=()) == runs.to_html(findings=())


def test_a_comparison_shows_decades_of_difference_changed_most_first(opened):
    before, after = step_of(0, 0.5), step_of(0, 0.05)
    comparison = fxgrad.compare(before, after)
    found = opened(comparison.to_html())
    change = comparison.changes[0]
    assert found.fill_of(change.id) == scale_of(after, "l2_norm", "absolute").colour(change.ratio)
    rows = found.page.locator(".panel table").first.locator("tr").all_inner_texts()
    assert rows[0].startswith(change.id)
    assert "Findings: " in found.page.locator(".verdict").inner_text()


def test_two_runs_are_compared_step_by_step(opened):
    one, two = history(12, 0.5), history(8, 0.05)
    found = opened(fxgrad.compare(one, two).to_html())
    assert "backward 7, 8 of 8" in moment(found)
    found.page.get_by_role("slider").fill("3")
    found.page.wait_for_function("() => document.querySelector('.moment').textContent.startsWith('backward 3,')")
    ratio = two[3].site("/op0").l2_norm / one[3].site("/op0").l2_norm
    assert found.fill_of("/op0") == scale_of(two[3], "l2_norm", "absolute").colour(ratio)


def test_runs_without_a_common_step_are_refused():
    later = History(step_of(n) for n in range(30, 32))
    with pytest.raises(OptionError, match="no step in common"):
        fxgrad.compare(history(3), later)
