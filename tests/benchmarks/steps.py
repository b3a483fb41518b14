"""A small model for the benchmarks' own code."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import Built


class Residual(nn.Module):
    """A branch, a sum, a view and an in-place activation: 7 activations with a gradient, 4 parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(24, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.first(x)
        h = h + torch.tanh(h)
        return self.second(self.relu(h.reshape(2, 24)).sin())


def residual() -> Built:
    torch.manual_seed(0)
    return Built(Residual(), (torch.randn(8, 6),), {}, lambda output: output.square().mean())
