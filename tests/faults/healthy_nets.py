"""Healthy programs: architectures whose gradients look odd to a rule of thumb."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Net, mse, xent
from tests.faults.program import Built


def _recurrent(kind, steps=20):
    net = Net(
        lambda self, x: self.head(self.rec(x)[0][:, -1]), rec=kind(6, 24, batch_first=True), head=nn.Linear(24, 3)
    )
    return Built(net, (torch.randn(16, steps, 6),), xent(16, 3))


HEALTHY.add("gru_module", lambda: _recurrent(nn.GRU))
HEALTHY.add("lstm_module", lambda: _recurrent(nn.LSTM))


def _cells(cell, steps=20):
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = cell(6, 24), nn.Linear(24, 3)

        def forward(self, x):
            h = None
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.head(h[0] if isinstance(h, tuple) else h)

    return Built(Unrolled(), (torch.randn(16, steps, 6),), xent(16, 3))


HEALTHY.add("gru_twenty_steps", lambda: _cells(nn.GRUCell))
HEALTHY.add("lstm_twenty_steps", lambda: _cells(nn.LSTMCell))


@HEALTHY()
def rnn_twenty_steps():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.rec, self.head = nn.Linear(6, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 3)
            nn.init.orthogonal_(self.rec.weight)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 24)
            for t in range(x.shape[1]):
                h = torch.tanh(self.into(x[:, t]) + self.rec(h))
            return self.head(h)

    return Built(Rnn(), (torch.randn(16, 20, 6),), xent(16, 3))


@HEALTHY()
def highway_carrying_by_default():
    class Highway(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 24), nn.Linear(24, 3)
            self.block = nn.ModuleList(nn.Linear(24, 24) for _ in range(10))
            self.gate = nn.ModuleList(nn.Linear(24, 24) for _ in range(10))
            for gate in self.gate:
                nn.init.constant_(gate.bias, -2.0)

        def forward(self, x):
            x = self.stem(x)
            for block, gate in zip(self.block, self.gate, strict=True):
                t = torch.sigmoid(gate(x))
                x = t * torch.relu(block(x)) + (1 - t) * x
            return self.head(x)

    return Built(Highway(), (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def gated_linear_units():
    net = nn.Sequential(nn.Linear(8, 48), nn.GLU(), nn.Linear(24, 48), nn.GLU(), nn.Linear(24, 3))
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def swiglu_block():
    net = Net(
        lambda self, x: self.head(x + self.down(F.silu(self.gate(x)) * self.up(x))),
        gate=nn.Linear(16, 40), up=nn.Linear(16, 40), down=nn.Linear(40, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 16),), xent(16, 3))


@HEALTHY()
def squeeze_and_excitation():
    class Squeeze(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.down, self.up, self.head = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Linear(16, 3)

        def forward(self, x):
            x = F.relu(self.bn(self.conv(x)))
            gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
            return self.head((x * gate).mean((2, 3)))

    return Built(Squeeze(), (torch.randn(8, 3, 8, 8),), xent(8, 3))


@HEALTHY()
def mixture_with_an_idle_expert():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 3)
            with torch.no_grad():
                self.router.bias[3] = -20.0

        def forward(self, x):
            weight, chosen = self.router(x).softmax(-1).max(dim=-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(-1)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return self.head(x + out)

    return Built(Mixture(), (torch.randn(48, 8),), xent(48, 3))


@HEALTHY()
def dense_mixture_with_an_expert_never_routed():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))
            self.head = nn.Linear(8, 3)
            with torch.no_grad():
                self.router.bias[2] = -30.0

        def forward(self, x):
            probabilities = self.router(x).softmax(-1)
            top, index = probabilities.topk(2, dim=-1)
            gates = torch.zeros_like(probabilities).scatter(1, index, top)
            out = sum(gates[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
            return self.head(x + out)

    return Built(Mixture(), (torch.randn(48, 8),), xent(48, 3))


@HEALTHY()
def straight_through_rounding():
    net = Net(
        lambda self, x: self.head(_through(torch.sigmoid(self.body(x)) * 7, torch.round)),
        body=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


def _through(h, hard):
    return h + (hard(h) - h).detach()


@HEALTHY()
def straight_through_one_hot():
    def hard(p):
        return F.one_hot(p.argmax(-1), p.shape[-1]).float()

    net = Net(
        lambda self, x: self.head(_through(self.choose(x).softmax(-1), hard)),
        choose=nn.Linear(8, 4), head=nn.Linear(4, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def convolution_bias_in_front_of_batch_norm():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 3, 10, 10),), xent(8, 4))


@HEALTHY()
def linear_bias_in_front_of_layer_norm_and_instance_norm():
    net = Net(
        lambda self, x: self.head(F.gelu(self.norm(self.conv(x))).mean(-1)),
        conv=nn.Conv1d(2, 12, 3), norm=nn.InstanceNorm1d(12, affine=True), head=nn.Linear(12, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 2, 20),), xent(8, 3))


@HEALTHY()
def unet():
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.c = nn.Conv2d(16, 16, 3, padding=1)
            self.up1, self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(24, 8, 2, stride=2)
            self.join, self.out = nn.Conv2d(32, 24, 3, padding=1), nn.Conv2d(16, 1, 1)

        def forward(self, x):
            a = F.relu(self.a(x))
            b = F.relu(self.b(F.max_pool2d(a, 2)))
            c = F.relu(self.c(F.max_pool2d(b, 2)))
            b = F.relu(self.join(torch.cat([self.up1(c), b], 1)))
            return self.out(torch.cat([self.up2(b), a], 1))

    return Built(Unet(), (torch.randn(2, 1, 16, 16),), mse(2, 1, 16, 16))


@HEALTHY()
def densely_connected():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(8))
            self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * i) for i in range(8))
            self.head = nn.Linear(35, 4)

        def forward(self, x):
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = torch.cat([x, conv(F.relu(norm(x)))], dim=1)
            return self.head(x.mean((2, 3)))

    return Built(Dense(), (torch.randn(4, 3, 8, 8),), xent(4, 4))


@HEALTHY()
def transposed_convolutions():
    net = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 8),), mse(8, 1, 8, 8))
