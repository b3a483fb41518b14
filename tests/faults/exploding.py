"""The gradient gains many decades on its way back."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Net, he, mlp, tokens, xent
from tests.faults.program import Built, Register
from tests.faults.vanishing import Remembering

EXPLODING = Register("exploding")
CHAIN = tuple(str(i) for i in range(61))


@EXPLODING("exploding", culprits=CHAIN, victims=("0.",))
def mlp_twice_he():
    return Built(he(mlp(30, nn.ReLU), 2.0), (torch.randn(32, 32),), xent())


@EXPLODING("exploding", culprits=CHAIN, victims=("0.",))
def mlp_unit_normal():
    model = mlp(5, nn.LeakyReLU, width=128)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.0)
    return Built(model, (torch.randn(32, 32),), xent())


@EXPLODING("exploding", culprits=("rec", "leaky_relu", "softplus"), victims=("front",))
def rnn_with_radius_above_one():
    return Built(Remembering(2.0, act=lambda h: F.leaky_relu(h, 0.3)), (torch.randn(8, 8),), xent(8, 4))


@EXPLODING("exploding", culprits=("rec", "matmul", "mul"), victims=("front",))
def linear_recurrence():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.front = nn.Linear(6, 12)
            self.rec = nn.Parameter(1.5 * torch.linalg.qr(torch.randn(12, 12))[0])
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            h = self.front(x)
            for _ in range(30):
                h = h @ self.rec
            return self.head(h)

    return Built(Filter(), (torch.randn(8, 6),), lambda out: out.square().mean())


@EXPLODING("exploding", culprits=("blocks", "add", "conv"), victims=("stem",))
def residual_net_without_norm():
    class Res(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(24))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            for conv in self.blocks:
                x = x + F.relu(conv(x))
            return self.head(x.mean((2, 3)))

    return Built(he(Res(), 1.6), (torch.randn(4, 3, 8, 8),), xent(4, 4))


@EXPLODING(
    "exploding", "scale_break", culprits=("stages.3",), not_culprits=("stages.2", "stages.4"), victims=("stages.0",)
)
def one_convolution_badly_made():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(6))
            self.head = nn.Linear(6, 1)
            with torch.no_grad():
                self.stages[3].weight.mul_(1e6)

        def forward(self, x):
            for conv in self.stages:
                x = F.leaky_relu(conv(x), 0.2)
            return self.head(x.mean(dim=2))

    return Built(Stack(), (torch.randn(4, 6, 10),), lambda out: out.mean())


@EXPLODING("exploding", culprits=("layers", "attn", "mlp", "add"), victims=("embed",))
def transformer_without_norm_wide_init():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.layers = nn.ModuleList(Block(32) for _ in range(8))
            self.head = nn.Linear(32, 50)
            for block in self.layers:
                block.norm1 = nn.Identity()
                block.norm2 = nn.Identity()
                with torch.no_grad():
                    for part in (block.attn.v, block.attn.proj, block.mlp[0], block.mlp[2]):
                        part.weight.mul_(2.2)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.layers:
                x = block(x)
            return self.head(x)

    ids, loss = tokens()
    return Built(Plain(), (ids,), loss)


@EXPLODING("exploding", culprits=("message", "matmul", "relu", "linear"), victims=("embed",))
def graph_sum_over_many_neighbours():
    """Messages are summed, not averaged: each of 6 rounds multiplies by the number of neighbours."""

    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(5, 16)
            self.message = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
            self.readout = nn.Linear(16, 1)
            self.register_buffer("links", (torch.rand(60, 60) < 0.9).float())

        def forward(self, h):
            h = self.embed(h)
            for layer in self.message:
                h = self.links @ torch.relu(layer(h))
            return self.readout(h)

    return Built(Summing(), (torch.randn(60, 5),), lambda out: out.mean())


@EXPLODING("exploding", culprits=("step", "mul", "sub", "logistic"), victims=("rate",))
def chaotic_map():
    """The logistic map in its chaotic range, unrolled 24 times over a learned start."""

    class Chaos(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Linear(4, 1)
            self.head = nn.Linear(1, 1)

        def forward(self, x):
            state = 0.2 + 0.6 * torch.sigmoid(self.rate(x))
            for _ in range(24):
                state = 3.9999 * state * (1 - state)
            return self.head(state)

    return Built(Chaos(), (torch.randn(64, 4),), lambda out: out.square().mean())


@EXPLODING("exploding", culprits=("up",), victims=("stem",))
def polynomial_features():
    net = Net(
        lambda self, x: self.head(_powers(self.up, self.stem(x))),
        stem=nn.Linear(6, 16), up=nn.ModuleList(nn.Linear(16, 16) for _ in range(10)), head=nn.Linear(16, 1),
    )  # fmt: skip
    return Built(he(net, 3.0), (torch.randn(16, 6),), lambda out: out.mean())


def _powers(layers, x):
    for layer in layers:
        x = F.silu(layer(x))
    return x


@EXPLODING("exploding", culprits=("mul", "add", "blocks"), victims=("stem",))
def residual_doubled_in_each_block():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(12, 24)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(24))
            self.head = nn.Linear(24, 1)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = 2.0 * x + block(x)
            return self.head(x)

    return Built(Doubled(), (torch.randn(16, 12),), lambda out: out.mean())


@EXPLODING("exploding", culprits=("mul", "add", "speed"), victims=("start",))
def unstable_integration_step():
    """Explicit Euler with a step beyond its stability limit."""

    class Unstable(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.head = nn.Linear(6, 10), nn.Linear(10, 2)
            self.register_buffer("speed", torch.linspace(-30.0, -5.0, 10))

        def forward(self, x):
            state = self.start(x)
            for _ in range(24):
                state = state + 0.1 * (self.speed * state)
            return self.head(state)

    return Built(Unstable(), (torch.randn(16, 6),), lambda out: out.mean())


@EXPLODING("exploding", culprits=tuple(f"mix.{i}" for i in range(12)), victims=("stem",))
def orthogonal_layers_of_gain_three():
    net = Net(
        lambda self, x: self.head(_chain(self.mix, torch.tanh(self.stem(x)))),
        stem=nn.Linear(8, 20), mix=nn.ModuleList(nn.Linear(20, 20) for _ in range(12)), head=nn.Linear(20, 2),
    )  # fmt: skip
    for layer in net.mix:
        nn.init.orthogonal_(layer.weight, gain=3.0)
    return Built(net, (torch.randn(16, 8),), lambda out: out.mean())


def _chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x
