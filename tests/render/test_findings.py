from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from fxgrad.render.findings import finding_lines, one_line, plain_text, shown_source
from fxgrad.schema import RULES, Diagnosis, NotChecked
from tests import diagnoses, flows

EXPECTED = f"""\
1. ERROR dead at /op1 (/home/user/net.py:4)
   16 of 16 units never fired
   try: Start the bias at 0.
   measured (one step): share 1, units 16, samples 1024, rms 1.5e-07
   affected parameters: fc.0.weight, fc.1.weight, fc.2.weight, fc.3.weight and 2 more
   units: 0, 1, 2, 3, 4, 5, 6, 7 and 8 more
   path: /op1 -> /op0 -> input:x
   explains 2 more: vanishing at /op0, zero at fc.weight
   more: fxgrad explain dead
2. WARNING loss_seed outside the model
   the gradient was NaN when it entered
   try: Look at the loss.
   measured (one step): nan NaN, inf -Inf
3. INFO frozen at fc.bias
   fc.bias requires no gradient
   confidence: exact
not checked: update_size (give optimizer=)
1 error, 1 warning, 1 info; {len(RULES) - 3} of {len(RULES)} checks ran"""


def shown(diagnosis, width=200, **options) -> str:
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(diagnosis)
    return capture.get()


def test_the_list() -> None:
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
    assert plain_text(Diagnosis(())) == f"no findings; {len(RULES)} of {len(RULES)} checks ran"
    assert plain_text(diagnoses.diagnosis()).endswith(f"no findings; {len(RULES) - 3} of {len(RULES)} checks ran")


def test_only_rules_that_were_asked_count_as_checked() -> None:
    some = Diagnosis((), (NotChecked("spike", "needs several steps"),), ("spike", "dead", "mine"))
    assert plain_text(some).endswith("no findings; 2 of 3 checks ran")
    assert some.checked == ("dead", "mine")


def test_a_long_way_shows_its_ends() -> None:
    path = tuple(f"/op{n}" for n in range(30))
    text = plain_text(diagnoses.diagnosis(diagnoses.dead(path=path)))
    assert "path: /op0 -> /op1 -> ... 27 more ... -> /op29" in text


def test_one_line() -> None:
    assert str(diagnoses.dead()) == "ERROR dead at /op1 (/home/user/net.py:4): 16 of 16 units never fired"
    assert one_line(diagnoses.dead(site=None)) == one_line(diagnoses.dead())
    assert one_line(diagnoses.frozen()) == "INFO frozen at fc.bias: fc.bias requires no gradient"


def test_the_short_form_of_a_finding_has_its_cause_and_what_to_try() -> None:
    assert finding_lines(diagnoses.dead()) == [
        "ERROR dead at /op1 (/home/user/net.py:4)",
        "16 of 16 units never fired",
        "try: Start the bias at 0.",
    ]
    assert len(finding_lines(dataclasses.replace(diagnoses.dead(), suggestion=""))) == 2


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
