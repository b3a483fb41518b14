"""Programs written without a look at the rules: what they say where both sides agree."""

from __future__ import annotations

import pytest

from tests.faults_heldout import load
from tests.faults_heldout.program import PROGRAMS
from tests.faults_heldout.run import attempt, complaint
from tests.faults_heldout.verdicts import OPEN

load()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(OPEN)))
def test_a_held_out_program_is_judged_right(name):
    row = attempt(PROGRAMS[name], 0)
    assert complaint(row) is None, row


def test_open_questions_name_programs():
    assert set(OPEN) <= set(PROGRAMS)
