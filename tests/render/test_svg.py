from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET  # our own output

import pytest

from fxgrad.errors import GraphvizMissingError
from fxgrad.render import engine
from fxgrad.render.lettering import wide
from fxgrad.render.scale import scale_of
from fxgrad.render.themes import THEMES
from tests import diagnoses, flows

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
    allowed = {"svg", "g", "title", "defs", "pattern", "rect", "path", "circle", "text"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    for element in root.iter():
        names = {re.sub(r"\{.*\}", "", name).lower() for name in element.attrib}
        assert "href" not in names
        assert not any(name.startswith("on") for name in names)
    assert drawn(flows.named(word), depth=9).tag == f"{SVG}svg"


@pytest.mark.parametrize("word", ["&amp;", "&lt;b&gt;", "&eacute;", '\\"', "end\\", "\\N\\G\\l", "<b>", "%s {0}"])
def test_names_are_shown_as_they_are(word) -> None:
    labels = [element.text or "" for element in drawn(flows.named(word), depth=9).iter(f"{SVG}text")]
    assert f"m/{word}" in labels


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
    wanted = flows.chain().to_svg()
    no_engine(monkeypatch)
    program = tmp_path / "dot"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, pygraphviz\n"
        "form = next(word[2:] for word in sys.argv if word.startswith('-T'))\n"
        "graph = pygraphviz.AGraph(string=sys.stdin.read())\n"
        "sys.stdout.buffer.write(graph.draw(format=form, prog='dot'))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert flows.chain().to_svg() == wanted


def test_notebooks_get_the_picture_and_the_profile_or_the_words(monkeypatch) -> None:
    html = flows.chain()._repr_html_()
    assert html.startswith("<svg")
    assert html.count("<pre>") == 1 and "/op3" in html.partition("<pre>")[2]
    assert "background-color: #fff6cf" in html  # the neutral colour of the scale
    no_engine(monkeypatch)
    html = flows.named("<script>x</script>")._repr_html_()
    assert html.startswith("<pre>")
    assert "nothing wrong found" in html
    assert "<script>" not in html


def test_lines_of_fontconfig_are_left_out_and_no_others(capfd: pytest.CaptureFixture[str]) -> None:
    with engine._without_lines(b"Fontconfig "):
        os.write(2, b"before\nFontconfig warning: unknown element\nafter")
    os.write(2, b" and later\n")
    assert capfd.readouterr().err == "before\nafter and later\n"


def test_it_is_as_wide_as_the_page_and_says_its_size() -> None:
    root = drawn(flows.chain())
    assert root.get("width") == "100%"
    assert [float(part) for part in root.get("viewBox").split()][:2] == [0, 0]


def boxes(root):
    """Left, top, right, bottom of all rectangles, and of the words as wide as they may get."""
    for element in root.iter(f"{SVG}rect"):
        if element.get("x") is not None:
            x, y, w, h = (float(element.get(name)) for name in ("x", "y", "width", "height"))
            yield x, y, x + w, y + h
    for element in root.iter(f"{SVG}text"):
        x, y, size = (float(element.get(name)) for name in ("x", "y", "font-size"))
        width = wide(element.text or "", size, bold=element.get("font-weight") == "bold")
        left = {"middle": x - width / 2, "end": x - width}.get(element.get("text-anchor"), x)
        yield left, y - size, left + width, y + size / 4


@pytest.mark.parametrize("direction", ["down", "right"])
@pytest.mark.parametrize("word", flows.NASTY)
def test_nothing_is_cut(word, direction) -> None:
    found = diagnoses.named(word).findings
    root = drawn(flows.named(word), findings=found, direction=direction, fold=False)
    _, _, width, height = (float(part) for part in root.get("viewBox").split())
    for left, top, right, bottom in boxes(root):
        assert left >= 0 and top >= 0 and right <= width and bottom <= height


def test_a_long_finding_wraps_and_is_told_to_its_end() -> None:
    message = " ".join(f"word{n}" for n in range(60))
    root = drawn(flows.chain(3), findings=[diagnoses.dead(message=message)])
    words = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert message in words
    assert "try: Start the bias at 0." in words


def strip(root):
    """Names and colours of the cells of a folded run."""
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "cell":
            yield group.find(f"{SVG}title").text.split(":")[0], group.find(f"{SVG}rect").get("fill")


def test_a_folded_run_shows_a_cell_for_each_block_in_the_colours_of_the_scale() -> None:
    flow = flows.nested(12, 10)
    cells = list(strip(drawn(flow, depth=1)))
    size = scale_of(flow)
    last = {f"body.{n}": flow.site(f"body.{n}.op9").l2_norm for n in range(12)}
    assert cells == [(name, size.colour(norm)) for name, norm in last.items()]
    words = [element.text for element in drawn(flow, depth=1).iter(f"{SVG}text")]
    assert "body.0 … 11" in words
    assert f"first {last['body.0']:.3g} · last {last['body.11']:.3g}" in words


def test_the_culprit_is_marked_in_its_box_and_in_its_cell() -> None:
    flow = flows.nested(12, 10)
    node = next(node for node in flow.nodes if node.key == "body.5.op3")
    root = drawn(flow, depth=1, findings=[diagnoses.dead(node.key, node=node)])
    rings = [
        group for group in root.iter(f"{SVG}g")
        if group.get("class") == "cell" and any(r.get("stroke") == THEMES["light"].accent for r in group)
    ]  # fmt: skip
    assert [group.find(f"{SVG}title").text.split(":")[0] for group in rings] == ["body.5"]
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert len(list(root.iter(f"{SVG}circle"))) == 2  # beside the finding, and on the box
    assert any("at body.5" in (word or "") and word.startswith("marked") for word in words)


def test_marks_are_those_of_the_diagnosis_only() -> None:
    text = flows.chain(5, factor=1e-3).to_svg(findings=())
    assert "DROP" not in text
    assert THEMES["light"].accent not in text


def test_themes_change_the_ground_and_not_what_colours_mean() -> None:
    flow = flows.nested(12, 10)
    assert list(strip(drawn(flow))) == list(strip(drawn(flow, theme="dark")))
    assert THEMES["dark"].paper in flow.to_svg(theme="dark")
    assert THEMES["dark"].paper not in flow.to_svg()


def test_what_is_no_ordinary_number_is_in_the_legend() -> None:
    words = " ".join(element.text or "" for element in drawn(flows.special(), fold=False).iter(f"{SVG}text"))
    for said in ("exactly zero", "NaN or Inf", "0 or Inf in float32", "no gradient to measure"):
        assert said in words
    assert "NaN or Inf" not in flows.chain().to_svg()
