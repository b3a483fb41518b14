"""Small models of six architectures that learn a task, with fresh batches in each step.

Each has modules ``stem`` and ``head``; what lies between differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Graph
from tests.faults.program import Built, Loss

Batch = Callable[..., tuple[tuple[Any, ...], Loss]]  # of the step, and of what the loss makes of outputs and classes


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def learnable(*shape: int) -> Batch:
    """Batches of normal numbers; the class is the largest of the first four averages."""

    def batch(step, loss=F.cross_entropy):
        x = torch.randn(*shape, generator=seeded(step))
        target = x.flatten(1)[:, :4].argmax(-1)
        return (x,), lambda out: loss(out, target)

    return batch


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.relu(self.mid(torch.relu(self.stem(x)))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.silu(self.conv(F.relu(self.norm(self.stem(x))))).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList(Block(16) for _ in range(2)),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.rnn, self.head = nn.Linear(6, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.rnn(torch.tanh(self.stem(x)))[0][:, -1])


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, ids):
        x = self.stem(ids)
        return self.head(x + F.gelu(self.mix(x)))


class Nodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.graph, self.head = nn.Linear(5, 16), Graph(2), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.relu(self.graph(torch.tanh(self.stem(x)))).mean(1))


def _next_token(step, loss=F.cross_entropy):
    ids = torch.randint(0, 20, (8, 10), generator=seeded(step))
    target = (ids * 3 + 1) % 20
    return (ids,), lambda out: loss(out.flatten(0, 1), target.flatten())


BODIES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "mlp": (Mlp, learnable(32, 16)),
    "cnn": (Cnn, learnable(16, 3, 6, 6)),
    "encoder": (Encoder, learnable(16, 5, 8)),
    "recurrent": (Recurrent, learnable(16, 5, 6)),
    "language": (Language, _next_token),
    "nodes": (Nodes, learnable(16, 12, 5)),
}


def built(name: str, optimizer: Callable[[nn.Module], Any], steps: int = 20, **more: Any) -> Built:
    """The model of that name with an optimizer."""
    make, batch = BODIES[name]
    args, loss = batch(0)
    return Built(make(), args, loss, optimizer, steps, batch, **more)
