"""Ways to NaN: each a small net around one operation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.faults_heldout.program import Case, fault
from tests.faults_heldout.traps1 import bad


@fault("forward", "nonfinite", r"fix(#\d+)? fix/.*(#\d+)? /.*", bad, "trap")
def deq_diverges() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject = nn.Linear(5, 8)
            self.fix = nn.Linear(8, 8)
            nn.init.orthogonal_(self.fix.weight, 4.0)

        def forward(self, x: Tensor) -> Tensor:
            u = self.inject(x)
            z = torch.zeros_like(u)
            for _ in range(90):
                z = self.fix(z) + u
            return z

    return Case(M(), (torch.randn(4, 5),), lambda o: o.mean())


@fault("parametrization", "nonfinite", r"lin.*", bad, "trap")
def weight_norm_zero_row() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            lin = nn.Linear(6, 4)
            with torch.no_grad():
                lin.weight[1] = 0
            self.lin = nn.utils.parametrizations.weight_norm(lin)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.tanh(self.first(x)))

    return Case(M(), (torch.randn(4, 5),), lambda o: o.pow(2).mean())


@fault("parametrization", "nonfinite", r"lin.*", bad, "trap")
def spectral_norm_of_zero() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            lin = nn.Linear(6, 4)
            nn.init.zeros_(lin.weight)
            self.lin = nn.utils.parametrizations.spectral_norm(lin)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.tanh(self.first(x)))

    return Case(M(), (torch.randn(4, 5),), lambda o: o.pow(2).mean())
