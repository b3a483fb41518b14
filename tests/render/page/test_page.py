"""The page as people use it: in a browser, with a mouse or a keyboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fxgrad.render.gains import Gains
from fxgrad.render.scale import scale_of
from fxgrad.render.words import number
from tests import flows

_HOSTILE = '</script><script>window.ran = 1</script><img src=x onerror="window.ran = 2">'


def test_it_opens_where_the_whole_model_fits(opened, residual):
    found = opened(residual.to_html())
    stage = found.page.locator("#graph").bounding_box()
    for place in ("node", "box", "strip"):
        for name in found.names(place):
            box = found.seen(name).bounding_box()
            assert stage["x"] <= box["x"] and box["x"] + box["width"] <= stage["x"] + stage["width"]
            assert stage["y"] <= box["y"] and box["y"] + box["height"] <= stage["y"] + stage["height"]


def test_boxes_have_the_colours_of_the_picture(opened, residual):
    found = opened(residual.to_html())
    size = scale_of(residual)
    assert found.fill_of("head") == size.colour(residual.site("head").l2_norm)
    found.page.get_by_role("button", name="rms", exact=True).click()
    assert found.fill_of("head") == scale_of(residual, "rms").colour(residual.site("head").rms)


def test_the_gain_is_that_of_the_picture(opened, residual):
    found = opened(residual.to_html())
    for key in ("head", "stem"):
        gain = Gains(residual).of({key}, [residual.site(key)])
        words = f"gain {number(gain)}" if gain is not None else "cannot be told"
        found.seen(key).click()
        shown = found.panel() if gain is None else found.seen(key).get_attribute("aria-label")
        assert words in shown


def test_a_strip_opens_at_the_cell_that_is_clicked_and_closes_again(opened, vanishing):
    found = opened(vanishing.to_html())
    (strip,) = found.names("strip")
    cells = found.seen(strip).locator(".cell")
    assert cells.count() == 20
    cells.nth(7).click()
    assert len(found.names("strip")) == 2
    assert "hidden.7" in found.names("node") and "hidden.8" not in found.names("node")
    (frame,) = found.names("frame")
    found.seen(frame).locator(".toggle").click()
    assert found.names("strip") == [strip]


def test_a_closed_box_tells_worst_middle_and_last(opened):
    found = opened(flows.nested(30, 3).to_html(findings=()))
    label = found.page.locator(".seen.strip").first.get_attribute("aria-label")
    assert "30 × Block worst 0.858 · mid 0.000858 · last 1e-06, body.0 … 29" in label


def test_opening_keeps_what_stays_in_its_place(opened, residual):
    found = opened(residual.to_html())
    found.page.get_by_role("button", name="Close all").click()
    first = found.page.locator(".seen.box, .seen.strip").first
    name = first.get_attribute("data-id")
    above = found.seen("stem").bounding_box()
    first.locator(".toggle").click()
    assert found.page.locator(f'[data-id="{name}"]').count() == 0 or name in found.names("frame")
    after = found.seen("stem").bounding_box()
    assert after["y"] == pytest.approx(above["y"], abs=2)


def test_a_finding_opens_what_hides_its_culprit_and_draws_the_way_back(opened, vanishing):
    found = opened(vanishing.to_html())
    culprit = vanishing.findings[0].node.key
    assert culprit not in found.names("node")
    found.page.locator(".findings li button").first.click()
    assert culprit in found.names("node")
    assert found.seen(culprit).get_attribute("aria-selected") == "true"
    assert vanishing.findings[0].message in found.page.locator(".findings").inner_text()
    assert found.page.locator(".way.on").count() >= 2
    found.page.locator(".findings li button").first.click()
    assert found.page.locator(".way.on").count() == 0


def test_search_finds_by_name_operation_class_and_file(opened, vanishing):
    found = opened(vanishing.to_html())
    search = found.page.get_by_role("combobox", name="Search")
    for query, first in (
        ("hidden.13", "hidden.13"),
        ("sigmoid#4", "/sigmoid#4"),
        ("linear", "hidden.0"),
        ("demo.py", "hidden.0"),
    ):
        search.fill(query)
        assert first in found.page.locator("#results li").first.inner_text()
    search.fill("hidden.13")
    search.press("Enter")
    assert "hidden.13" in found.names("node")
    assert found.panel().startswith("hidden.13")
    search.fill("no such thing")
    assert found.page.locator("#results").is_hidden()


def test_the_window_may_change_its_size(opened, vanishing):
    found = opened(vanishing.to_html())
    canvas = found.page.locator(".profile canvas")
    before = canvas.bounding_box()["height"]
    found.page.set_viewport_size({"width": 1366, "height": 500})
    found.page.wait_for_function("() => document.querySelector('.profile canvas').height < 480")
    assert canvas.bounding_box()["height"] < before


def test_a_filter_dims_what_it_does_not_ask_for(opened, vanishing):
    found = opened(vanishing.to_html())
    found.page.get_by_role("combobox", name="Show only").select_option("vanishing")
    assert "dimmed" in found.seen("head").get_attribute("class")
    assert "dimmed" not in found.page.locator(".seen.strip").get_attribute("class")


def test_the_panel_has_all_statistics_the_histogram_and_the_code(opened, vanishing):
    found = opened(vanishing.to_html(source=True), "#at=head")
    words = found.panel()
    row = vanishing.site("head").statistics
    for label in ("rms", "l2 norm", "max abs", "exactly 0", "subnormal", "sum of moduli", "value, forward"):
        assert label in words
    assert f"{row.numel:,}" in words
    assert "fp16" in words and "bf16" in words and "fp8 e4m3" in words
    assert "scores: Tensor = self.head(features)" in words
    assert "head.weight" in words


def test_no_code_is_in_the_file_unless_asked_for(vanishing):
    assert "self.head(features)" not in vanishing.to_html()
    assert "self.head(features)" in vanishing.to_html(source=True)


def test_what_was_not_measured_says_why(opened, vanishing):
    found = opened(vanishing.to_html())
    found.seen("input:features").click()
    spot = next(spot for spot in vanishing.blind_spots if spot.key == "input:features")
    assert spot.detail in found.panel()


def test_profile_and_graph_are_linked_both_ways(opened, residual):
    found = opened(residual.to_html())
    canvas = found.page.locator(".profile canvas")
    size = canvas.bounding_box()
    canvas.click(position={"x": size["width"] / 2, "y": size["height"] - 12})
    assert found.seen("head").get_attribute("aria-selected") == "true"
    before = canvas.evaluate("one => one.toDataURL()")
    found.seen("stem").hover()
    assert canvas.evaluate("one => one.toDataURL()") != before


def test_the_address_brings_another_reader_to_the_same_view(opened, vanishing):
    found = opened(vanishing.to_html())
    found.page.locator(".findings li button").first.click()
    found.page.get_by_role("button", name="max abs").click()
    found.page.wait_for_url("**norm=max_abs**")
    fragment = found.page.evaluate("location.hash")
    again = opened(vanishing.to_html(), fragment)
    assert again.names("node") == found.names("node")
    assert again.page.locator(".way.on").count() == found.page.locator(".way.on").count() > 0
    assert again.page.get_by_role("button", name="max abs").get_attribute("aria-pressed") == "true"


def test_an_address_that_nobody_wrote_does_no_harm(opened, vanishing):
    found = opened(vanishing.to_html(), "#at=gone&open=%E0%A4%A&norm=l3&finding=99&view=a,b&step=1e9&show=nothing")
    assert found.names("strip")


def test_the_view_is_saved_as_svg_and_png(opened, residual, tmp_path: Path):
    found = opened(residual.to_html())
    for name, head in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with found.page.expect_download() as waiting:
            found.page.get_by_role("button", name=name).click()
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        content = path.read_bytes()
        assert content.startswith(head) and len(content) > 2000
    assert path.suffix == ".png"


def test_it_can_be_worked_with_the_keyboard_alone(opened, vanishing):
    found = opened(vanishing.to_html())
    page = found.page
    focused = "document.activeElement.dataset.id"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Escape")
    page.locator("#graph [tabindex='0']").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) in found.names("strip")
    page.keyboard.press("Enter")
    assert found.names("strip") == [] and len(found.names("node")) > 40
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "hidden.0"
    page.keyboard.press("Enter")
    assert found.panel().startswith("hidden.0")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) in found.names("frame")
    page.keyboard.press("ArrowLeft")
    assert "hidden.0" not in found.names("node")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(opened, vanishing, theme):
    found = opened(vanishing.to_html(source=True), "#at=head", color_scheme=theme)
    found.page.locator(".findings li button").first.click()
    assert found.serious_faults() == []


def test_both_themes_and_that_of_the_system(opened, vanishing):
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened(vanishing.to_html(theme="dark")).page.evaluate(ground) == "rgb(18, 22, 28)"
    assert opened(vanishing.to_html(theme="light"), color_scheme="dark").page.evaluate(ground) == "rgb(255, 255, 255)"
    assert opened(vanishing.to_html(), color_scheme="dark").page.evaluate(ground) == "rgb(18, 22, 28)"


@pytest.mark.parametrize("word", [_HOSTILE, "<!--<script>", "'\"><svg onload=window.ran=3>", *flows.NASTY])
def test_names_are_text_whatever_they_say(opened, word):
    found = opened(flows.named(word).to_html(findings=()))
    found.page.wait_for_timeout(50)
    assert found.page.evaluate("window.ran") is None
    assert found.page.locator("img, #app script").count() == 0
    key = found.names("node")[0]
    found.page.locator(".seen.node").first.click()
    assert found.panel() and key is not None


def test_a_policy_forbids_all_other_scripts_and_every_request(opened, vanishing):
    text = vanishing.to_html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text).group(1).replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    found = opened(text)
    ran = found.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = 1';
        document.body.append(script);
        return window.ran ?? null;
    }""")
    assert ran is None
    assert any("Content Security Policy" in error for error in found.errors)
    found.errors.clear()


def test_special_gradients_have_looks_of_their_own(opened):
    found = opened(flows.special().to_html(findings=()))
    looks = {name: found.seen(name).locator(".back").get_attribute("class") for name in found.names("node")}
    for key, look in (("/zero", "zero"), ("/nan", "nonfinite"), ("/tiny", "outside"), ("/blind", "blind")):
        assert look in looks[key]


def test_a_flow_without_a_node_opens(opened):
    found = opened(flows.flow([], [], []).to_html(findings=()))
    assert found.page.get_by_text("No node was recorded.").is_visible()


def test_the_data_is_strict_json(vanishing):
    text = vanishing.to_html()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1)
    assert "<" not in data
    assert json.loads(data)["flow"]["about"]["model"] == "SigmoidMLP"
