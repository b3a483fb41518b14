"""Healthy programs: models of many fields, small."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Net, mlp, mse, xent
from tests.faults.program import Built


@HEALTHY()
def graph_attention_with_masked_softmax():
    class Gat(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.left, self.right = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 1)
            self.head = nn.Linear(12, 3)
            self.register_buffer("links", (torch.rand(14, 14) < 0.3) | torch.eye(14, dtype=torch.bool))

        def forward(self, h):
            h = self.value(h)
            scores = F.leaky_relu(self.left(h) + self.right(h).T, 0.2).masked_fill(~self.links, -math.inf)
            return self.head(F.elu(scores.softmax(dim=1) @ h))

    return Built(Gat(), (torch.randn(14, 6),), xent(14, 3))


@HEALTHY()
def graph_convolution_by_scatter():
    class Scatter(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update, self.head = nn.Linear(8, 16), nn.GRUCell(16, 8), nn.Linear(8, 1)

        def forward(self, h, source, target):
            for _ in range(4):
                sent = F.relu(self.message(h))[source]
                h = self.update(torch.zeros(len(h), 16).index_add(0, target, sent), h)
            return self.head(h).sum()

    ends = torch.randint(0, 10, (2, 24))
    return Built(Scatter(), (torch.randn(10, 8), ends[0], ends[1]), lambda out: (out - 1.0).square())


@HEALTHY()
def point_cloud_with_a_max_pool():
    net = Net(
        lambda self, x: self.head(self.point(x).amax(dim=1)),
        point=nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU()), head=nn.Linear(64, 4),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 40, 3),), xent(8, 4))


@HEALTHY()
def radiance_field_with_fourier_features():
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, nn.ReLU, into=3 * 2 * 8, width=48, out=4)

        def forward(self, x):
            angles = x[..., None] * (math.pi * 2.0 ** torch.arange(8))
            out = self.net(torch.cat([angles.sin(), angles.cos()], -1).flatten(-2))
            density, colour = F.softplus(out[..., :1]), torch.sigmoid(out[..., 1:])
            alpha = 1 - torch.exp(-density * 0.1)
            through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
            return (alpha * through * colour).sum(1)

    return Built(Field(), (torch.rand(16, 24, 3),), mse(16, 3))


@HEALTHY()
def physics_informed_with_a_derivative_in_the_loss():
    net = mlp(3, nn.Tanh, into=1, width=24, out=1)
    x = torch.rand(32, 1)

    def loss(out):
        return (out - torch.sin(3 * x)).square().mean() + 0.1 * (out[1:] - out[:-1]).square().mean()

    return Built(net, (x,), loss)


@HEALTHY()
def energy_and_forces():
    """Forces are the derivative of the energy inside of the forward."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(2, nn.SiLU, into=3, width=24, out=1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.net(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, -slope

    goal = torch.randn(16, 3)
    return Built(Forces(), (torch.randn(16, 3),), lambda out: 0.01 * out[0].square() + F.mse_loss(out[1], goal))


@HEALTHY()
def fixed_point_with_its_search_under_no_grad():
    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.inject, self.mix, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            nn.init.orthogonal_(self.mix.weight, gain=0.6)

        def forward(self, x):
            drive = self.inject(x)
            with torch.no_grad():
                z = torch.zeros_like(drive)
                for _ in range(15):
                    z = torch.tanh(self.mix(z) + drive)
            return self.head(torch.tanh(self.mix(z) + drive))

    return Built(Equilibrium(), (torch.randn(16, 6),), xent(16, 3))


@HEALTHY()
def normalising_flow():
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(mlp(1, nn.ReLU, into=2, width=24, out=4) for _ in range(4))

        def forward(self, x):
            log_det = torch.zeros(len(x))
            for net in self.nets:
                a, b = x.chunk(2, 1)
                scale, shift = net(a).chunk(2, 1)
                scale = torch.tanh(scale)
                x = torch.cat([b * scale.exp() + shift, a], 1)
                log_det = log_det + scale.sum(1)
            return (0.5 * x.square().sum(1) - log_det).mean()

    return Built(Flow(), (torch.randn(32, 4),), lambda loss: loss)


@HEALTHY()
def mixture_density():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out = nn.Linear(4, 24), nn.Linear(24, 9)

        def forward(self, x, y):
            weight, mean, spread = self.out(torch.tanh(self.body(x))).chunk(3, 1)
            sigma = F.softplus(spread) + 1e-3
            log_p = -0.5 * ((y - mean) / sigma).square() - sigma.log()
            return -torch.logsumexp(torch.log_softmax(weight, 1) + log_p, 1).mean()

    return Built(Mixture(), (torch.randn(32, 4), torch.randn(32, 1)), lambda loss: loss)


@HEALTHY()
def actor_with_squashed_gaussian():
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.mean, self.spread = nn.Linear(6, 32), nn.Linear(32, 2), nn.Linear(32, 2)

        def forward(self, x):
            h = F.relu(self.body(x))
            log_std = self.spread(h).clamp(-5, 2)
            u = self.mean(h) + log_std.exp() * torch.randn(len(x), 2)
            log_p = (-0.5 * ((u - self.mean(h)) / log_std.exp()).square() - log_std).sum(1)
            log_p = log_p - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(1)
            return torch.tanh(u), log_p

    return Built(Actor(), (torch.randn(32, 6),), lambda out: (0.2 * out[1] - out[0].sum(1)).mean())


