"""The flow of all ranks as a function of their records: whoever is asked first, and whatever each of them ran."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.record.distributed import flow_of_ranks, packed, unpacked
from fxgrad.record.union import Part, course_of, together
from fxgrad.schema import Activity, ChannelSums, Failure, GradientFlow
from tests import flows


def record(flow: GradientFlow, rank: int) -> list[Part]:
    """What a rank sends, as it arrives."""
    return unpacked(packed([flow], rank).payload, rank)


def joined(own: Sequence[GradientFlow], order: Sequence[int] | None = None, size: int | None = None) -> GradientFlow:
    parts = [part for rank in order or range(len(own)) for part in record(own[rank], rank)]
    return together(parts, {course_of(flow): flow for flow in own}, size or len(own))


class Parts(nn.Module):
    """Runs those of its parts that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        for number in which:
            x = torch.relu(self.parts[number](x))
        return self.head(x)


COURSES: dict[tuple[int, ...], GradientFlow] = {}


def measured(which: tuple[int, ...]) -> GradientFlow:
    if which not in COURSES:
        torch.manual_seed(sum(which))
        COURSES[which] = fxgrad.gradient_flow(Parts(), (torch.randn(2, 3), which), channels=True)
    return COURSES[which]


WHICH = st.lists(st.sampled_from([0, 1, 2, 3]), unique=True, max_size=4).map(lambda found: tuple(sorted(found)))


@settings(deadline=None, max_examples=30)
@given(st.lists(WHICH, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_whoever_is_first(courses: list[tuple[int, ...]], shuffle: random.Random) -> None:
    own = [measured(which) for which in courses]
    order = list(range(len(own)))
    shuffle.shuffle(order)
    assert joined(own) == joined(own, order)


@settings(deadline=None, max_examples=30)
@given(st.lists(WHICH, min_size=1, max_size=5))
def test_every_node_of_every_rank_is_there_in_the_order_of_each(courses: list[tuple[int, ...]]) -> None:
    own = [measured(which) for which in courses]
    flow = joined(own)
    keys = [node.key for node in flow.nodes]
    assert len(keys) == len(set(keys))
    assert len({node.name for node in flow.nodes}) == len(keys)
    for one in own:
        assert {node.key for node in one.nodes} <= set(keys)
        for site in one.sites:
            found = flow.site(site.id)
            assert found.node in flow.nodes
            assert found.measured == any(site.measured for flow in own for site in flow.sites if site.id == found.id)
    blind = {spot.id for spot in flow.blind_spots if spot.consumer is None}
    assert not blind & {site.id for site in flow.sites if site.measured}
    total = sum(site.statistics.numel for one in own for site in one.sites if site.statistics is not None)
    assert total == sum(site.statistics.numel for site in flow.sites if site.statistics is not None)
    assert fxgrad.store.from_json(flow.to_json()) == flow


def test_the_course_of_most_ranks_is_that_of_the_flow() -> None:
    flow = joined([measured((1,)), measured((0, 1)), measured((0, 1))])
    assert flow.ranks is not None
    assert [other.ranks for other in flow.ranks.others] == [(0,)]
    assert flow.ranks.others[0].missing == ("parts.0", "/relu#1")
    assert flow.ranks.others[0].added == ()


def test_what_a_rank_sends_is_what_it_has() -> None:
    flow = measured((0, 2))
    whole = joined([flow])
    alone = replace(
        whole, ranks=None, sites=tuple(replace(site, spread=None) for site in whole.sites),
        parameters=tuple(replace(record, spread=None) for record in whole.parameters),
    )  # fmt: skip
    assert alone == flow


def test_units_that_fire_on_one_rank_are_alive_and_channels_add_up() -> None:
    def one(never: tuple[int, ...], sums: tuple[float, ...]) -> GradientFlow:
        flow = flows.chain(2)
        active = Activity(axis=1, units=3, samples=4, never=never, active=2)
        sites = [replace(site, activity=active, channels=ChannelSums(1, sums)) for site in flow.sites]
        return replace(flow, sites=tuple(sites))

    site = joined([one((0, 1), (1.0, 2.0)), one((1, 2), (0.5, 0.25))]).sites[0]
    assert site.activity == Activity(axis=1, units=3, samples=8, never=(1,), active=4)
    assert site.channels == ChannelSums(1, (1.5, 2.25))


def test_a_rank_whose_backward_raised_is_left_out_unless_all_did() -> None:
    good, failure = flows.chain(2), Failure("RuntimeError", "no", None, None, "unknown", "it raised")
    bad = replace(good, event=replace(good.event, failed=failure))
    flow = joined([bad, good])
    assert flow.ranks is not None
    assert flow.event.failed is None
    assert flow.ranks.failed == (0,)
    assert flow.sites[0].statistics == good.sites[0].statistics
    assert joined([bad, bad]).event.failed == failure


def test_a_rank_without_the_event_is_named() -> None:
    parts = [part for rank in (0, 2) for part in record(flows.chain(2), rank)]
    flow = together(parts, {part.course: flows.chain(2) for part in parts}, 4)
    assert flow.ranks is not None
    assert flow.ranks.without == (1, 3)
    assert flow.ranks.events == (0, -1, 0, -1)


def test_the_rank_that_stands_out_is_named_whatever_the_size_of_the_values() -> None:
    own = []
    for rank in range(4):
        flow = flows.chain(4)
        sites = list(flow.sites)
        if rank == 2:
            sites[2] = replace(sites[2], statistics=flows.full(50.0 * (sites[2].l2_norm or 0.0)))
        own.append(replace(flow, sites=tuple(sites)))
    ranks = joined(own).ranks
    assert ranks is not None
    assert (ranks.worst, ranks.worst_at) == (2, own[0].sites[2].id)
    alike = joined([flows.chain(4)] * 3).ranks
    assert alike is not None and alike.worst == 0


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan"), True])
def test_a_wrong_timeout_is_refused(timeout: object) -> None:
    with pytest.raises(OptionError, match="timeout= takes the seconds"):
        flow_of_ranks(flows.chain(2), timeout=timeout)  # type: ignore[arg-type]


def test_no_order_of_three_courses_matters() -> None:
    own = [measured((0,)), measured((1,)), measured((2, 3))]
    found = [joined(own, order) for order in itertools.permutations(range(3))]
    assert all(flow == found[0] for flow in found)
