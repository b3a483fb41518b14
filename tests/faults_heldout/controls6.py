"""Healthy nets with odd contents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.program import Case, healthy
from tests.faults_heldout.seeded1 import ce, sq


@healthy("looks ill")
def nan_sentinel_in_idle_buffer() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("last_metric", torch.tensor(float("nan")))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def mask_as_frozen_parameter() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.mask = nn.Parameter(torch.full((6, 6), float("-inf")).triu(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 4 + self.mask
            return self.out(scores.softmax(-1) @ self.v(x))

    return Case(M(), (torch.randn(4, 6, 16),), sq)


@healthy("looks ill")
def inf_in_a_row_never_looked_up() -> Case:
    m = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        m[0].weight[19] = float("-inf")
    return Case(m, (torch.randint(0, 19, (8, 4)),), ce(8, 3))


@healthy("looks ill")
def one_token_sequences() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.q(x) @ self.k(x).transpose(1, 2) / 4).softmax(-1) @ self.v(x) + x)

    return Case(M(), (torch.randn(4, 1, 16),), sq)


def sparse_reward(case: Case, step: int) -> Case:
    weight = float(step % 4 == 3)
    return Case(case.model, case.args, lambda o: -(o.log_softmax(-1)[:, 0]).mean() * weight)


@healthy("series", steps=14, each=sparse_reward)
def reward_only_now_and_then() -> Case:
    m = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    return Case(m, (torch.randn(16, 8),), lambda o: -(o.log_softmax(-1)[:, 0]).mean())


@healthy("looks ill")
def output_named_but_not_in_the_loss() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = F.relu(self.body(x))
            return {"logits": self.head(h), "hidden": h, "labels": x.argmax(-1)}

    y = torch.randint(0, 3, (16,))
    return Case(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o["logits"], y))
