from __future__ import annotations

import dataclasses

import pytest

from fxgrad.run_file.numbers import columns, filled, prototype, split
from fxgrad.schema import Activity, ChannelSums, GradientFlow, OptimizerFacts, Rewritten, StepFacts, Update
from tests import flows
from tests.run_file.making import step_of

STATISTICS = flows.full(3.0, nan=2)


def rich() -> GradientFlow:
    """A flow with a number in every place that can have one."""
    flow = flows.chain()
    rewritten = Rewritten(("clip",), (2,), STATISTICS, (1,), (None,), STATISTICS, (2.5,), (None,))
    sites = tuple(
        dataclasses.replace(
            site, value=STATISTICS, activity=Activity(1, 4, 8, (1, 3), 5), channels=ChannelSums(1, (0.5, float("inf"))),
            rewritten=rewritten,
        )
        for site in flow.sites
    )  # fmt: skip
    histogram = dataclasses.replace(STATISTICS, level="histogram", exponent_histogram=tuple(range(64)))
    parameters = tuple(
        dataclasses.replace(one, statistics=histogram, update=Update(0.1, 2.0, 0.01, shrink=float("nan")))
        for one in flow.parameters
    )
    steps = (StepFacts("SGD", 0, 7, 2, 0.5, None, (0.1, None)),)
    return dataclasses.replace(
        flow, sites=sites, parameters=parameters, optimizer=OptimizerFacts("SGD", 7, 1, 9, steps=steps)
    )


@pytest.mark.parametrize(
    "flow", [flows.chain(), flows.chain(level="norm"), flows.residual(), flows.special(), flows.nested(2, 3), rich()]
)
def test_a_flow_is_its_prototype_and_its_numbers(flow) -> None:
    parts = split(flow)
    made = filled(prototype(flow), iter(parts.numbers), iter(parts.ragged))
    assert made.to_json() == flow.to_json()
    assert len(columns(prototype(flow))) == len(parts.numbers)


def test_each_column_says_what_it_is() -> None:
    flow = rich()
    numbers = {(one.part, one.of, one.field): n for one, n in zip(columns(flow), split(flow).numbers, strict=True)}
    assert numbers["sites", "/op1", "statistics.l2_norm"] == flow.site("/op1").l2_norm
    assert numbers["sites", "/op1", "channels.square_sums[0]"] == 0.5
    assert numbers["sites", "/op1", "rewritten.before.nan_count"] == 2
    assert numbers["parameters", "fc.weight", "update.l2_norm"] == 0.1
    assert numbers["parameters", "fc.weight", "statistics.exponent_histogram[63]"] == 63
    assert numbers["optimizer", "", "steps[0].learning_rates[0]"] == 0.1
    assert ("optimizer", "", "steps[0].learning_rates[1]") not in numbers
    assert numbers["event", "", "backward"] == 0


def test_steps_that_differ_in_numbers_alone_have_one_signature() -> None:
    assert split(step_of(1)).signature == split(step_of(2)).signature
    assert split(step_of(1)).signature != split(step_of(1, width=5)).signature
    assert split(step_of(1)).signature != split(step_of(1, level="full")).signature


def test_units_that_never_fire_do_not_make_another_prototype() -> None:
    flow = rich()
    other = dataclasses.replace(
        flow,
        sites=tuple(dataclasses.replace(site, activity=Activity(1, 4, 8, (2,), 6)) for site in flow.sites),
    )
    assert split(flow).signature == split(other).signature
    assert split(other).ragged == [(2,)] * len(flow.sites)


def test_what_is_remembered_is_taken_again_when_it_has_changed() -> None:
    fixed: dict = {}
    flow, other = flows.residual(), flows.chain()
    assert split(flow, fixed).signature == split(flow).signature
    assert split(flow, fixed).signature == split(flow).signature
    assert split(other, fixed).signature == split(other).signature
