"""Models and training loops for the tests of rewriting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Hand = Callable[[nn.Module], None]
Steps = list[list[Tensor]]


class Three(nn.Module):
    """Three layers, two functional ReLUs: 1-2-3-1 features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Cnn(nn.Module):
    """Convolutions, BatchNorm, in-place and module ReLUs, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.bn(self.conv1(x)))
        h = h + torch.relu_(self.conv2(h))
        return self.head(h.mean((2, 3)))


class Shared(nn.Module):
    """One layer called twice, and a weight tied into two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(F.relu(self.a(x))))
        return self.c(F.relu(self.b(h)))


INPUTS: dict[type[nn.Module], tuple[int, ...]] = {Three: (1,), Cnn: (1, 5, 5), Shared: (2,)}


def make(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(model: nn.Module, size: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, *INPUTS[type(model)])
    return x, x.flatten(1).sum(1, keepdim=True)


def train(model: nn.Module, steps: int = 10, hand: Hand | None = None, micro: int = 1, **options: Any) -> Steps:
    """A plain loop with Adam; all parameters after each step.  ``hand`` runs between backward and step."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, **options)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            x, y = batch(model)
            F.mse_loss(model(x), y).div(micro).backward()
        if hand is not None:
            hand(model)
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def fill_by_hand(model: nn.Module, all_zero: float = 1.0, some_zero: float = 0.5, kinds: Any = nn.Linear) -> None:
    """What ``fill_zero`` is to do, written the slow way on ``.grad``."""
    for module in model.modules():
        if not isinstance(module, kinds):
            continue
        grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if all(not bool(g.any()) for g in grads):
            for g in grads:
                g.fill_(all_zero)
        else:
            for g in grads:
                g[g == 0] = some_zero


def same(one: Steps, two: Steps) -> bool:
    return all(torch.equal(a, b) for s, t in zip(one, two, strict=True) for a, b in zip(s, t, strict=True))


def grads(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = torch.sum) -> dict[str, Tensor | None]:
    """The gradients of one backward pass."""
    model.zero_grad()
    loss(model(x)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
