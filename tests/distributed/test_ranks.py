"""Several processes under gloo: what a watch leaves alone, and the flow of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxgrad
from fxgrad.schema import Diagnosis, GradientFlow
from tests.distributed import ranks, start
from tests.distributed.nets import batch, make

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
COUNTS = ("numel", "nan_count", "inf_count", "zero_count", "flush_count", "subnormal_count", "overflow_count")
TWO = (
    "nothing_changes_in_short", "nothing_changes_in_accumulation", "global_statistics", "tensor_parallel", "unreduced",
    "another_course", "fault_on_one_rank", "writes", "warned", "refused", "dies",
)  # fmt: skip


def found(results: list[dict[str, Any]], name: str) -> list[Any]:
    """What each rank found; the words of an error are shown as they are."""
    for rank, one in enumerate(results):
        raised = [words for words in one.values() if isinstance(words, str) and words.startswith("Traceback")]
        assert not raised, f"rank {rank}: {raised[0]}"
    return [one[name] for one in results if name in one]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks, started once: every rank is a Python of its own."""
    return start.ranks(tmp_path_factory.mktemp("ranks"), 2, ranks, TWO)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, two))
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def check_unchanged(results: list[dict[str, Any]], name: str, kinds: int) -> None:
    for rank, runs in enumerate(found(results, name)):
        assert sum("," not in run for run in runs) == kinds
        for run, left in runs.items():
            plain = runs[run.partition(",")[0]]
            assert left[0] == plain[0] > 0, f"rank {rank}, {run}: another number of collectives"
            assert same(left, plain), f"rank {rank}, {run}: not the same bits"


def test_a_watch_changes_no_bit_and_asks_for_no_collective(two: list[dict[str, Any]]) -> None:
    check_unchanged(two, "nothing_changes_in_short", 3)
    for runs in found(two, "nothing_changes_in_short"):
        assert not same(runs["ddp"][2:], runs["fsdp"][2:]), "the comparison could not fail"


def test_nor_in_gradient_accumulation(two: list[dict[str, Any]]) -> None:
    check_unchanged(two, "nothing_changes_in_accumulation", 2)


def check_global(results: list[dict[str, Any]]) -> None:
    flows: dict[str, list[GradientFlow]] = {}
    for runs in found(results, "global_statistics"):
        for run, value in runs.items():
            if isinstance(value, GradientFlow):
                flows.setdefault(run, []).append(value)
                continue
            wanted, measured = value
            assert len(wanted) == 19, "6 values and 13 parameters"
            for name, one in wanted.items():
                for word, number in one.items():
                    got = getattr(measured[name], word)
                    if word in COUNTS:
                        assert got == number, f"{run}: {word} of {name}"
                    else:
                        assert got == pytest.approx(number, rel=1e-5, abs=1e-7), f"{run}: {word} of {name}"
    for run, one in flows.items():
        assert len(one) == len(results)
        names = ("nodes", "parameters", "edges", "calls", "blind_spots", "event", "capture", "ranks")
        assert all(getattr(flow, name) == getattr(one[0], name) for flow in one for name in names), run
        assert all(flow.findings == one[0].findings for flow in one)
        assert one[0].ranks is not None
        assert (one[0].ranks.size, one[0].ranks.without, one[0].ranks.others) == (len(results), (), ())


def test_the_flow_of_two_ranks_is_that_of_the_gathered_gradients(two: list[dict[str, Any]]) -> None:
    check_global(two)


def test_the_flow_of_four_ranks_is_that_of_the_gathered_gradients(tmp_path: Path) -> None:
    four = start.ranks(tmp_path, 4, ranks, ["global_statistics", "members_only", "dies_in_the_middle"])
    check_global(four)
    first, second, third, last = found(four, "members_only")
    assert first == last == (2, 3 * (1 + 4)), "the group has two ranks"
    assert second is third is None
    for said in found(four, "dies_in_the_middle"):
        assert said.startswith("a rank died while the ranks exchanged their flows: ")


def test_shards_and_copies_of_tensor_parallelism_make_the_whole(two: list[dict[str, Any]]) -> None:
    first, second = found(two, "tensor_parallel")
    for rank, one in enumerate((first, second)):
        for record in one["flow"].parameters:
            for what, statistics in (("gradients", record.statistics), ("values", record.value)):
                # Plain parameters outside of the mesh have a gradient on each rank, which are put side by side.
                side_by_side = 2 if what == "gradients" and not record.name.startswith("blocks") else 1
                wanted = one[what][record.name]
                assert statistics.numel == wanted["numel"] * side_by_side, (rank, what, record.name)
                assert statistics.max_abs == pytest.approx(wanted["max_abs"], rel=1e-5)
                assert statistics.l2_norm == pytest.approx(wanted["l2_norm"] * side_by_side**0.5, rel=1e-5)
    own = {record.name: record.statistics.placement for record in second["own"].parameters}
    assert str(own["blocks.0.up.weight"]) == "Shard(0)"
    assert str(own["blocks.0.down.weight"]) == "Shard(1)"
    assert str(own["blocks.0.down.bias"]) == "Replicate (copy 1)"
    assert own["head.weight"] is None


