"""Parts that several programs are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.faults.program import Loss


class Net(nn.Module):
    """Modules by name and a forward that is given as a function of the net and its inputs."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self._run = forward
        for name, module in modules.items():
            if isinstance(module, Tensor) and not isinstance(module, nn.Parameter):
                self.register_buffer(name, module)
            else:
                setattr(self, name, module)

    def forward(self, *inputs):
        return self._run(self, *inputs)


def he(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """He initialisation of every linear and convolution, times ``gain``; biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            module.weight.data.mul_(gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def xavier(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Xavier initialisation of every linear and convolution; biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            nn.init.xavier_normal_(module.weight, gain=gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def normal(model: nn.Module, std: float) -> nn.Module:
    """Every weight matrix from N(0, std); biases zero."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=std)
        else:
            nn.init.zeros_(parameter)
    return model


def mlp(depth: int, act: Callable[[], nn.Module], *, into: int = 32, width: int = 64, out: int = 10) -> nn.Sequential:
    """``depth`` hidden linears with an activation behind each, and a head."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(into if index == 0 else width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, out))


def xent(samples: int = 32, classes: int = 10) -> Loss:
    """Cross-entropy with random targets."""
    target = torch.randint(0, classes, (samples,))
    return lambda out: nn.functional.cross_entropy(out, target)


def mse(*shape: int) -> Loss:
    """Mean squared error to random targets."""
    target = torch.randn(*shape)
    return lambda out: nn.functional.mse_loss(out, target)


def tokens(batch: int = 4, length: int = 12, vocabulary: int = 50) -> tuple[Tensor, Loss]:
    """Random token ids, and the loss of predicting random next ones (over ``(batch, length, vocabulary)``)."""
    target = torch.randint(0, vocabulary, (batch * length,))
    return (
        torch.randint(0, vocabulary, (batch, length)),
        lambda out: nn.functional.cross_entropy(out.reshape(-1, vocabulary), target),
    )


class Attention(nn.Module):
    """Self-attention with separate projections; ``scale`` defaults to 1/sqrt(width per head)."""

    def __init__(self, width: int, heads: int = 2, *, scale: float | None = None, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.causal = heads, causal
        self.scale = (width // heads) ** -0.5 if scale is None else scale

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A transformer block: pre- or post-norm, with or without its residuals."""

    def __init__(
        self, width: int, heads: int = 2, *, post: bool = False, residual: bool = True, causal: bool = False,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attn = Attention(width, heads, scale=scale, causal=causal)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.post, self.residual = post, residual

    def forward(self, x):
        if not self.residual:
            return self.mlp(self.attn(x))
        if self.post:
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self, depth: int = 4, width: int = 32, vocabulary: int = 50, length: int = 12, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, causal=True, **block) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """A small image transformer over 8 x 8 pixels in 4 x 4 patches."""

    def __init__(self, depth: int = 3, width: int = 32, **block: Any) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Graph(nn.Module):
    """Message passing over a fixed random adjacency matrix (rows sum to one)."""

    def __init__(
        self, depth: int = 3, width: int = 16, nodes: int = 12, act: Callable[..., Tensor] = torch.relu
    ) -> None:
        super().__init__()
        adjacency = (torch.rand(nodes, nodes) < 0.4).float() + torch.eye(nodes)
        self.register_buffer("adjacency", adjacency / adjacency.sum(1, keepdim=True))
        self.act = act
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.message = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.readout = nn.Linear(width, 4)

    def forward(self, h):
        for own, message in zip(self.own, self.message, strict=True):
            h = self.act(own(h) + self.adjacency @ message(h))
        return self.readout(h)


def biases(modules: Iterable[nn.Module], value: float) -> None:
    """Fill the biases of these modules."""
    for module in modules:
        nn.init.constant_(module.bias, value)
