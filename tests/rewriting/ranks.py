"""What each rank of a distributed run does, in a process of its own; results go to a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError
from fxgrad.rules import layers, nodes, parameters
from tests.rewriting.nets import Three, fill_by_hand, make

RANKS = 2
Hand = Callable[[nn.Module], None]


def start(rank: int, folder: str) -> None:
    """One rank, from its process group to its file."""
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{where / 'store'}", rank=rank, world_size=RANKS)
    found = {name: run(rank) for name, run in RUNS.items()}
    torch.save(found, where / f"{rank}.pt")
    dist.barrier()
    # Plain DistributedDataParallel over gloo, torn down, now and then aborts ("terminate called without an active
    # exception", 3 of 25 processes of torch 2.14 without fxgrad): the results are on disk, so nothing is torn down.
    os._exit(0)


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 1, generator=generator)
    return x, 2 * x


def loop(
    rank: int, rule: Any = None, hand: Hand | None = None, micro: int = 1, steps: int = 4, **options: Any
) -> list[Tensor]:
    """Training with DistributedDataParallel; micro-batches but the last are not reduced."""
    model = make(Three, 3)
    wrapped = DistributedDataParallel(model, **options)
    rewrite = fxgrad.rewrite(model, rule) if rule is not None else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            x, y = data(rank, 10 * step + number)
            with wrapped.no_sync() if number < micro - 1 else contextlib.nullcontext():
                F.mse_loss(wrapped(x), y).backward()
        if hand is not None:
            hand(model)
        optimizer.step()
    if rewrite is not None:
        rewrite.remove()
    return [p.detach().clone() for p in model.parameters()]


def gradients(rank: int, rule: Any, *, sync: bool) -> list[Tensor]:
    """The gradients of one backward pass, reduced or not."""
    model = make(Three, 3)
    wrapped = DistributedDataParallel(model)
    with fxgrad.rewrite(model, rule), contextlib.nullcontext() if sync else wrapped.no_sync():
        x, y = data(rank, 0)
        F.mse_loss(wrapped(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


def reduced(gradients: list[Tensor]) -> list[Tensor]:
    """Averaged over the ranks, by hand."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(RANKS)
    return gradients


def refused(rank: int) -> str:
    """What is said of contributions that nobody could tell."""
    try:
        loop(rank, rules.fill_zero(where=layers(per="backward")), micro=2, steps=1)
    except RuleError as error:
        return str(error)
    return ""


def by_hand_before_reducing(rank: int) -> list[Tensor]:
    model = make(Three, 3)
    x, y = data(rank, 0)
    F.mse_loss(model(x), y).backward()
    with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:
        rewrite.apply()
    return reduced([p.grad for p in model.parameters()])


def naively_before_reducing(rank: int) -> list[Tensor]:
    model = make(Three, 3)
    x, y = data(rank, 0)
    F.mse_loss(model(x), y).backward()
    fill_by_hand(model)
    return reduced([p.grad for p in model.parameters()])


def own_scale(rank: int, where: Any) -> Any:
    return rules.scale(float(rank + 1), where)


RUNS: dict[str, Callable[[int], Any]] = {
    "plain": loop,
    "hand": lambda rank: loop(rank, hand=fill_by_hand),
    "per step": lambda rank: loop(rank, rules.fill_zero()),
    "per step, bucket views": lambda rank: loop(rank, rules.fill_zero(), gradient_as_bucket_view=True),
    "per backward": lambda rank: loop(rank, rules.fill_zero(where=layers(per="backward"))),
    "per backward, bucket views": lambda rank: loop(
        rank, rules.fill_zero(where=layers(per="backward")), gradient_as_bucket_view=True
    ),
    "hand, accumulated": lambda rank: loop(rank, hand=fill_by_hand, micro=4),
    "per step, accumulated": lambda rank: loop(rank, rules.fill_zero(), micro=4),
    "refused": refused,
    "arrival": lambda rank: gradients(rank, own_scale(rank, parameters(per="arrival")), sync=True),
    "arrival, reduced by hand": lambda rank: reduced(
        gradients(rank, own_scale(rank, parameters(per="arrival")), sync=False)
    ),
    "nodes": lambda rank: gradients(rank, own_scale(rank, nodes("fc2")), sync=True),
    "nodes, reduced by hand": lambda rank: reduced(gradients(rank, own_scale(rank, nodes("fc2")), sync=False)),
    "unscaled": lambda rank: gradients(rank, own_scale(0, nodes("fc2")), sync=True),
    "apply": by_hand_before_reducing,
    "apply by hand": naively_before_reducing,
}
