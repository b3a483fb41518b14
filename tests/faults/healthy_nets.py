"""Healthy programs: architectures whose gradients look odd to a rule of thumb."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Gpt, Net, he, mlp, mse, tokens, xent
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
