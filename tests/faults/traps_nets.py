"""Traps for NaN and Inf inside of networks, in parameters, and outside of the model."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Net, mlp, mse, xent
from tests.faults.program import Built
from tests.faults.traps import TRAPS


def nonfinite(*culprits, **answer):
    return TRAPS("nonfinite", culprits=culprits, **answer)


@nonfinite("attn", "softmax", "multi_head_attention")
def attention_module_over_padding():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3, 4)
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x, pad):
            h = self.embed(x)
            return self.head(self.attn(h, h, h, key_padding_mask=pad, need_weights=True)[0][:2])

    pad = torch.zeros(3, 4, dtype=torch.bool)
    pad[2] = True
    return Built(Padded(), (torch.randn(3, 4, 3), pad), lambda out: out.square().mean(), steps=3)


@nonfinite("softmax")
def attention_written_out_over_padding():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.head = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x, pad):
            scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(6)
            weights = torch.softmax(scores.masked_fill(pad[:, None], -math.inf), dim=-1)
            return self.head((weights @ self.v(x)).masked_fill(pad[..., None], 0.0))

    pad = torch.zeros(3, 4, dtype=torch.bool)
    pad[1] = True
    return Built(Written(), (torch.randn(3, 4, 6), pad), mse(3, 4, 6), steps=3)


@nonfinite("logsumexp")
def log_space_chain_with_a_closed_state():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            closed = -math.inf
            self.register_buffer("hop", torch.tensor([[0.0, 0.0, closed]] * 3))

        def forward(self, x):
            emit = torch.log_softmax(self.fc(x), dim=-1)
            score = emit[:, 0]
            for t in (1, 2):
                score = torch.logsumexp(score.unsqueeze(2) + self.hop, dim=1) + emit[:, t]
            return score[:, 0]

    return Built(Chain(), (torch.randn(2, 3, 4),), lambda score: -score.mean(), steps=3)


@nonfinite("norm", "group_norm")
def group_norm_without_eps():
    net = Net(
        lambda self, x: self.head(self.norm(F.relu(self.body(x))).mean(-1)),
        body=nn.Conv1d(2, 8, 3), norm=nn.GroupNorm(4, 8, eps=0.0), head=nn.Linear(8, 2),
    )  # fmt: skip
    nn.init.constant_(net.body.bias[:2], -50.0)
    return Built(net, (torch.randn(8, 2, 12),), xent(8, 2), steps=3)


@nonfinite("blocks.1", "sqrt")
def own_norm_in_the_second_block():
    class RootNorm(nn.Module):
        def forward(self, h):
            return h / (h.square().sum(-1, keepdim=True).sqrt() + 1e-6)

    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.lin, self.norm = nn.Linear(6, 6, bias=False), norm

        def forward(self, x):
            return F.gelu(self.lin(self.norm(x)))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(nn.LayerNorm(6)), Block(RootNorm()), Block(nn.LayerNorm(6))])
            self.head = nn.Linear(6, 2)
            nn.init.zeros_(self.blocks[0].norm.bias)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    x = torch.randn(8, 6)
    x[3] = 2.0
    return Built(Stack(), (x,), xent(8, 2), steps=3)


@nonfinite("div")
def graph_mean_over_no_neighbours():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.readout = nn.Linear(4, 8), nn.Linear(8, 2)
            links = (torch.rand(9, 9) < 0.5).float()
            links[4] = 0.0
            self.register_buffer("links", links)

        def forward(self, h):
            h = torch.relu(self.own(h))
            return self.readout(self.links @ h / self.links.sum(1, keepdim=True))

    return Built(Mean(), (torch.randn(9, 4),), xent(9, 2), steps=3)


@nonfinite("log")
def mixture_density_with_a_spread_of_zero():
    net = Net(
        lambda self, x: _likelihood(self.mean(x), torch.relu(self.spread(x))),
        mean=nn.Linear(4, 3),
        spread=nn.Linear(4, 3),
    )
    nn.init.constant_(net.spread.bias, -3.0)
    return Built(net, (torch.randn(8, 4),), lambda out: -out.mean(), steps=3)


def _likelihood(mean, spread):
    return -0.5 * mean.square() / (spread + 1.0) - torch.log(spread)


@nonfinite("exp")
def flow_of_unbounded_scales():
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Linear(2, 2), nn.Linear(2, 2)
            nn.init.constant_(self.scale.bias, 95.0)

        def forward(self, x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a, b * torch.exp(self.scale(a)) + self.shift(a)], dim=-1)

    return Built(Coupling(), (torch.randn(8, 4),), lambda out: out.square().mean(), steps=3)


@nonfinite("mid", "linear")
def half_precision_linear_overflows():
    net = Net(
        lambda self, x: self.head(self.mid(torch.tanh(self.stem(x)))),
        stem=nn.Linear(4, 16), mid=nn.Linear(16, 16), head=nn.Linear(16, 2),
    ).half()  # fmt: skip
    with torch.no_grad():
        net.mid.weight.fill_(60000.0)
        net.stem.bias.fill_(4.0)
    return Built(net, (torch.randn(8, 4).half(),), lambda out: out.float().mean(), steps=3)


@nonfinite("sqrt")
def two_consumers_one_of_them_guilty():
    """The same value goes to a sum that is fine and to a root that is not."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, 1)

        def forward(self, x):
            h = self.lin(x).abs()
            return self.head(h) + torch.sqrt(h).sum(-1, keepdim=True)

    x = torch.randn(8, 4)
    x[6] = 0.0
    return Built(Two(), (x,), lambda out: out.mean(), steps=3)


