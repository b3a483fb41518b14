"""What a notebook shows: the page in a frame of its own, or the picture."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import fxgrad
from fxgrad.errors import GraphvizMissingError, OptionError
from fxgrad.schema import History
from tests import flows
from tests.render.page.conftest import Opened


def notebook(browser, tmp_path: Path, text: str, **context: object) -> Opened:
    """A notebook's page with this output in it."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title><script>secret = 1</script>{text}", encoding="utf-8")
    page = browser.new_context(viewport={"width": 1000, "height": 900}, **context).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(path.as_uri())
    return Opened(page, errors, [])


def test_the_page_runs_in_a_frame_that_sees_nothing_of_the_notebook(browser, tmp_path, residual):
    found = notebook(browser, tmp_path, residual.show(height=700)._repr_html_())
    frame = found.page.frame_locator("iframe")
    frame.locator('.seen[data-id="head"]').click()
    assert "head.weight" in frame.locator(".panel").inner_text()
    answer = "() => { try { return parent.secret ?? 'hidden'; } catch (error) { return 'refused'; } }"
    assert found.page.frames[1].evaluate(answer) == "refused"
    assert found.page.locator("iframe").bounding_box()["height"] >= 700
    assert found.errors == []


def test_where_scripts_do_not_run_the_frame_has_the_words(browser, tmp_path, vanishing):
    found = notebook(browser, tmp_path, vanishing.show()._repr_html_().replace("allow-scripts ", ""))
    body = found.page.frame_locator("iframe").locator("body")
    assert "ERROR vanishing" in body.inner_text()


def test_where_frames_are_taken_out_the_picture_is_seen(browser, tmp_path, vanishing):
    text = re.sub(r"<iframe.*?</iframe>", "", vanishing.show()._repr_html_(), flags=re.DOTALL)
    found = notebook(browser, tmp_path, text)
    image = found.page.locator("img")
    assert image.evaluate("one => one.naturalWidth") > 100
    assert "vanishing" in image.get_attribute("alt")


def test_other_forms_for_what_takes_no_markup(vanishing):
    bundle = vanishing.show()._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<?xml") or "<svg" in bundle["image/svg+xml"]
    assert bundle["text/plain"].startswith("SigmoidMLP: 1 error: vanishing")


def test_without_graphviz_there_is_the_page_alone(monkeypatch, vanishing):
    def missing(*_: object, **__: object) -> str:
        message = "no Graphviz"
        raise GraphvizMissingError(message)

    monkeypatch.setattr("fxgrad.presenter.flow_svg", missing)
    bundle = vanishing.show()._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}


def test_runs_and_comparisons_are_shown_too():
    one, two = flows.chain(), flows.chain(factor=0.5)
    assert "srcdoc" in History([one, two]).show()._repr_html_()
    assert "srcdoc" in fxgrad.compare(one, two).show()._repr_html_()


def test_nothing_in_a_name_leaves_the_frame():
    word = '"></iframe><script>alert(1)</script>'
    text = flows.named(word).show()._repr_html_()
    assert "<script>" not in text
    assert html.escape("<script>") in text


@pytest.mark.parametrize("height", [0, 12.5, True, "tall"])
def test_a_height_that_is_none_is_refused(height):
    with pytest.raises(OptionError, match="height must be"):
        flows.chain().show(height=height)
