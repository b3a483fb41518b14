from __future__ import annotations

import pytest

from fxgrad.errors import NoFlowError, SiteNotFoundError
from fxgrad.schema import History
from fxgrad.series import evenly
from tests import flows
from tests.run_file.making import at, step_of

HISTORY = History([step_of(0), step_of(1), at(step_of(2), 1, forward=7)])


def test_a_step_is_a_backward_pass() -> None:
    assert HISTORY.steps == (0, 1)
    assert HISTORY.flow(1) == at(step_of(2), 1, forward=7)
    with pytest.raises(NoFlowError, match="no flow of step 5: 3 steps from 0 to 1 are there, and the nearest is 1"):
        HISTORY.flow(5)
    with pytest.raises(NoFlowError, match="nor of any other"):
        History().flow(0)


def test_a_series_has_a_number_for_each_flow() -> None:
    found = HISTORY.series("/op1")
    assert (found.name, found.statistic, found.steps) == ("/op1", "l2_norm", (0, 1, 1))
    assert found.values == tuple(flow.site("/op1").l2_norm for flow in HISTORY)
    assert HISTORY.series("tied.weight", "max_abs").values == (0.125,) * 3
    assert HISTORY.series("input:x").values == (None,) * 3
    assert len(History().series("/op1")) == 0


def test_a_value_that_one_flow_lacks_is_none_there() -> None:
    mixed = History([flows.residual(), step_of(0)])
    assert mixed.series("/op1").values == (None, step_of(0).site("/op1").l2_norm)
    with pytest.raises(SiteNotFoundError):
        mixed.series("block/add")


@pytest.mark.parametrize(("count", "most"), [(3, 5), (5, 5), (1000, 7), (2, 1), (10, 2)])
def test_a_sample_is_even_and_has_both_ends(count, most) -> None:
    found = evenly(count, most)
    assert len(found) == min(count, most)
    assert found == sorted(set(found))
    assert found[-1] == count - 1
    assert most == 1 or found[0] == 0
