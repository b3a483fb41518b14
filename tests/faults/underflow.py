"""Gradients too small for half precision become exact zeros."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Attention, Net, he, mlp, xent
from tests.faults.program import Built, Register

UNDERFLOW = Register("underflow")
FLUSHED = ("underflow", "zero", "vanishing")


def scaled(base, factor):
    """A loss in single precision, times a factor that no scaler undoes."""
    return lambda out: base(out.float()) * factor


@UNDERFLOW(*FLUSHED, culprits=("2", "4"), victims=("0.",))
def half_mlp_without_scaler():
    model = he(mlp(3, nn.ReLU), 0.15).half()
    return Built(model, (torch.randn(32, 32).half(),), scaled(xent(), 5e-4))


@UNDERFLOW(*FLUSHED, culprits=("mid",), victims=("stem",))
def autocast_region():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)
            with torch.no_grad():
                self.mid.weight.mul_(0.02)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                return self.head(self.mid(torch.tanh(self.stem(x)))).float()

    return Built(Region(), (torch.randn(8, 4),), lambda out: out.mean() * 1e-5)


@UNDERFLOW(*FLUSHED, culprits=("mean",), victims=("backbone.0",))
def half_cnn_averaging_over_space():
    net = Net(
        lambda self, x: self.head(self.backbone(x).mean((2, 3))),
        backbone=nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()), head=nn.Linear(8, 4),
    )  # fmt: skip
    return Built(net.half(), (torch.randn(2, 3, 24, 24).half(),), scaled(xent(2, 4), 3e-6))


@UNDERFLOW(*FLUSHED, culprits=("rec",), victims=("front",))
def half_recurrent_net():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.rec, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            nn.init.orthogonal_(self.rec.weight, gain=0.6)

        def forward(self, x):
            h = torch.tanh(self.front(x))
            for _ in range(14):
                h = torch.tanh(self.rec(h))
            return self.head(h)

    return Built(Rnn().half(), (torch.randn(32, 6).half(),), scaled(xent(32, 3), 2e-3))


@UNDERFLOW(*FLUSHED, culprits=("mean",), victims=("attn.q", "attn.k"))
def half_attention_with_a_small_loss():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attn, self.head = nn.Linear(6, 16), Attention(16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.attn(self.embed(x)).mean(1))

    return Built(Small().half(), (torch.randn(8, 10, 6).half(),), scaled(xent(8, 3), 1e-5))


@UNDERFLOW(*FLUSHED, culprits=("readout",), victims=("own",))
def half_graph_net():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.message, self.readout = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 2)
            self.register_buffer("links", torch.rand(60, 60).softmax(dim=1))

        def forward(self, h):
            h = torch.relu(self.own(h))
            h = torch.relu(self.links @ self.message(h))
            return self.readout(h)

    return Built(Half().half(), (torch.randn(60, 5).half(),), scaled(xent(60, 2), 4e-6))


@UNDERFLOW(*FLUSHED, culprits=("head",), victims=("body", "gate"))
def half_gated_net_with_functional_style():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate, self.head = nn.Linear(10, 32), nn.Linear(10, 32), nn.Linear(32, 3)

        def forward(self, x):
            h = F.linear(x, self.body.weight, self.body.bias).tanh()
            return self.head(h * torch.sigmoid(self.gate(x)))

    return Built(Gated().half(), (torch.randn(32, 10).half(),), scaled(xent(32, 3), 5e-6))
