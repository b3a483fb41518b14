"""A model, data, and what of a training run must be the same with and without fxgrad in it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import LogEntry
from tests.fidelity.harness import differences, snapshot

__all__ = ["STEPS", "Kept", "Net", "chain", "data", "differences", "seed", "state", "train"]

STEPS = 50


class Net(nn.Module):
    """With a parameter, a buffer that training writes, and dropout, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def chain() -> nn.Module:
    """Its gradient vanishes: something is found."""
    return nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(4, 4), nn.Sigmoid())), nn.Linear(4, 1))


class Kept:
    """A log that keeps its entries."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def write(self, entry: LogEntry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        pass

    @property
    def steps(self) -> list[int]:
        return [entry.step for entry in self.entries]


def seed() -> None:
    for one in (torch.manual_seed, random.seed, np.random.seed):
        one(0)


def data(count: int = STEPS * 4) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def state(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[str, Any]]:
    """Weights, buffers, gradients, optimizer states and random streams."""
    return [
        ("weights and buffers", snapshot(dict(model.state_dict()))),
        ("gradients", [snapshot(one.grad) for one in model.parameters()]),
        ("optimizers", [snapshot(one.state_dict()) for one in optimizers]),
        ("random streams", (snapshot(torch.get_rng_state()), random.getstate(), snapshot(np.random.get_state()))),
        ("modes", [module.training for module in model.modules()]),
    ]


def train(
    model: nn.Module, steps: int = STEPS, log: fxgrad.Log | None = None, log_every: int = 10
) -> list[tuple[str, Any]]:
    """A plain loop, logged or not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = data(steps * 4).split(4)
    watch = None if log is None else fxgrad.watch(model, optimizer=optimizer, log_to=log, log_every=log_every)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if watch is not None:
            watch.note(loss=loss)
        optimizer.step()
    if watch is not None:
        watch.remove()
    return state(model, [optimizer])
