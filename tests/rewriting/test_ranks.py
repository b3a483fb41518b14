"""Two ranks under DistributedDataParallel (gloo, one machine)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.rewriting import ranks

#: Each run, and the loop written by hand that it has to equal bit for bit.
WANTED = {
    "per step": "hand",  # behind the all-reduce
    "per step, bucket views": "hand",
    "per backward": "hand",  # behind it as well
    "per backward, bucket views": "hand",
    "per step, accumulated": "hand, accumulated",
    "arrival": "arrival, reduced by hand",  # before it
    "nodes": "nodes, reduced by hand",  # before it
    "apply": "apply by hand",  # where the user says
}


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_equal_a_loop_written_by_hand(tmp_path: Path) -> None:
    """One test, because every rank starts a Python of its own."""
    mp.spawn(ranks.start, (str(tmp_path),), nprocs=ranks.RANKS)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks.RANKS)]
    for rank in found:
        said = rank.pop("refused")  # contributions that nobody could tell
        assert "rule 'fill_zero(1, 0.5)' act(s) on what one backward pass contributes" in said
        assert "Use per='step'" in said
    for name in found[0]:
        assert equal(found[0][name], found[1][name]), f"{name}: the ranks differ"
    for name, want in WANTED.items():
        assert equal(found[0][name], found[0][want]), name
    # Or the comparisons above would say nothing.
    assert not equal(found[0]["plain"], found[0]["hand"])
    assert not equal(found[0]["nodes"], found[0]["unscaled"])
