"""Programs whose weights, layers, shapes or modes change while they are trained."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fidelity.harness import Program, program


@program
class WeightsAssigned(Program):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data = F.normalize(self.a.weight.data, dim=1)
        with torch.no_grad():
            self.b.weight.clamp_(-0.2, 0.2)
        return self.b(self.a(x))


@program
class ParametersReplaced(Program):
    def change(self, i: int) -> None:
        if i == 3:
            self.a.weight = nn.Parameter(self.a.weight.detach() * 2)
        if i == 5:
            self.b.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program
class LayersReplaced(Program):
    def change(self, i: int) -> None:
        if i == 3:
            self.a = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        if i == 5:
            self.b = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program
class LayerMadeInForward(Program):
    def __init__(self) -> None:
        super().__init__()
        self.late: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.late is None or len(self.late) < 2:
            self.late = nn.ModuleList([*(self.late or ()), nn.Linear(8, 8)])
        for layer in self.late:
            h = layer(h)
        return self.b(h)


class Blocks(Program):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


@program
class OrderOfBlocks(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in random.sample(list(self.blocks), 4):
            x = block(x).tanh()
        return self.b(x)


@program
class StochasticDepth(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.4:
                x = x + block(x)
        return self.b(x)


@program
class StochasticDepthByNumpy(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if np.random.rand() > 0.4 else x
        return self.b(x)


@program
class TruncatedSequences(Program):
    """Hidden state kept from batch to batch, over lengths that vary."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRU(8, 8, batch_first=True), None

    def inputs(self, i: int) -> Tensor:
        return torch.randn(4, 2 + i % 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.b(y[:, -1])

    def state(self) -> Any:
        return self.hidden


@program
class CycleAndClosure(Program):
    def __init__(self) -> None:
        super().__init__()
        self.cycle, calls = itertools.cycle([1.0, 2.0, 3.0]), 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * next(self.cycle) / self.count()


@program
class DtypeOfTheParameters(Program):
    def change(self, i: int) -> None:
        if i == 4:
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.to(next(self.parameters()).dtype)).tanh())


@program
class TrainAndEvalInTurn(Program):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def change(self, i: int) -> None:
        self.train(i % 3 != 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.norm(self.a(x)), 0.5, self.training))


@program
class TiedAndUntied(Program):
    def change(self, i: int) -> None:
        if i == 2:
            self.b.weight = self.a.weight
        if i == 5:
            self.b.weight = nn.Parameter(self.a.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))