def test_fully_shard_says_what_it_did_not_reduce_and_what_it_added_to(two: list[dict[str, Any]]) -> None:
    for kept, reduced, added in found(two, "unreduced"):
        assert {record.reason for record in kept.parameters} == {"not_reduced"}
        assert all(record.measured for record in reduced.parameters)
        assert {record.reason for record in added.parameters} == {"statistic_failed"}
        keys = [[node.key for node in flow.nodes] for flow in (kept, reduced, added)]
        plain = fxgrad.gradient_flow(make(), batch(0, 0)[0], capture="eager")
        for found_keys in keys:
            own = [key for key in found_keys if "RegisterPostBackwardFunction" not in key]
            assert own == [node.key for node in plain.nodes], "what fully_shard does is no part of the model"
        for flow in (kept, reduced, added):
            assert not [one for one in flow.findings if one.rule in {"unused", "detached"}]


def test_ranks_that_take_another_course_are_named(two: list[dict[str, Any]]) -> None:
    for skipped, alone, without, nobody in found(two, "another_course"):
        (other,) = skipped.ranks.others
        assert (other.ranks, other.missing, other.added) == ((1,), ("more", "/tanh"), ())
        (other,) = alone.ranks.others
        assert (other.ranks, other.missing, other.added) == ((1,), (), ("more", "/tanh"))
        for flow, has in ((skipped, 0), (alone, 1)):
            assert [node.key for node in flow.nodes] == ["input:x", "fc", "more", "/tanh", "head", "output"]
            assert flow.site("more").spread.missing == (1 - has,)
            assert flow.site("more").statistics.numel == 24
            assert flow.site("head").statistics.numel == 24
            assert not [spot for spot in flow.blind_spots if spot.key == "more"]
            assert next(p for p in flow.parameters if p.name == "more.weight").spread.missing == (1 - has,)
        assert without.ranks.without == (1,)
        assert without.ranks.events == (0, -1)
        assert without.site("head").statistics.numel == 12
        assert nobody.startswith("no rank has recorded a gradient flow yet")


def test_findings_of_all_ranks_say_which(two: list[dict[str, Any]]) -> None:
    for poisoned, judged, large, steps in found(two, "fault_on_one_rank"):
        assert poisoned.ranks.worst == large.ranks.worst == 1
        assert poisoned.ranks.worst_at == "head"
        for diagnosis in (poisoned.diagnosis, judged):
            (finding,) = [one for one in diagnosis.findings if one.severity == "error"]
            assert finding.ranks == (1,)
            assert "rank 1" in finding.message
        assert large.site("fc").spread.largest > 10 * large.site("fc").spread.smallest
        assert isinstance(steps, Diagnosis)


def test_a_reduced_flow_is_written_by_rank_0_only(two: list[dict[str, Any]]) -> None:
    assert found(two, "writes") == [["own0.json", "reduced.json"], ["own1.json"]]


def test_a_limit_is_told_by_the_rank_that_passed_it(two: list[dict[str, Any]]) -> None:
    first, second = found(two, "warned")
    assert not first
    assert second[0].startswith("rank 1: ")


def test_ranks_that_do_not_come_are_named_and_nobody_hangs(two: list[dict[str, Any]]) -> None:
    for rank, (mixed, late, *read) in enumerate(found(two, "refused")):
        assert mixed[1] == (1,)
        assert "rank 0 reads the reduced flow, but rank 1 the reduced history" in mixed[0]
        assert late[1] == (1,), f"rank {rank}"
        assert "rank 1 of 2 did not come to this read of the reduced flow within 0.5 s" in late[0]
        *flows, sizes, added = read
        assert all(flow.ranks.size == 2 for flow in flows)
        assert len(set(sizes)) == 1, "the store grows"
        assert added == 2.0, "the process group does not work any more"


def test_a_rank_that_died_is_named(two: list[dict[str, Any]]) -> None:
    (told,) = found(two, "dies")  # of the rank that lives
    words, who, event = told
    assert who == (1,)
    assert "rank 1 of 2 did not come" in words
    assert event == 0, "its own flow can be read as ever"


@pytest.mark.sweep
def test_every_way_of_training_in_50_steps(tmp_path: Path) -> None:
    check_unchanged(start.ranks(tmp_path, 2, ranks, ["nothing_changes"]), "nothing_changes", len(ranks.KINDS))


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 4])
def test_2000_steps_leave_nothing(size: int, tmp_path: Path) -> None:
    for before, after in found(start.ranks(tmp_path, size, ranks, ["many_steps"]), "many_steps"):
        assert (after[0], after[2]) == (before[0], before[2]), "tensors, file handles"
        assert after[1] - before[1] < 1700, "an object for each step"
