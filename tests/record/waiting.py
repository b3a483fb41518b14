"""Models whose gradients wait for each other, and what was found of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.record.parked import Parked
from fxgrad.record.slots import Slots


class Rooms(list[Parked]):
    """Every waiting room that was made, and the bytes of distinct memory that waited at most in one."""

    most = 0


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(layer for _ in range(33) for layer in (nn.Linear(32, 32), nn.ReLU()))), torch.randn(4, 32)


def resnet() -> tuple[nn.Module, Tensor]:
    return pytest.importorskip("torchvision").models.resnet18(), torch.randn(2, 3, 64, 64)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 16, 64)


def numbers(flow: fxgrad.GradientFlow) -> list[Any]:
    """The statistics of all that was measured, each once."""
    sites = [site.statistics for site in flow.sites if site.measured and site.derived_from is None]
    return sites + [record.statistics for record in flow.parameters if record.measured]


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Written:
    """A part of an event."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.readings: list[Any] = [None] * 64
        self.failures: dict[int, str] = {}
