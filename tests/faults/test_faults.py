"""What the findings say of every program: how many faults are found, how many are blamed right, and no false alarm.

One seed and the one-shot form always; all seeds and the history form under ``-m sweep``.
"""

from __future__ import annotations

import pytest

from tests.faults.catalogue import FAULTS, HEALTHY, TRAPS, UNSEEN
from tests.faults.judge import Verdict, judge
from tests.faults.program import SEEDS, Form, Program

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of some of the faults itself
SWEEP = pytest.mark.sweep
ROUNDS = [
    pytest.param("one_shot", 0, id="one_shot-0"),
    *(pytest.param("one_shot", seed, id=f"one_shot-{seed}", marks=SWEEP) for seed in SEEDS[1:]),
    *(pytest.param("history", seed, id=f"history-{seed}", marks=SWEEP) for seed in SEEDS),
]

#: By name, what is open: programs on which the checks and whoever wrote the program do not agree.
OPEN = {
    "where_never_taken": "a condition that never holds is only information in one step; arguable",
    "copied_into_data_of_buffer": "a copy into .data is a cut; the finding says that the result is dropped",
}


def verdicts(programs: tuple[Program, ...], form: Form, seed: int) -> list[Verdict]:
    found = [judge(program, seed, form) for program in programs if form in program.forms]
    assert found
    return found


def wrong(found: list[Verdict], *parts: str) -> str:
    """The lines of those that lack a part."""
    return "\n".join(v.line for v in found if not all(getattr(v, part) for part in parts))


@pytest.mark.parametrize(("form", "seed"), ROUNDS)
def test_faults_are_found_and_blamed_where_they_are(form: Form, seed: int) -> None:
    found = verdicts(FAULTS, form, seed)
    assert sum(v.detected for v in found) >= 0.97 * len(found), wrong(found, "detected")
    assert sum(v.right_rule for v in found) >= 0.95 * len(found), wrong(found, "right_rule")
    assert sum(v.right_place for v in found) >= 0.95 * len(found), wrong(found, "right_place")


@pytest.mark.parametrize(("form", "seed"), ROUNDS)
def test_advice_fits_the_case(form: Form, seed: int) -> None:
    found = verdicts(tuple(program for program in FAULTS if program.says), form, seed)
    assert not wrong(found, "detected", "right_rule", "right_place", "right_words")


@pytest.mark.parametrize(("form", "seed"), ROUNDS)
def test_every_trap_is_led_back_to_its_origin(form: Form, seed: int) -> None:
    found = verdicts(TRAPS, form, seed)
    assert not wrong(found, "detected", "right_rule", "right_place")


@pytest.mark.parametrize(("form", "seed"), ROUNDS)
def test_a_healthy_program_raises_no_alarm(form: Form, seed: int) -> None:
    alarms = [v for v in verdicts(HEALTHY, form, seed) if v.alarms]
    assert not alarms, "\n".join(v.line for v in alarms)


@SWEEP
@pytest.mark.parametrize("program", [pytest.param(p, id=p.name) for p in UNSEEN if p.name not in OPEN])
def test_a_program_that_was_written_without_a_look_at_the_checks_is_judged_right(program: Program) -> None:
    (form,) = program.forms
    found = judge(program, 0, form)
    assert (found.detected and found.right_rule and found.right_place) if program.expect else not found.alarms, (
        found.line
    )


def test_open_questions_name_programs() -> None:
    assert OPEN.keys() <= {program.name for program in UNSEEN}
