"""What only several steps show: spikes, steps that are too large, an epsilon that swallows the gradient."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Net, he, mlp, mse, tokens, xent
from tests.faults.program import HISTORY, Built, Register

TRAINING = Register("training")
TOO_LARGE = ("update_size", "nonfinite", "dead", "zero", "spike", "exploding")


def sgd(rate):
    return lambda model: torch.optim.SGD(model.parameters(), rate)


def adam(rate, **options):
    return lambda model: torch.optim.Adam(model.parameters(), rate, **options)


def noisy(inputs, loss, odd=None, at=30):
    """Batches that differ a little; that of step ``at`` is ``odd``."""
    drawn = [inputs + 0.3 * torch.randn_like(inputs) for _ in range(64)]

    def batch(step):
        return odd if odd is not None and step == at else ((drawn[step % 64],), loss)

    return batch


@TRAINING("spike", outside=True, forms=HISTORY)
def one_batch_three_hundredfold():
    x = torch.randn(32, 16)
    loss = xent(32, 4)
    model = he(mlp(2, nn.ReLU, into=16, width=32, out=4))
    return Built(model, (x,), loss, sgd(1e-3), 40, noisy(x, loss, ((x * 300,), loss)))


@TRAINING("spike", "loss_seed", outside=True, forms=HISTORY)
def one_batch_with_absurd_targets():
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    model = mlp(2, nn.Tanh, into=8, width=24, out=1)

    def loss(out):
        return F.mse_loss(out, y)

    odd = ((x,), lambda out: F.mse_loss(out, y * 3e3))
    return Built(model, (x,), loss, sgd(1e-5), 40, noisy(x, loss, odd))


@TRAINING("spike", outside=True, forms=HISTORY)
def convolution_meets_a_broken_image():
    x = torch.randn(8, 3, 8, 8)
    loss = xent(8, 4)
    net = Net(
        lambda self, x: self.head(F.relu(self.conv(x)).mean((2, 3))), conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)
    )
    return Built(net, (x,), loss, sgd(1e-4), 36, noisy(x, loss, ((x * 1e3 + 2e3,), loss)))


@TRAINING("spike", "scale_break", "exploding", culprits=("div", "sqrt"), forms=HISTORY)
def division_by_a_spread_that_collapses():
    """Standardised by hand; in one batch all samples are nearly alike."""
    net = Net(
        lambda self, x: self.head(_standard(torch.tanh(self.stem(x)))), stem=nn.Linear(8, 16), head=nn.Linear(16, 3)
    )
    x = torch.randn(32, 8)
    loss = xent(32, 3)
    alike = x[:1] + 1e-5 * torch.randn(32, 8)
    return Built(net, (x,), loss, sgd(1e-3), 40, noisy(x, loss, ((alike,), loss)))


def _standard(h):
    return (h - h.mean(0)) / (h.var(0) + 1e-12).sqrt()


@TRAINING(*TOO_LARGE, outside=True, forms=HISTORY)
def learning_rate_of_eight():
    x = torch.randn(32, 16)
    loss = xent(32, 4)
    return Built(he(mlp(3, nn.ReLU, into=16, width=32, out=4)), (x,), loss, sgd(8.0), 10, noisy(x, loss))


@TRAINING(*TOO_LARGE, "loss_seed", outside=True, forms=HISTORY)
def regression_on_raw_prices():
    x, y = torch.randn(32, 8), torch.randn(32, 1) * 1e6
    return Built(mlp(2, nn.ReLU, into=8, width=24, out=1), (x,), lambda out: F.mse_loss(out, y), sgd(1e-3), 6)


@TRAINING(*TOO_LARGE, outside=True, forms=HISTORY)
def adam_at_a_rate_of_three():
    x = torch.randn(32, 16)
    loss = xent(32, 4)
    return Built(mlp(2, nn.Tanh, into=16, width=32, out=4), (x,), loss, adam(3.0), 8, noisy(x, loss))


@TRAINING(*TOO_LARGE, outside=True, forms=HISTORY)
def recurrent_net_without_clipping():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.rec, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 16)
            for t in range(x.shape[1]):
                h = torch.tanh(self.into(x[:, t]) + self.rec(h))
            return self.head(h)

    y = torch.randn(16, 1) * 100
    return Built(Rnn(), (torch.randn(16, 6, 4),), lambda out: F.mse_loss(out, y), sgd(1.0), 6)


@TRAINING("optimizer_epsilon", "loss_seed", outside=True, forms=HISTORY, info_ok=True)
def adam_and_a_loss_of_billionths():
    x = torch.randn(32, 16)
    base = xent(32, 4)
    model = mlp(2, nn.ReLU, into=16, width=32, out=4)
    return Built(model, (x,), lambda out: base(out) * 1e-9, adam(1e-3), 24)


@TRAINING("optimizer_epsilon", "loss_seed", outside=True, forms=HISTORY, info_ok=True)
def language_model_summed_down_twice():
    """The loss is averaged over tokens and then once more over batch, length and vocabulary."""
    ids, base = tokens()
    net = Net(
        lambda self, i: self.head(F.gelu(self.mix(self.embed(i)))),
        embed=nn.Embedding(50, 16), mix=nn.Linear(16, 16), head=nn.Linear(16, 50),
    )  # fmt: skip
    return Built(net, (ids,), lambda out: base(out) / 2400**2, adam(1e-3, eps=1e-6), 24)


@TRAINING("update_size", "exploding", culprits=tuple(map(str, range(0, 49, 2))), forms=HISTORY)
def exploding_and_never_clipped():
    """The first step is so large that the second forward overflows."""
    model = he(mlp(24, nn.ReLU, into=16, width=32, out=1), 2.0)
    return Built(model, (torch.randn(32, 16),), mse(32, 1), sgd(1e-2), 6)


@TRAINING("weight_decay", "update_size", "nonfinite", "zero", "dead", outside=True, forms=HISTORY)
def weight_decay_of_a_thousand():
    """Decay is multiplied by the learning rate; 100 x 0.1 flips every weight to nine times its size, step by step."""
    x = torch.randn(32, 16)
    model = mlp(2, nn.Tanh, into=16, width=24, out=4)
    return Built(model, (x,), xent(32, 4), lambda m: torch.optim.SGD(m.parameters(), 0.1, weight_decay=100.0), 8)
