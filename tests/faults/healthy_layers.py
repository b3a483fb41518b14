"""Healthy programs: layers and tricks beyond the usual ones."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Attention, Net, he, mlp, mse, tokens, xent
from tests.faults.program import Built


def sequence(module, width=16, length=8, classes=3):
    """A module over a sequence between an embedding and a head."""
    net = Net(
        lambda self, x: self.head(self.mid(self.embed(x)).mean(1)),
        embed=nn.Linear(6, width), mid=module, head=nn.Linear(width, classes),
    )  # fmt: skip
    return Built(net, (torch.randn(8, length, 6),), xent(8, classes))


HEALTHY.add(
    "encoder_layers_of_torch",
    lambda: sequence(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)),
)
HEALTHY.add(
    "encoder_layers_of_torch_norm_first",
    lambda: sequence(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True), 4,
            enable_nested_tensor=False,
        )
    ),
)  # fmt: skip


@HEALTHY()
def encoder_and_decoder_with_cross_attention():
    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
            self.net = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.net(self.embed(source), self.embed(target), tgt_mask=mask))

    args = (torch.randint(0, 40, (4, 7)), torch.randint(0, 40, (4, 5)))
    goal = torch.randint(0, 40, (20,))
    return Built(Translate(), args, lambda out: F.cross_entropy(out.reshape(-1, 40), goal))


@HEALTHY()
def bidirectional_lstm_of_two_layers():
    net = Net(
        lambda self, x: self.head(self.rec(x)[0].mean(1)),
        rec=nn.LSTM(6, 12, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True), head=nn.Linear(24, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 10, 6),), xent(8, 3))


@HEALTHY()
def embeddings_times_the_root_of_their_width():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attn, self.norm = nn.Embedding(50, 64), Attention(64, causal=True), nn.LayerNorm(64)
            self.head = nn.Linear(64, 50)
            nn.init.normal_(self.embed.weight, std=64**-0.5)
            places = torch.arange(12)[:, None] / 10000 ** (torch.arange(32) / 32)
            self.register_buffer("places", torch.cat([places.sin(), places.cos()], 1))

        def forward(self, ids):
            x = self.embed(ids) * math.sqrt(64) + self.places
            return self.head(self.norm(x + self.attn(x)))

    ids, loss = tokens()
    return Built(Scaled(), (ids,), loss)


@HEALTHY()
def rotary_positions_and_normalised_queries():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.head = nn.Linear(6, 16), nn.Linear(16, 48), nn.Linear(16, 3)
            self.q_norm, self.k_norm = nn.RMSNorm(16), nn.RMSNorm(16)

        def turned(self, x):
            angle = torch.arange(x.shape[1])[:, None] / 100 ** (torch.arange(8) / 8)
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

        def forward(self, x):
            x = self.embed(x)
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = self.turned(self.q_norm(q)), self.turned(self.k_norm(k))
            return self.head((x + F.scaled_dot_product_attention(q, k, v)).mean(1))

    return Built(Rotary(), (torch.randn(8, 9, 6),), xent(8, 3))


@HEALTHY()
def linear_attention_with_elu():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
            weights = q @ (k.transpose(1, 2) @ v)
            return x + weights / (q @ k.sum(1)[..., None] + 1e-6)

    return sequence(Linear())


@HEALTHY()
def state_space_scan():
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay = nn.Parameter(torch.linspace(1.0, 4.0, 16))
            self.into, self.step = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            h, out = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                delta = F.softplus(self.step(x[:, t]) - 2.0)
                h = torch.exp(-delta * F.softplus(self.decay)) * h + delta * self.into(x[:, t])
                out.append(h)
            return x + torch.stack(out, dim=1)

    return sequence(Scan(), length=16)


@HEALTHY()
def mlp_mixer():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
            self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
            self.channels = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
            )

        def forward(self, x):
            for i, (across, within) in enumerate(zip(self.tokens, self.channels, strict=True)):
                x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
                x = x + within(self.norms[2 * i + 1](x))
            return x

    return sequence(Mixer())


@HEALTHY()
def depthwise_separable_with_hard_swish():
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 3, 16, 16),), xent(16, 4))


@HEALTHY()
def deep_plain_vgg_with_he_init():
    layers = [m for i in range(8) for m in (nn.Conv2d(3 if i == 0 else 12, 12, 3, padding=1), nn.ReLU())]
    net = nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(48, 4))
    return Built(he(net), (torch.randn(8, 3, 8, 8),), xent(8, 4))


@HEALTHY()
def squeeze_net_with_few_samples():
    """Ten channels behind a global pool and four samples: a unit that is silent for a batch is not dead."""
    net = Net(
        lambda self, x: self.head(F.relu(self.down(self.conv(x).mean((2, 3))))),
        conv=nn.Conv2d(3, 16, 3), down=nn.Linear(16, 12), head=nn.Linear(12, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(4, 3, 8, 8),), xent(4, 3))


@HEALTHY()
def sparse_activations_by_a_high_threshold():
    net = Net(lambda self, x: self.head(F.relu(self.wide(x) - 0.5)), wide=nn.Linear(16, 200), head=nn.Linear(200, 4))
    return Built(net, (torch.randn(128, 16),), xent(128, 4))


@HEALTHY()
def top_k_sparse_autoencoder():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 96), nn.Linear(96, 16)

        def forward(self, x):
            code = self.encode(x)
            kept, index = code.topk(8, dim=-1)
            return self.decode(torch.zeros_like(code).scatter(1, index, F.relu(kept)))

    x = torch.randn(64, 16)
    return Built(Sparse(), (x,), lambda out: F.mse_loss(out, x))


@HEALTHY()
def weight_and_spectral_norm():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 24)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(24, 24)),
        nn.Tanh(), nn.Linear(24, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def leaky_prelu_and_softplus():
    net = nn.Sequential(
        nn.Linear(8, 24), nn.PReLU(), nn.Linear(24, 24), nn.LeakyReLU(0.01), nn.Linear(24, 24), nn.Softplus(),
        nn.Linear(24, 24), nn.Mish(), nn.Linear(24, 24), nn.Hardtanh(-2, 2), nn.Linear(24, 3),
    )  # fmt: skip
    return Built(he(net), (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def maxout_and_max_pooling():
    net = Net(
        lambda self, x: self.head(F.max_pool1d(self.conv(x), 4).unflatten(1, (8, 2)).amax(2).flatten(1)),
        conv=nn.Conv1d(2, 16, 3), head=nn.Linear(8 * 4, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 2, 18),), xent(16, 3))


@HEALTHY()
def pixels_divided_by_255():
    net = Net(
        lambda self, x: self.head(F.relu(self.conv(x / 255.0)).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3),
        head=nn.Linear(8, 4),
    )
    return Built(net, (torch.randint(0, 256, (8, 3, 12, 12)).float(),), xent(8, 4))


@HEALTHY()
def quantised_weights_with_a_straight_through_estimator():
    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x):
            w = self.first.weight
            binary = w.sign() * w.abs().mean()
            return self.head(torch.tanh(F.linear(x, w + (binary - w).detach(), self.first.bias)))

    return Built(Binary(), (torch.randn(32, 16),), xent(32, 4))


@HEALTHY()
def vector_quantisation_with_commitment():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = mlp(1, nn.ReLU, into=16, out=4), mlp(1, nn.ReLU, into=4, out=16)
            self.codes = nn.Embedding(64, 4)

        def forward(self, x):
            z = self.encode(x)
            near = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            loss = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(near.detach(), z)
            return F.mse_loss(self.decode(z + (near - z).detach()), x) + loss

    return Built(Codebook(), (torch.randn(32, 16),), lambda loss: loss)


@HEALTHY()
def gumbel_softmax_hard():
    net = Net(
        lambda self, x: self.head(F.gumbel_softmax(self.choose(x), tau=1.0, hard=True)),
        choose=nn.Linear(8, 6), head=nn.Linear(6, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@HEALTHY()
def double_precision():
    return Built(mlp(3, nn.Tanh).double(), (torch.randn(32, 32).double(),), xent())


@HEALTHY()
def bias_only_and_no_bias():
    model = mlp(3, nn.ReLU)
    model[0].weight.requires_grad_(False)
    model[2] = nn.Linear(64, 64, bias=False)
    return Built(model, (torch.randn(64, 32),), xent(64))


@HEALTHY()
def ensemble_averaged():
    members = nn.ModuleList(mlp(2, nn.ReLU, into=8, width=16, out=1) for _ in range(5))
    net = Net(lambda self, x: torch.stack([m(x) for m in self.members]).mean(0), members=members)
    return Built(net, (torch.randn(32, 8),), mse(32, 1))
