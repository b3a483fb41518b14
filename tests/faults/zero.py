"""A gradient that arrived is passed on as exact zeros."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Net, mlp, mse, xent
from tests.faults.program import HISTORY, Built, Register

ZERO = Register("zero")


def pair(act, width=16):
    """``head(act(first(x)))`` with a function in between."""
    return Net(
        lambda self, x: self.head(act(torch.tanh(self.first(x)))), first=nn.Linear(8, width), head=nn.Linear(width, 3)
    )


@ZERO("zero", culprits=("round",), victims=("first",))
def rounded():
    return Built(pair(lambda h: torch.round(h * 4) / 4), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("sign",), victims=("first",))
def signs():
    return Built(pair(torch.sign), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("floor",), victims=("first",))
def floored():
    return Built(pair(lambda h: (h * 8).floor() / 8), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("sign",), victims=("body.0", "body.2"))
def spikes_without_surrogate():
    class Spiking(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            membrane = F.relu(self.body(x) - 0.2)
            return self.head(torch.sign(membrane))

    return Built(Spiking(), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("layers",), victims=("layers.0",))
def all_weights_zero():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 3)
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.head(x)

    return Built(Zeros(), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("mul",), victims=("branch",))
def branch_under_a_zero_mask():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.main(x)) + self.mask * torch.tanh(self.branch(x))),
        main=nn.Linear(8, 16), branch=nn.Linear(8, 16), head=nn.Linear(16, 3), mask=torch.zeros(16),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("mul",), victims=("content",))
def gate_times_constant_zero():
    """A gated convolution whose second half is multiplied by a forgotten weight of 0.0."""
    net = Net(
        lambda self, x: self.head((torch.sigmoid(self.gate(x)) + 0.0 * self.content(x)).mean(-1)),
        gate=nn.Conv1d(2, 8, 3), content=nn.Conv1d(2, 8, 3), head=nn.Linear(8, 2),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 2, 12),), mse(16, 2))


@ZERO("zero", "saturated", "dead", culprits=("clamp",), victims=("first",))
def clamp_out_of_range():
    return Built(pair(lambda h: torch.clamp(h + 20, -1, 1)), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", "saturated", "dead", culprits=("hardtanh", "squash"), victims=("net.0",))
def hardtanh_out_of_range():
    net = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(), nn.Linear(16, 16))
    model = Net(
        lambda self, x: self.head(self.squash(self.net(x) * 5 + 30)),
        net=net, squash=nn.Hardtanh(), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(model, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("softmax",), victims=("score",))
def softmax_over_one_class():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.value(x)) * torch.softmax(self.score(x), dim=-1)),
        value=nn.Linear(8, 16), score=nn.Linear(8, 1), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("round", "quantize"), victims=("encoder",))
def quantised_codes():
    """A code book by rounding, without a straight-through estimator."""

    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 4, 3, padding=1))
            self.decoder = nn.Conv1d(4, 1, 3, padding=1)

        def quantize(self, code):
            return torch.round(torch.sigmoid(code) * 15) / 15

        def forward(self, x):
            return self.decoder(self.quantize(self.encoder(x)))

    x = torch.randn(8, 1, 20)
    return Built(Codec(), (x,), lambda out: F.mse_loss(out, x))


@ZERO("zero", "loss_seed", "nonfinite", outside=True, victims=("0.", "2.", "4."))
def every_label_ignored():
    target = torch.full((16,), -100)
    return Built(mlp(2, nn.ReLU), (torch.randn(16, 32),), lambda out: F.cross_entropy(out, target) * 1.0, steps=5)


@ZERO("zero", culprits=("trunc", "frac", "sub", "fmod", "remainder"), victims=("first",))
def truncated_phase():
    return Built(pair(lambda h: torch.trunc(h * 3) / 3), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("mul", "sub"), victims=("keys", "queries"))
def attention_scores_cancelled():
    """Scores minus themselves: the map is uniform whatever the keys are."""

    class Cancelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            scores = self.queries(x) @ self.keys(x).transpose(1, 2)
            weights = torch.softmax(scores * 0, dim=-1)
            return self.head((weights @ self.values(x)).mean(1))

    return Built(Cancelled(), (torch.randn(8, 6, 8),), xent(8, 3))


@ZERO("zero", culprits=("dropout", "drop"), victims=("first",))
def dropout_of_everything():
    net = Net(
        lambda self, x: self.head(self.drop(torch.tanh(self.first(x)))),
        first=nn.Linear(8, 16), drop=nn.Dropout(1.0), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("where",), victims=("rare",), forms=HISTORY, info_ok=True)
def branch_that_is_never_chosen():
    net = Net(
        lambda self, x: self.head(torch.where(self.usual(x) > 1e3, self.rare(x), torch.tanh(self.usual(x)))),
        usual=nn.Linear(8, 16), rare=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("mul", "last", "scale"), victims=("first", "last", "scale"))
def zero_times_zero_initialisation():
    """Both factors of the branch start at zero: neither ever moves."""
    net = Net(
        lambda self, x: self.head(self.stem(x) + self.scale * self.last(F.gelu(self.first(self.stem(x))))),
        stem=nn.Linear(8, 16), first=nn.Linear(16, 16), last=nn.Linear(16, 16), head=nn.Linear(16, 3),
        scale=nn.Parameter(torch.zeros(())),
    )  # fmt: skip
    nn.init.zeros_(net.last.weight)
    nn.init.zeros_(net.last.bias)
    return Built(net, (torch.randn(32, 8),), xent(32, 3), steps=8)


@ZERO("zero", culprits=("maximum", "max"), victims=("first",))
def maximum_with_a_large_constant():
    return Built(pair(lambda h: torch.maximum(h, torch.full_like(h, 5.0))), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", culprits=("norm", "layer_norm"), victims=("score",))
def layer_norm_over_one_number():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) + self.norm(self.score(x))),
        body=nn.Linear(8, 16), score=nn.Linear(8, 1), norm=nn.LayerNorm(1), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", "dead", "saturated", culprits=("hardshrink", "softshrink"), victims=("first",))
def shrinkage_beyond_every_value():
    return Built(pair(lambda h: F.softshrink(h, 30.0)), (torch.randn(32, 8),), xent(32, 3))


@ZERO("zero", "loss_seed", outside=True, victims=("0.", "2.", "4."))
def cross_entropy_over_one_class():
    target = torch.zeros(16, dtype=torch.long)
    return Built(mlp(2, nn.Tanh, out=1), (torch.randn(16, 32),), lambda out: F.cross_entropy(out, target))


@ZERO("zero", "detached", culprits=("bernoulli",), victims=("first",))
def sampled_without_an_estimator():
    return Built(pair(lambda h: torch.bernoulli(torch.sigmoid(h))), (torch.randn(32, 8),), xent(32, 3))


class _Blind(torch.autograd.Function):
    """A step function whose author forgot its derivative."""

    @staticmethod
    def forward(ctx, h):
        return (h > 0).to(h.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


@ZERO("zero", culprits=("_Blind", "Blind", "external", "apply"), victims=("first",))
def own_function_without_derivative():
    return Built(pair(_Blind.apply), (torch.randn(32, 8),), xent(32, 3))
