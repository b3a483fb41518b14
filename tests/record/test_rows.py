"""The rows of many ranks as those of one: the statistic of the tensors put together, whoever comes first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxgrad.record.rows import WIDTHS, keys_of, merged, rows_of, spreads, statistics_of
from fxgrad.schema import GradientFlow, Level, Placement, Spread, Statistics
from tests import flows

COUNTS = ("numel", "nan_count", "inf_count", "zero_count", "flush_count", "subnormal_count", "overflow_count")
VALUES = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, 1e-30, 7e4, 3e38, 2.0**-25])
)
TENSORS = st.lists(VALUES, max_size=9)
PARTS = st.lists(TENSORS, min_size=1, max_size=6)


def measured(values: Tensor, level: Level = "full") -> Statistics:
    """In plain torch, one statistic after the other, in float64."""
    wide = values.to(torch.float64)
    if level == "norm":
        return Statistics("norm", values.numel(), float(wide.norm()))
    modulus = wide.abs()
    finite = modulus[torch.isfinite(wide)]
    some = finite[finite > 0]
    return Statistics(
        "full", values.numel(), float(finite.square().sum().sqrt()), float(finite.max()) if len(finite) else 0.0,
        float(some.min()) if len(some) else None, float(wide[torch.isfinite(wide)].sum()), float(finite.sum()),
        int(wide.isnan().sum()), int(wide.isinf().sum()), int((wide == 0).sum()), int((some < 2.0**-25).sum()),
        int((some < torch.finfo(torch.float32).tiny).sum()), int((some > 65504).sum()),
    )  # fmt: skip


def of_one(found: Statistics | None) -> GradientFlow:
    node = flows.node("fc", "call_module")
    return flows.flow([node], [flows.site(node, found)], [])


def stacked(parts: list[Statistics | None]) -> Tensor:
    made = [rows_of(of_one(part), rank) for rank, part in enumerate(parts)]
    width = max(rows.shape[1] for rows in made)
    return torch.stack([torch.nn.functional.pad(rows, (0, width - rows.shape[1])) for rows in made])


def joint(parts: list[Statistics | None]) -> Statistics | None:
    return statistics_of(merged(stacked(parts))[0].tolist())


def close(one: Statistics, two: Statistics) -> None:
    assert one.level == two.level
    for name in COUNTS:
        assert getattr(one, name) == getattr(two, name), name
    for name in ("max_abs", "min_abs_nonzero"):
        assert getattr(one, name) == getattr(two, name), name
    assert one.l2_norm == pytest.approx(two.l2_norm, rel=1e-12, nan_ok=True)
    if one.level == "full":
        assert one.abs_sum == pytest.approx(two.abs_sum, rel=1e-12)
        assert one.sum == pytest.approx(two.sum, rel=1e-12, abs=1e-12 * (two.abs_sum or 0))


@settings(deadline=None)
@given(PARTS, st.sampled_from(["norm", "full"]))
def test_merged_is_the_statistic_of_the_tensors_put_together(parts: list[list[float]], level: Level) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    found = joint([measured(tensor, level) for tensor in tensors])
    assert found is not None
    close(found, measured(torch.cat(tensors), level))


@settings(deadline=None)
@given(PARTS, st.randoms(use_true_random=False), st.sampled_from(["norm", "full"]))
def test_the_order_of_the_ranks_changes_no_bit(parts: list[list[float]], random, level: Level) -> None:
    found = [measured(torch.tensor(part, dtype=torch.float32), level) for part in parts]
    shuffled = list(found)
    random.shuffle(shuffled)
    assert joint(found) == joint(shuffled)


@settings(deadline=None)
@given(PARTS, st.integers(0, 6), st.sampled_from(["norm", "full"]))
def test_groups_of_ranks_may_be_merged_before(parts: list[list[float]], cut: int, level: Level) -> None:
    rows = stacked([measured(torch.tensor(part, dtype=torch.float32), level) for part in parts])
    groups = [group for group in (rows[:cut], rows[cut:]) if len(group)]
    twice = statistics_of(merged(torch.stack([merged(group) for group in groups]))[0].tolist())
    once = statistics_of(merged(rows)[0].tolist())
    assert once is not None and twice is not None
    close(twice, once)


@settings(deadline=None)
@given(TENSORS)
def test_one_rank_alone_is_as_it_was(values: list[float]) -> None:
    alone = measured(torch.tensor(values, dtype=torch.float32))
    assert joint([alone]) == alone


def test_doubles_far_beyond_the_range_of_their_squares() -> None:
    large = Statistics("norm", 1, 1e200)
    assert joint([large, large]) == Statistics("norm", 2, pytest.approx(math.sqrt(2) * 1e200, rel=1e-15))
    small = replace(large, l2_norm=1e-200)
    assert joint([small, small]) == Statistics("norm", 2, pytest.approx(math.sqrt(2) * 1e-200, rel=1e-15))


def test_a_rank_without_the_value_adds_nothing() -> None:
    one = measured(torch.tensor([3.0, 4.0]))
    assert joint([None, one, None]) == one
    assert joint([None, None]) is None


def test_what_one_rank_did_not_count_is_not_counted() -> None:
    found = joint([measured(torch.tensor([3.0])), measured(torch.tensor([4.0]), "norm")])
    assert found == Statistics("norm", 2, 5.0)


def test_of_equal_copies_one_counts_and_shards_are_put_together() -> None:
    half = measured(torch.tensor([3.0, 4.0]))
    copies = [replace(half, placement=Placement("Replicate", copy)) for copy in range(3)]
    assert joint(copies) == half
    assert joint(copies[1:]) == half, "the first copy was on a rank that is gone"
    shards = [replace(half, placement=Placement("Shard(0)")) for _ in range(2)]
    assert joint(shards) == joint([half, half])
    both = [replace(half, placement=Placement("Replicate, Shard(0)", copy)) for copy in (0, 0, 1, 1)]
    assert joint(both) == joint([half, half])


def test_histograms_add_up() -> None:
    one = replace(measured(torch.tensor([1.0])), level="histogram", exponent_histogram=tuple(range(64)))
    found = joint([one, one])
    assert found is not None
    assert found.level == "histogram"
    assert found.exponent_histogram == tuple(range(0, 128, 2))


def test_how_ranks_differ() -> None:
    parts = [torch.tensor(v) for v in ([1.0] * 4, [3.0] * 4, [0.0] * 4, [math.nan, 1.0])]
    rows = stacked([*map(measured, parts), None])
    (found, *_) = spreads(rows, [0, 2, 4, 6, 8])
    assert found == Spread(6, 3.0, 0.0, nonfinite=(6,), zero=(4,), missing=(8,))
    (found, *_) = spreads(rows[:3], [0, 2, 4])
    assert found is not None
    assert (found.worst, found.largest) == (2, 3.0)
    assert spreads(stacked([None, None]), [0, 1])[0] is None


def test_rows_say_whose_they_are() -> None:
    flow = flows.chain(3)
    assert len(keys_of(flow)) == len(rows_of(flow, 0)) == len(set(keys_of(flow)))
    assert rows_of(flow, 0).shape[1] == WIDTHS[1]
    kept = [statistics_of(row) for row in rows_of(flow, 0).tolist()]
    assert kept[: len(flow.sites)] == [site.statistics for site in flow.sites]
