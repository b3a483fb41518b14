"""The stock models: small enough to read, and each with something to see.

fxgrad run fxgrad.demo:residual_cnn --input fxgrad.demo:residual_cnn_inputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MODELS",
    "ResidualBlock",
    "ResidualCNN",
    "SigmoidMLP",
    "StockModel",
    "residual_cnn",
    "residual_cnn_inputs",
    "sigmoid_mlp",
    "sigmoid_mlp_inputs",
]

Model = TypeVar("Model", bound=nn.Module)

_SEED = 0
_BATCH = 8
_IMAGE = 32  # pixels a side
_CHANNELS = 3
_FEATURES = 32  # of the MLP's input
_DEPTH = 20  # layers of the MLP


class ResidualBlock(nn.Module):
    """Two convolutions and a skip, written with the calls that module hooks miss."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """A functional ReLU inside, an in-place addition of the skip, an in-place ReLU behind it."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        activated: Tensor = self.relu(out)
        return activated


class ResidualCNN(nn.Module):
    """A small residual network for images: its skips keep the gradient alive."""

    def __init__(self, width: int = 16, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(_CHANNELS, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        features = self.blocks(F.relu(self.stem(images)))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class SigmoidMLP(nn.Module):
    """A deep perceptron with sigmoids: each layer passes back a small part of its gradient, so the first starve."""

    def __init__(self, depth: int = _DEPTH, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        sizes = [_FEATURES] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Class scores."""
        for layer in self.hidden:
            features = torch.sigmoid(layer(features))
        scores: Tensor = self.head(features)
        return scores


def residual_cnn() -> ResidualCNN:
    """A ``ResidualCNN`` with the same parameters each time."""
    return _seeded(ResidualCNN)


def residual_cnn_inputs() -> tuple[Tensor]:
    """Its arguments: a batch of images."""
    return (_normal(_BATCH, _CHANNELS, _IMAGE, _IMAGE),)


def sigmoid_mlp() -> SigmoidMLP:
    """A ``SigmoidMLP`` with the same parameters each time."""
    return _seeded(SigmoidMLP)


def sigmoid_mlp_inputs() -> tuple[Tensor]:
    """Its arguments: a batch of feature vectors."""
    return (_normal(_BATCH, _FEATURES),)


def _seeded(factory: Callable[[], Model]) -> Model:
    """What ``factory`` makes from a fixed seed, leaving the random stream as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return factory()


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(_SEED))


@dataclass(frozen=True, slots=True)
class StockModel:
    """A model of this file: what makes it, what makes its arguments, and what there is to see."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    about: str


#: The stock models, by name.
MODELS = {
    "residual_cnn": StockModel(
        residual_cnn, residual_cnn_inputs, "a residual CNN with functional and in-place ReLUs: its gradient lives"
    ),
    "sigmoid_mlp": StockModel(
        sigmoid_mlp,
        sigmoid_mlp_inputs,
        f"a sigmoid MLP of {_DEPTH} layers: its gradient vanishes on the way to the input",
    ),
}
