from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from fxgrad.render.findings import one_line, plain_text, shown_source, top_lines
from fxgrad.schema import RULES, Diagnosis, NotChecked
from tests import diagnoses, flows

EXPECTED = """\
1. ERROR dead at /op1 (/home/user/net.py:4)
   16 of 16 units never fired
   try: Start the bias at 0.
   evidence (one step): share 1, units 16, samples 1024, rms 1.5e-07
   parameters that suffer: fc.0.weight, fc.1.weight, fc.2.weight, fc.3.weight and 2 more
   units: 0, 1, 2, 3, 4, 5, 6, 7 and 8 more
   way of the fault: /op1 -> /op0 -> input:x
   explains 2 more: vanishing at /op0, zero at fc.weight
   see docs/findings/dead.md
2. WARNING loss_seed outside the model
   the gradient was NaN when it entered
   try: Look at the loss.
   evidence (one step): nan NaN, inf -Inf
3. INFO frozen at fc.bias
   fc.bias requires no gradient
   confidence: exact
not checked: spike, underflow: needs several steps
not checked: update_size: no optimizer was given
1 error, 1 warning, 1 info; 21 of 24 rules checked"""


def shown(diagnosis, width=200, **options) -> str:
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(diagnosis)
    return capture.get()


def test_the_list() -> None:
    assert len(RULES) == 24
    assert plain_text(diagnoses.every()) == EXPECTED
    assert str(diagnoses.every()) == EXPECTED


def test_a_terminal_shows_the_same_words_in_colour() -> None:
    assert "\n".join(map(str.rstrip, shown(diagnoses.every(), no_color=True).splitlines())) == EXPECTED
    coloured = shown(diagnoses.every(), force_terminal=True, color_system="standard")
    assert "\x1b[1;31mERROR" in coloured
    assert "\x1b[1;33mWARNING" in coloured


def test_lines_below_a_finding_stay_indented_where_they_wrap() -> None:
    lines = shown(diagnoses.diagnosis(diagnoses.dead()), width=40, no_color=True).splitlines()
    ends = next(n for n, line in enumerate(lines) if line.startswith("not checked"))
    assert len(lines[1:ends]) > 9
    assert {line[:3] for line in lines[2:ends]} == {"   "}


def test_nothing_found_is_said() -> None:
    assert plain_text(Diagnosis(())) == "no findings; 24 of 24 rules checked"
    assert plain_text(diagnoses.diagnosis()).endswith("no findings; 21 of 24 rules checked")


def test_only_rules_that_were_asked_count_as_checked() -> None:
    some = Diagnosis((), (NotChecked("spike", "needs several steps"),), ("spike", "dead", "mine"))
    assert plain_text(some).endswith("no findings; 2 of 3 rules checked")
    assert some.checked == ("dead", "mine")


def test_a_long_way_shows_its_ends() -> None:
    path = tuple(f"/op{n}" for n in range(30))
    text = plain_text(diagnoses.diagnosis(diagnoses.dead(path=path)))
    assert "way of the fault: /op0 -> /op1 -> ... 27 more ... -> /op29" in text


def test_one_line() -> None:
    assert str(diagnoses.dead()) == "ERROR dead at /op1 (/home/user/net.py:4): 16 of 16 units never fired"
    assert one_line(diagnoses.dead(site=None)) == one_line(diagnoses.dead())
    assert one_line(diagnoses.frozen()) == "INFO frozen at fc.bias: fc.bias requires no gradient"


def test_top_lines() -> None:
    assert top_lines(()) == []
    found = [diagnoses.dead(), diagnoses.dead(), diagnoses.outside(), diagnoses.frozen()]
    lines = top_lines(found)
    assert lines[0] == "findings: 2 errors, 1 warning, 1 info; the first 3:"
    assert lines[1].startswith("  ERROR dead at /op1")
    assert len(lines) == 4
    assert top_lines(found[2:])[0] == "findings: 1 warning, 1 info:"
    long = dataclasses.replace(diagnoses.frozen(), message="x" * 500)
    assert max(map(len, top_lines([long]))) == 160


def test_files_below_the_working_folder_are_named_from_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_source(f"{tmp_path}/deep/net.py:7") == f"{Path('deep') / 'net.py'}:7"
    for same in ("/elsewhere/net.py:7", "net.py:7", "<stdin>:7", "net.py", ""):
        assert shown_source(same) == same


@pytest.mark.parametrize("word", [*flows.NASTY, "a\x1b[2Jb", "\ud800", ":smile:"])
def test_names_steer_neither_terminal_nor_page(word) -> None:
    diagnosis = diagnoses.named(word)
    text, html = plain_text(diagnosis), diagnosis._repr_html_()
    assert text.isprintable() or set(text) - set("\n") == {c for c in text if c.isprintable()}
    assert "<script>" not in html and "<b>bold" not in html and "\x1b" not in html
    assert shown(diagnosis, width=5000, no_color=True).split() == text.split()


def test_a_notebook_lists_them() -> None:
    html = diagnoses.every()._repr_html_()
    assert html.startswith("<ol><li><b>ERROR dead at /op1")
    assert html.count("<li>") == 3
    assert diagnoses.diagnosis()._repr_html_().startswith("<p>not checked")
