from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET  # our own output

import pytest

from fxgrad.errors import GraphvizMissingError
from fxgrad.render import svg
from tests import flows

SVG = "{http://www.w3.org/2000/svg}"


def drawn(flow, **options):
    return ET.fromstring(flow.to_svg(**options).encode())  # noqa: S314  # our own output


@pytest.mark.parametrize("flow", [flows.chain(), flows.residual(), flows.special(), flows.nested(4, 3)])
def test_it_is_well_formed_and_deterministic(flow) -> None:
    root = drawn(flow)
    assert root.tag == f"{SVG}svg"
    assert flow.to_svg() == flow.to_svg()


NASTY = (*flows.NASTY, "&#8;", "&#xFFFF;", "&lt;script&gt;", "&eacute;", '\\"', "end\\", "\\N\\G\\l", "\ufffe\ud800")


@pytest.mark.parametrize("word", NASTY)
def test_names_cannot_inject_anything(word) -> None:
    root = drawn(flows.named(word), depth=0)
    allowed = {"svg", "g", "title", "polygon", "polyline", "path", "ellipse", "text", "a"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    for element in root.iter():
        names = {re.sub(r"\{.*\}", "", name).lower() for name in element.attrib}
        assert "href" not in names
        assert not any(name.startswith("on") for name in names)
    assert drawn(flows.named(word), depth=9).tag == f"{SVG}svg"


@pytest.mark.parametrize("word", ["&amp;", "&lt;b&gt;", "&eacute;", '\\"', "end\\", "\\N\\G\\l", "<b>", "%s {0}"])
def test_names_are_shown_as_they_are(word) -> None:
    labels = [element.text or "" for element in drawn(flows.named(word), depth=9).iter(f"{SVG}text")]
    assert any(label.startswith(f"m/{word} ") for label in labels)


def test_a_long_name_is_short_in_the_label_and_whole_in_the_tooltip() -> None:
    text = flows.named("a" * 500).to_svg(depth=9)
    assert "a" * 500 in text
    labels = [element.text or "" for element in drawn(flows.named("a" * 500), depth=9).iter(f"{SVG}text")]
    assert max(map(len, labels)) < 150


def test_writing_is_whole(tmp_path) -> None:
    path = tmp_path / "flow.svg"
    assert flows.chain().to_svg(path) == path.read_text(encoding="utf-8")


def test_a_large_flow_is_drawn_without_a_word(capfd) -> None:
    root = drawn(flows.nested(120, 10), depth=9, fold=False)
    assert sum(group.get("class") == "node" for group in root.iter(f"{SVG}g")) > 1200
    assert "long time" not in capfd.readouterr().err


def no_engine(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)  # importing it raises ImportError
    monkeypatch.setenv("PATH", "")


def test_without_an_engine_the_dot_text_is_written(tmp_path, monkeypatch) -> None:
    no_engine(monkeypatch)
    with pytest.raises(GraphvizMissingError, match=r"pip install 'pygraphviz>=2\.0'") as error:
        flows.chain().to_svg(tmp_path / "flow.svg")
    assert str(tmp_path / "flow.dot") in str(error.value)
    assert (tmp_path / "flow.dot").read_text(encoding="utf-8") == flows.chain().to_dot()
    assert not (tmp_path / "flow.svg").exists()


def test_dot_on_path_is_used_where_the_wheel_is_missing(tmp_path, monkeypatch) -> None:
    no_engine(monkeypatch)
    fake = tmp_path / "dot"
    fake.write_text("#!/bin/sh\n/bin/cat >/dev/null\necho '<svg>from PATH</svg>'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "from PATH" in flows.chain().to_svg()


def test_notebooks_get_the_picture_or_a_table(monkeypatch) -> None:
    assert flows.chain()._repr_html_().startswith("<svg")
    no_engine(monkeypatch)
    html = flows.named("<script>x</script>")._repr_html_()
    assert html.startswith("<table>")
    assert "<script>" not in html


def test_lines_of_fontconfig_are_left_out_and_no_others(capfd: pytest.CaptureFixture[str]) -> None:
    with svg._without_lines(b"Fontconfig "):
        os.write(2, b"before\nFontconfig warning: unknown element\nafter")
    os.write(2, b" and later\n")
    assert capfd.readouterr().err == "before\nafter and later\n"