@nonfinite("pow")
def recurrence_that_overflows():
    class Squaring(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            h = self.front(x) + 3.0
            for _ in range(9):
                h = h.pow(2)
            return self.head(h)

    return Built(Squaring(), (torch.randn(4, 4),), lambda out: out.mean(), steps=3)


# ---- not at an operation ----------------------------------------------------------------------------------------


@nonfinite("2.weight", outside=True)
def parameter_already_nan():
    model = mlp(2, nn.ReLU, into=8, width=16, out=3)
    with torch.no_grad():
        model[2].weight[3, 4] = math.nan
    return Built(model, (torch.randn(16, 8),), xent(16, 3), steps=3)


@nonfinite("running_var", outside=True)
def buffer_already_nan():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    model[1].running_var[2] = math.nan
    return Built(model, (torch.randn(16, 8),), xent(16, 3), steps=3)


@nonfinite("x", "input", outside=True)
def input_holds_nan():
    x = torch.randn(16, 8)
    x[5, 2] = math.nan
    return Built(mlp(2, nn.ReLU, into=8, width=16, out=3), (x,), xent(16, 3), steps=3)


@nonfinite(outside=True)
def root_mean_square_loss_at_zero():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return Built(model, (torch.randn(8, 4),), lambda out: F.mse_loss(out, torch.zeros(8, 1)).sqrt(), steps=3)


@nonfinite(outside=True)
def loss_over_no_samples():
    weight = torch.zeros(8, 3)
    model = mlp(1, nn.Tanh, into=4, width=8, out=3)
    return Built(model, (torch.randn(8, 4),), lambda out: (out.square() * weight).sum() / weight.sum(), steps=3)


@nonfinite(outside=True)
def log_of_a_rounded_probability_in_the_loss():
    model = Net(
        lambda self, x: torch.sigmoid(self.out(torch.tanh(self.body(x))) * 1e4),
        body=nn.Linear(4, 8),
        out=nn.Linear(8, 1),
    )
    return Built(model, (torch.randn(32, 4),), lambda out: -(torch.log(out) + torch.log(1 - out)).mean(), steps=3)


@nonfinite(outside=True)
def infinite_target():
    y = torch.randn(8, 1)
    y[2] = math.inf
    return Built(mlp(1, nn.ReLU, into=4, width=8, out=1), (torch.randn(8, 4),), lambda out: F.mse_loss(out, y), steps=3)
