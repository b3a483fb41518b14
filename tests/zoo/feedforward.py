"""Ordinary stacks of modules: dense, convolutional, normalised, pooled, regularised."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import case, normal


def mlp_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    h = at("act", model.act(at("fc1", model.fc1(x))))
    h = at("/tanh", torch.tanh(at("fc2", model.fc2(h))))
    return at("head", model.head(h))


@case("mlp", normal(4, 5, grad=True), twin=mlp_twin)
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        h = torch.tanh(self.fc2(h))
        return self.head(h)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def residual_cnn_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    x = at("relu", F.relu(at("stem", model.stem(x))))
    for name in ("blocks.0", "blocks.1"):
        block = model.get_submodule(name)
        out = at(f"{name}.bn1", block.bn1(at(f"{name}.conv1", block.conv1(x))))
        out = at(f"{name}.relu", F.relu(out))
        out = at(f"{name}.bn2", block.bn2(at(f"{name}.conv2", block.conv2(out))))
        out = at(f"{name}/add_", out + x)
        x = at(f"{name}.relu#1", F.relu(out))
    x = at("/mean", x.mean((2, 3)))
    return at("head", model.head(x))


@case("residual_cnn", normal(3, 2, 6, 6), twin=residual_cnn_twin)
class ResidualCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.stem(x)))
        return self.head(x.mean((2, 3)))


@case("sequential_cnn", normal(2, 3, 8, 8))
def sequential_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.LogSoftmax(dim=1),
    )


@case("deep_sigmoid", normal(4, 6))
def deep_sigmoid() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Sigmoid())])


@case("batchnorm_eval", normal(4, 2, 6), training=False)
def batchnorm_eval() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


@case("depthwise", normal(2, 4, 5, 5))
class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.point = nn.Conv2d(4, 6, 1)
        self.act = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.point(self.act(self.depth(x)))).sum(dim=(2, 3))


@case("squeeze_excite", normal(2, 4, 5, 5))
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        scale = torch.sigmoid(self.up(F.relu(self.down(self.pool(h)))))
        return h * scale


@case("conv_transpose", normal(2, 3, 4, 4))
class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 2, stride=2)
        self.smooth = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.up(x), 0.1)
        h = F.interpolate(h, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.smooth(h)


@case("pool_indices", normal(2, 2, 4, 4))
class PoolIndices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h, where = self.pool(self.conv(x))
        return self.unpool(h, where)


@case("functional_pool", normal(2, 2, 6, 6))
class FunctionalPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.conv(x), 2)
        return F.adaptive_avg_pool2d(F.pad(h, (1, 1, 0, 0)), (1, 2))


@case("norms", normal(3, 4, 6))
class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(6)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.group(x))
        return self.fc(F.layer_norm(self.instance(h), (6,)))


@case("dropout_modules", normal(4, 6))
class DropoutModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop, self.alpha = nn.Dropout(0.4), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.alpha(self.drop(torch.selu(self.fc1(x)))))


@case("dropout_functional", normal(4, 6))
class DropoutFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.fc1(x)), p=0.4, training=self.training)
        return self.fc2(h)


def dropout_eval_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("fc1", model.fc1(at("input:x", x)))
    h = at.same("drop", h)  # outside training, dropout returns the very tensor it was given
    h = at.same("/dropout", h)
    return at("fc2", model.fc2(at("/relu", F.relu(h))))


@case("dropout_eval", normal(4, 6), training=False, twin=dropout_eval_twin)
class DropoutEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.drop(self.fc1(x)), p=0.4, training=self.training)
        return self.fc2(F.relu(h))


@case("dense_concat", normal(2, 3, 5))
class DenseConcat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3 + 2 * n, 2, 3, padding=1) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, dim=1)


@case("inception", normal(2, 2, 5, 5))
class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"one": nn.Conv2d(2, 2, 1), "three": nn.Conv2d(2, 2, 3, padding=1)})
        self.pool = nn.AvgPool2d(3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.branches["one"](x), self.branches["three"](x), self.pool(x)]
        return torch.cat([part.relu() for part in parts], dim=1).mean(dim=[2, 3])


def shared_relu_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("act", F.relu(at("fc1", model.fc1(at("input:x", x)))))
    h = at("act#1", F.relu(at("fc2", model.fc2(h))))
    h = at("act#2", F.relu(at("fc3", model.fc3(h))))
    return at("head", model.head(h))


@case("shared_relu", normal(7, 3), twin=shared_relu_twin)
class SharedRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head, self.act = nn.Linear(8, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        h = self.act(self.fc2(h))
        h = self.act(self.fc3(h))
        return self.head(h)


def shared_block_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("input:x", x)
    for index in ("", "#1"):
        inner = at(f"block/relu{index}", F.relu(at(f"block.fc{index}", model.block.fc(h))))
        h = at(f"block/add{index}", inner + h)
    return at("/tanh", torch.tanh(h))


class SkipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) + x


@case("shared_block", normal(4, 5), twin=shared_block_twin)
class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = SkipBlock()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.block(self.block(x)))