@HEALTHY()
def q_learning_with_a_target_net():
    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = mlp(2, nn.ReLU, into=4, width=32, out=3)
            self.target = mlp(2, nn.ReLU, into=4, width=32, out=3).requires_grad_(False)

        def forward(self, now, then, action):
            with torch.no_grad():
                goal = 1.0 + 0.99 * self.target(then).amax(1)
            return F.smooth_l1_loss(self.online(now).gather(1, action).squeeze(1), goal)

    args = (torch.randn(64, 4), torch.randn(64, 4), torch.randint(0, 3, (64, 1)))
    return Built(Q(), args, lambda loss: loss)


@HEALTHY()
def triplets_with_a_margin():
    net = Net(
        lambda self, a, p, n: F.triplet_margin_loss(self.body(a), self.body(p), self.body(n)),
        body=mlp(1, nn.ReLU, into=8, width=24, out=8),
    )
    return Built(net, tuple(torch.randn(16, 8) for _ in range(3)), lambda loss: loss)


@HEALTHY()
def speech_with_ctc():
    net = Net(
        lambda self, x: torch.log_softmax(self.head(self.rec(x)[0]), -1).transpose(0, 1),
        rec=nn.GRU(5, 16, batch_first=True), head=nn.Linear(16, 6),
    )  # fmt: skip
    text = torch.randint(1, 6, (4, 3))
    lengths = torch.full((4,), 12), torch.full((4,), 3)
    return Built(net, (torch.randn(4, 12, 5),), lambda out: F.ctc_loss(out, text, *lengths))


@HEALTHY()
def masked_autoencoder():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.token = nn.Linear(6, 16), nn.Parameter(torch.zeros(16))
            self.mix = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.out = nn.Linear(16, 6)

        def forward(self, x, hidden):
            h = torch.where(hidden[..., None], self.token, self.embed(x))
            return self.out(self.mix(h))[hidden]

    x = torch.randn(8, 10, 6)
    hidden = torch.rand(8, 10) < 0.6
    goal = x[hidden]
    return Built(Masked(), (x, hidden), lambda out: F.mse_loss(out, goal))


@HEALTHY()
def recommender_with_two_towers():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(500, 8), nn.Embedding(800, 8)
            self.user_bias, self.item_bias = nn.Embedding(500, 1), nn.Embedding(800, 1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, i):
            dot = (self.users(u) * self.items(i)).sum(-1)
            return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)

    args = (torch.randint(0, 500, (32,)), torch.randint(0, 800, (32,)))
    return Built(Towers(), args, mse(32))


@HEALTHY()
def survival_with_cumulative_sums():
    net = mlp(2, nn.ReLU, into=6, width=24, out=1)
    time, event = torch.rand(32).argsort(), (torch.rand(32) < 0.7).float()

    def loss(risk):
        ordered = risk.squeeze(1)[time]
        return -((ordered - torch.logcumsumexp(ordered, 0)) * event).sum() / event.sum()

    return Built(net, (torch.randn(32, 6),), loss)


@HEALTHY()
def capsules_squashed():
    class Capsules(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.votes = nn.Linear(8, 24), nn.Parameter(torch.randn(6, 3, 4, 4) * 0.3)

        def forward(self, x):
            votes = torch.einsum("bni,ncij->bncj", torch.tanh(self.body(x)).view(-1, 6, 4), self.votes)
            total = votes.mean(1)
            square = total.square().sum(-1, keepdim=True)
            return (square / (1 + square) * total / (square + 1e-8).sqrt()).square().sum(-1)

    return Built(Capsules(), (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def early_exits_weighted():
    class Exits(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
            self.exits = nn.ModuleList(nn.Linear(12, 3) for _ in range(4))

        def forward(self, x):
            out = []
            for block, leave in zip(self.blocks, self.exits, strict=True):
                x = x + F.gelu(block(x))
                out.append(leave(x))
            return out

    base = xent(16, 3)
    weights = (0.01, 0.05, 0.2, 1.0)
    return Built(
        Exits(), (torch.randn(16, 12),), lambda outs: sum(w * base(o) for w, o in zip(weights, outs, strict=True))
    )


@HEALTHY()
def generator_through_a_frozen_critic():
    class Generate(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = mlp(2, nn.ReLU, into=4, width=24, out=8)
            self.critic = mlp(2, lambda: nn.LeakyReLU(0.2), into=8, width=24, out=1).requires_grad_(False)

        def forward(self, noise):
            return self.critic(torch.tanh(self.generator(noise)))

    return Built(Generate(), (torch.randn(32, 4),), lambda out: F.softplus(-out).mean())


@HEALTHY()
def truncated_backprop_through_time():
    """The state that comes in was detached by the loop outside; all parameters still get their gradient."""

    class Truncated(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(5, 12), nn.Linear(12, 3)

        def forward(self, x, state):
            h = state.detach()
            for t in range(x.shape[1]):
                if t == x.shape[1] // 2:
                    h = h.detach()
                h = self.cell(x[:, t], h)
            return self.head(h)

    return Built(Truncated(), (torch.randn(8, 10, 5), torch.randn(8, 12)), xent(8, 3))


@HEALTHY()
def contrastive_queue_of_old_keys():
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = mlp(1, nn.ReLU, into=8, width=24, out=8)
            self.key = mlp(1, nn.ReLU, into=8, width=24, out=8).requires_grad_(False)
            self.register_buffer("old", F.normalize(torch.randn(8, 64), dim=0))

        def forward(self, a, b):
            q = F.normalize(self.query(a), dim=1)
            with torch.no_grad():
                k = F.normalize(self.key(b), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.old], 1) / 0.2
            return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    return Built(Queue(), (torch.randn(16, 8), torch.randn(16, 8)), lambda loss: loss)
