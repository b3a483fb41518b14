"""One operation multiplies the gradient out of all proportion, or the loss does."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Gpt, Net, he, mlp, mse, tokens, xent
from tests.faults.program import Built, Register

SCALE = Register("scale")
SHRINKS = ("scale_break", "vanishing")
GROWS = ("scale_break", "exploding")


class Times(nn.Module):
    """A stack of linears with a constant factor behind one of them."""

    def __init__(self, factor: float, at: int = 3, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.head = nn.Linear(32, 10)
        self.factor, self.at = factor, at

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = F.relu(layer(x))
            if index == self.at:
                x = x * self.factor
        return self.head(x)


@SCALE(*SHRINKS, culprits=("mul",), victims=("layers.0", "layers.3"))
def times_a_millionth():
    return Built(he(Times(1e-6)), (torch.randn(32, 32),), xent())


@SCALE(*GROWS, culprits=("mul",), victims=("layers.0", "layers.3"))
def times_ten_thousand():
    return Built(he(Times(1e4)), (torch.randn(32, 32),), xent())


@SCALE(*SHRINKS, culprits=("div",), victims=("layers.0", "layers.2"))
def divided_by_a_million():
    class Divided(Times):
        def forward(self, x):
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            x = x / 1e6
            for layer in self.layers[3:]:
                x = torch.tanh(layer(x))
            return self.head(x)

    return Built(Divided(1.0), (torch.randn(32, 32),), xent())


@SCALE(*GROWS, culprits=("6",), victims=("0.", "4."))
def one_linear_ten_thousandfold():
    model = he(mlp(6, nn.ReLU))
    with torch.no_grad():
        model[6].weight.mul_(1e4)
    return Built(model, (torch.randn(32, 32),), xent())


@SCALE(*GROWS, culprits=("mul",), victims=("small",))
def features_of_two_scales():
    """Features at scale 1 and at scale 10,000 are put side by side."""
    net = Net(
        lambda self, x: self.head(torch.cat([torch.tanh(self.big(x)) * 1e4, torch.tanh(self.small(x))], dim=1)),
        big=nn.Linear(8, 16), small=nn.Linear(8, 16), head=nn.Linear(32, 4),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 4), steps=4)


@SCALE(*SHRINKS, culprits=("backbone.4",), victims=("backbone.0",))
def one_convolution_too_small():
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
    )  # fmt: skip
    net = Net(lambda self, x: self.head(self.backbone(x).mean((2, 3))), backbone=backbone, head=nn.Linear(8, 5))
    he(net)
    with torch.no_grad():
        net.backbone[4].weight.mul_(1e-6)
    return Built(net, (torch.randn(4, 3, 8, 8),), xent(4, 5))


@SCALE(*GROWS, culprits=("mul",), victims=("embed", "blocks"))
def logits_over_a_tiny_temperature():
    """A language model whose hidden state is multiplied where it should have been divided by a temperature."""

    class Hot(Gpt):
        def forward(self, ids):
            x = self.embed(ids) + self.position
            for block in self.blocks:
                x = block(x)
            x = x * 5e4
            return self.head(x / 5.0)

    ids, loss = tokens()
    model = Hot(2)
    model.norm = nn.Identity()
    return Built(model, (ids,), loss)


@SCALE(*SHRINKS, culprits=("mul",), victims=("patch",))
def pixels_scaled_twice():
    """The patch embedding is scaled by 1/255 squared inside of the model, with no norm behind it."""

    class Dim(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 32, 4, stride=4)
            self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, images):
            x = self.patch(images) * (1 / 255**2)
            x = x.flatten(2).transpose(1, 2)
            return self.head(torch.tanh(self.mix(x.mean(1))))

    return Built(Dim(), (torch.randn(4, 3, 8, 8),), xent(4))


@SCALE(*GROWS, culprits=("matmul", "bmm", "einsum"), victims=("q", "k"))
def graph_weights_in_thousands():
    """Adjacency holds travel times in milliseconds instead of normalised weights."""

    class Roads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 12), nn.Linear(12, 12)
            self.readout = nn.Linear(12, 2)
            self.register_buffer("times", torch.rand(20, 20) * 5e5)

        def forward(self, h):
            h = torch.tanh(self.k(torch.tanh(self.q(h))))
            return self.readout(self.times.matmul(h))

    return Built(Roads(), (torch.randn(20, 6),), lambda out: out.mean())


@SCALE("loss_seed", "exploding", outside=True, info_ok=True, victims=("0.", "2."))
def loss_times_five_e_ten():
    target = torch.randn(16, 1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return Built(model, (torch.randn(16, 8),), lambda out: F.mse_loss(out, target) * 5e10, steps=1)


@SCALE("loss_seed", "exploding", outside=True, info_ok=True, victims=("0.", "2."))
def targets_in_millions():
    base = mse(16, 1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return Built(model, (torch.randn(16, 8),), lambda out: base(out - 3e6), steps=1)


@SCALE("starved", "scale_break", info_ok=True, culprits=("mul", "add"), victims=("side",))
def branch_times_a_ten_thousandth():
    net = Net(
        lambda self, x: self.head(_branches(self, torch.tanh(self.stem(x)))),
        stem=nn.Linear(8, 16), side=nn.Linear(16, 16), main=nn.Linear(16, 16), head=nn.Linear(16, 4),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 4))


def _branches(net, s):
    return torch.tanh(net.main(s)) + 1e-5 * torch.tanh(net.side(s))


@SCALE(*GROWS, culprits=("layers.2", "param", "linear", "matmul"), victims=("layers.0",))
def functional_weight_in_the_wrong_unit():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList(nn.Parameter(torch.randn(24, 24) / 24**0.5) for _ in range(5))
            with torch.no_grad():
                self.layers[2].mul_(3e4)
            self.out = nn.Parameter(torch.randn(24, 1) / 24**0.5)

        def forward(self, x):
            for weight in self.layers:
                x = F.leaky_relu(x @ weight, 0.2)
            return x @ self.out

    return Built(Raw(), (torch.randn(16, 24),), lambda out: out.mean())


@SCALE(*GROWS, culprits=("norm", "batch_norm"), victims=("conv",))
def batch_norm_with_a_collapsed_running_variance():
    net = Net(
        lambda self, x: self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8, eps=1e-12), head=nn.Linear(8, 3),
    ).eval()  # fmt: skip
    net.norm.running_var.fill_(1e-9)
    return Built(net, (torch.randn(4, 3, 8, 8),), lambda out: out.mean())


@SCALE(*SHRINKS, culprits=("div",), victims=("embed",))
def mean_over_the_wrong_count():
    """A sum over ten tokens is divided by the size of the vocabulary squared."""
    net = Net(
        lambda self, i: self.head(torch.tanh(self.mix(self.embed(i).sum(1).div(50_000.0)))),
        embed=nn.Embedding(200, 16), mix=nn.Linear(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randint(0, 200, (16, 10)),), xent(16, 3))


@SCALE(*GROWS, culprits=("div", "reciprocal"), victims=("wave",))
def physical_units_in_the_middle():
    """A length in metres is divided by a wave length of 500 nm."""
    net = Net(
        lambda self, x: self.head(torch.tanh(self.wave(x)) / 5e-7),
        wave=nn.Linear(6, 12), head=nn.Linear(12, 2),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 6),), lambda out: out.mean())
