from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from rich.console import Console

from fxgrad.errors import OptionError
from fxgrad.render.scale import colour
from fxgrad.schema import Statistics
from tests import diagnoses, flows


def printed(flow, **options) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(flow.table(**({"findings": ()} | options)))
    return capture.get()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


def test_rows_are_in_backward_order() -> None:
    found = rows(printed(flows.chain(3)))
    assert [line.split()[1] for line in found] == ["/op2", "/op1", "/op0"]


def test_the_drop_that_matters_stands_out_without_numbers() -> None:
    nodes = [flows.node(f"/op{n}") for n in range(4)]
    norms = [1e-6, 1e-6, 1.0, 1.0]
    sites = [flows.site(n, flows.full(v)) for n, v in zip(nodes, norms, strict=True)]
    uses = [(a.key, b.key, "args[0]") for a, b in pairwise(nodes)]
    flow = flows.flow(nodes, sites, uses)
    text = printed(flow, findings=flows.lost(flow))
    marked = [line for line in rows(text) if "<- drop" in line]
    assert len(marked) == 1
    assert "/op1" in marked[0]
    bars = [line.count("#") for line in rows(text)]
    assert bars == [12, 12, 1, 1]


def test_special_gradients_read_differently() -> None:
    text = printed(flows.special())
    for words in ("3 NaN", "8 Inf", "0 (all zero)", "0 (below float32's range)", "Inf (above float32's range)"):
        assert words in text
    assert "without a gradient: 1 frozen" in text


def test_limit_keeps_the_drops() -> None:
    flow = flows.chain(30, factor=0.4)
    text = printed(flow, limit=5, findings=flows.lost(flow))
    assert len(rows(text)) == 5
    assert text.count("<- drop") == 3
    assert "25 more rows" in text


@pytest.mark.parametrize("word", flows.NASTY)
def test_names_are_no_markup(word) -> None:
    text = printed(flows.named(word))
    if word.startswith("[red]"):
        assert word in text


def test_names_neither_steer_the_terminal_nor_turn_into_pictures() -> None:
    text = printed(flows.named("a\x1b[2Jb\\"))
    assert "\x1b" not in text
    assert "a\\x1b[2Jb\\ (loss at the top" in text
    assert ":smile:" in printed(flows.named(":smile:"))


def test_a_leaf_module_is_shown_with_its_class() -> None:
    assert "block.fc Linear" in printed(flows.residual())


def test_a_narrow_terminal_cuts_no_number() -> None:
    console = Console(width=50, no_color=True)
    with console.capture() as capture:
        console.print(flows.nested(2, 2).table())
    assert "…" not in "".join(rows(capture.get()))


def test_shares_of_zeros_say_none_and_all_only_where_it_is_so() -> None:
    counts = [0, 1, 500, 999, 1000]
    nodes = [flows.node(f"/op{n}") for n in counts]
    sites = [flows.site(n, flows.full(1.0, zero=z, numel=1000)) for n, z in zip(nodes, counts, strict=True)]
    sites.append(flows.site(flows.node("/unknown"), Statistics("norm", 8, 1.0)))
    found = rows(printed(flows.flow([*nodes, flows.node("/unknown")], sites, [])))
    shares = [line.split("│")[6].strip() for line in reversed(found)]
    assert shares == ["0%", "<1%", "50%", ">99%", "100%", ""]


def test_norms_that_lie_close_together_get_long_bars() -> None:
    bars = [line.count("#") for line in rows(printed(flows.chain(2, factor=0.9)))]
    assert min(bars) >= 11


@pytest.mark.parametrize("limit", [0, -1, True, "3"])
def test_bad_limits(limit) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        flows.chain().table(limit=limit)


def test_bad_norms() -> None:
    with pytest.raises(OptionError, match="'l2_norm', 'rms', 'max_abs'"):
        flows.chain().table(norm="l1")
    with pytest.raises(OptionError, match="statistics='full'"):
        flows.chain(level="norm").table(norm="max_abs")


def test_a_culprit_is_marked_at_its_site() -> None:
    found = rows(printed(flows.chain(3), findings=diagnoses.every()))
    assert [line.split("│")[1].strip() for line in found] == ["/op2", "/op1", "<- 1 ERROR dead", "/op0"]
    assert "findings: 1 error, 1 warning, 1 info" in printed(flows.chain(3), findings=diagnoses.every())
    assert "<- 1 ERROR dead" in printed(flows.chain(9), findings=diagnoses.every(), limit=1)
    assert "findings" not in printed(flows.chain(3))


def test_of_several_outputs_the_one_that_is_blamed_is_marked() -> None:
    flow = flows.residual()
    sites = tuple(dataclasses.replace(s, statistics=flows.full(1.0)) for s in flow.sites)
    flow = dataclasses.replace(flow, sites=sites)

    def marked(site):
        found = rows(printed(flow, findings=[diagnoses.dead("/chunk", site=site)]))
        return [one.split()[1] for one, two in pairwise(found) if "<- 1" in two]

    assert marked("/chunk[1]") == ["/chunk[1]"]
    assert marked("/chunk") == marked(None) == ["/chunk[1]", "/chunk[0]"]


def test_a_table_prints_as_a_table(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = str(flows.chain(3).table())
    assert "/op2" in text and "│" in text
    assert max(map(len, text.splitlines())) <= 100
    assert repr(flows.chain(3).table()) == "FlowTable(3 rows)"


def test_findings_of_something_else() -> None:
    with pytest.raises(OptionError, match=r"such as flow\.findings, or a diagnosis, but holds 'dead'"):
        flows.chain().table(findings=["dead"])


def test_bars_have_the_colours_of_the_scale() -> None:
    console = Console(width=120, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(flows.chain(3).table(findings=()))
    for decades in (0, -1, -2):
        red, green, blue = (int(colour(decades)[i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}" in capture.get()


@pytest.mark.parametrize("width", [34, 40, 60, 80, 120, 200])
def test_a_row_is_one_line_and_no_number_is_cut_however_narrow_the_screen(width: int) -> None:
    names = [f"encoder.layers.{n}.self_attention.output/scaled_dot_product_attention" for n in range(12)]
    nodes = [flows.node(name) for name in names]
    sites = [flows.site(node, flows.full(0.1234 * 10.0**-n)) for n, node in enumerate(nodes)]
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(flows.flow(nodes, sites, []).table(findings=()))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    assert len(rows(text)) == len(sites)
    assert all(f" {site.l2_norm:.3g} " in row for site, row in zip(reversed(sites), rows(text), strict=True))
    assert ("source" in text.splitlines()[2]) == (width >= 120)
    assert ("no room for" in " ".join(text.split())) == (width < 120)
