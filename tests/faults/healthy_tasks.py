"""Healthy programs: tasks and losses, and what they do with gradients on purpose."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Gpt, Net, he, mlp, mse, tokens, xent
from tests.faults.program import Built


@HEALTHY()
def teacher_and_student():
    class Distill(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
            self.teacher = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6)).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x).softmax(-1)
            return F.cross_entropy(self.student(x), target)

    return Built(Distill(), (torch.randn(16, 8),), lambda loss: loss)


@HEALTHY()
def siamese_with_a_stopped_side():
    class Stopped(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))
            self.predictor = nn.Linear(12, 12)

        def forward(self, a, b):
            za, zb = self.encoder(a), self.encoder(b)
            return -F.cosine_similarity(self.predictor(za), zb.detach()).mean()

    return Built(Stopped(), (torch.randn(16, 8), torch.randn(16, 8)), lambda loss: loss)


@HEALTHY()
def contrastive_with_temperature():
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(8, 16), nn.Linear(6, 16)
            self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, a, b):
            logits = self.scale.exp() * F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T
            target = torch.arange(len(a))
            return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)

    return Built(Clip(), (torch.randn(16, 8), torch.randn(16, 6)), lambda loss: loss)


@HEALTHY()
def variational_autoencoder():
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.mean, self.spread = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            self.decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, x):
            h = F.relu(self.encode(x))
            mean, spread = self.mean(h), self.spread(h)
            z = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
            kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
            return F.mse_loss(self.decode(z), x) + 1e-3 * kl

    return Built(Vae(), (torch.randn(16, 16),), lambda loss: loss)


@HEALTHY()
def discriminator_step_with_a_detached_generator():
    class Adversaries(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = mlp(1, nn.ReLU, into=4, width=16, out=8).requires_grad_(False)
            self.critic = mlp(2, lambda: nn.LeakyReLU(0.2), into=8, width=16, out=1)

        def forward(self, noise, real):
            fake = self.generator(noise).detach()
            return F.softplus(self.critic(fake)).mean() + F.softplus(-self.critic(real)).mean()

    return Built(Adversaries(), (torch.randn(16, 4), torch.randn(16, 8)), lambda loss: loss)


@HEALTHY()
def hypernetwork():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.make = nn.Linear(3, 16), nn.Linear(16, 8 * 8)
            self.head = nn.Linear(8, 2)
            nn.init.normal_(self.make.weight, std=0.05)

        def forward(self, x, task):
            weight = self.make(torch.tanh(self.embed(task))).view(8, 8)
            return self.head(torch.tanh(F.linear(x, weight)))

    return Built(Hyper(), (torch.randn(16, 8), torch.randn(3)), xent(16, 2))


@HEALTHY()
def several_losses_of_several_sizes():
    net = Net(
        lambda self, x: (self.classes(F.relu(self.stem(x))), self.boxes(F.relu(self.stem(x)))),
        stem=nn.Linear(8, 24), classes=nn.Linear(24, 3), boxes=nn.Linear(24, 4),
    )  # fmt: skip
    a, b = xent(16, 3), mse(16, 4)
    return Built(net, (torch.randn(16, 8),), lambda out: a(out[0]) + 0.01 * b(out[1]))


@HEALTHY()
def auxiliary_head():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(8, 24), nn.Linear(24, 24)
            self.aux, self.head = nn.Linear(24, 3), nn.Linear(24, 3)

        def forward(self, x):
            low = F.gelu(self.low(x))
            return {"main": self.head(F.gelu(self.high(low))), "aux": self.aux(low)}

    base = xent(16, 3)
    return Built(Aux(), (torch.randn(16, 8),), lambda out: base(out["main"]) + 0.3 * base(out["aux"]))


@HEALTHY()
def gradient_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return Built(Checkpointed(), (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def autocast_to_bfloat16():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = he(mlp(3, nn.ReLU))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    base = xent()
    return Built(Mixed(), (torch.randn(32, 32),), lambda out: base(out.float()))


@HEALTHY()
def half_precision_with_a_loss_scale():
    base = xent()
    return Built(
        he(mlp(3, nn.ReLU)).half(), (torch.randn(32, 32).half(),), lambda out: base(out.float()) * 1024.0, steps=1
    )


@HEALTHY()
def complex_spectrum():
    net = Net(
        lambda self, x: self.head((torch.fft.rfft(self.body(x)) * self.filter).abs()),
        body=nn.Linear(16, 16), head=nn.Linear(9, 3), filter=nn.Parameter(torch.randn(9, dtype=torch.complex64)),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 16),), xent(16, 3))


@HEALTHY()
def sinusoids_and_splines():
    class Kan(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.coefficient = nn.Linear(2, 32), nn.Parameter(torch.randn(32, 5) * 0.2)
            self.head = nn.Linear(32, 1)
            self.register_buffer("knots", torch.linspace(-1, 1, 5))

        def forward(self, x):
            h = torch.sin(30 * self.first(x))
            basis = torch.exp(-((h[..., None] - self.knots) / 0.5).square())
            return self.head((basis * self.coefficient).sum(-1))

    return Built(Kan(), (torch.rand(64, 2) * 2 - 1,), mse(64, 1))


@HEALTHY()
def diffusion_step_with_time_embedding():
    class Denoise(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
            self.into, self.mid, self.out = (
                nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1),
            )  # fmt: skip
            self.norm = nn.GroupNorm(4, 16)
            nn.init.zeros_(self.out.weight)

        def forward(self, x, t):
            rates = torch.exp(torch.arange(8) * (-math.log(1e4) / 8))
            angles = t[:, None] * rates
            scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None].chunk(2, 1)
            h = self.norm(self.into(x)) * (1 + scale) + shift
            return self.out(F.silu(self.mid(F.silu(h))))

    x = torch.randn(4, 1, 8, 8)
    return Built(Denoise(), (x, torch.randint(0, 1000, (4,)).float()), mse(4, 1, 8, 8))


@HEALTHY()
def language_model_loss_masked_by_ignore_index():
    ids, _ = tokens()
    target = torch.randint(0, 50, (48,))
    target[10:40] = -100
    return Built(Gpt(2), (ids,), lambda out: F.cross_entropy(out.reshape(-1, 50), target, ignore_index=-100))
