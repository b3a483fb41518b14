"""An activation works at its flat end and passes next to nothing back."""

from __future__ import annotations

import torch
from torch import nn

from tests.faults.nets import Gpt, Net, mlp, mse, tokens, xent
from tests.faults.program import Built, Register

SATURATED = Register("saturated")


@SATURATED("saturated", "vanishing", culprits=("1", "3", "5"), victims=("0.",))
def mlp_tanh_huge_weights():
    model = mlp(3, nn.Tanh)
    for layer in (model[0], model[2], model[4]):
        nn.init.normal_(layer.weight, std=30 / layer.in_features**0.5)
    return Built(model, (torch.randn(32, 32),), xent())


@SATURATED("saturated", "vanishing", culprits=("sigmoid",), victims=("body",))
def inputs_not_normalised():
    net = Net(lambda self, x: self.head(torch.sigmoid(self.body(x))), body=nn.Linear(12, 24), head=nn.Linear(24, 3))
    return Built(net, (torch.randn(32, 12) * 300 + 500,), xent(32, 3))


@SATURATED("saturated", "double_activation", culprits=("softmax",), victims=("body",))
def softmax_in_front_of_cross_entropy():
    net = Net(
        lambda self, x: torch.softmax(50 * self.head(torch.tanh(self.body(x))), dim=-1),
        body=nn.Linear(16, 64), head=nn.Linear(64, 10),
    )  # fmt: skip
    nn.init.normal_(net.head.weight, std=0.5)
    return Built(net, (torch.randn(32, 16),), xent(32))


@SATURATED("saturated", "starved", "vanishing", culprits=("softmax",), victims=("blocks.0.attn.q", "blocks.0.attn.k"))
def attention_without_its_scale():
    """Scores are multiplied by the width where they should be divided by its root."""
    model = Gpt(2, scale=200.0)
    for block in model.blocks:
        nn.init.normal_(block.attn.q.weight, std=0.3)
        nn.init.normal_(block.attn.k.weight, std=0.3)
    ids, loss = tokens()
    return Built(model, (ids,), loss)


@SATURATED("saturated", "vanishing", culprits=("tanh",), victims=("into", "rec"))
def recurrent_net_with_a_strong_drive():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.rec, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            nn.init.normal_(self.into.weight, std=40.0)
            nn.init.normal_(self.rec.weight, std=5.0)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 16)
            for t in range(4):
                h = torch.tanh(self.into(x[:, t]) + self.rec(h))
            return self.head(h)

    return Built(Rnn(), (torch.randn(32, 4, 6),), xent(32, 3))


@SATURATED("saturated", "vanishing", "starved", culprits=("sigmoid",), victims=("gate",))
def gate_stuck_open():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) * torch.sigmoid(self.gate(x))),
        body=nn.Linear(10, 16), gate=nn.Linear(10, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    nn.init.constant_(net.gate.bias, 14.0)
    return Built(net, (torch.randn(32, 10),), xent(32, 3))


@SATURATED("saturated", "vanishing", culprits=("sigmoid",), victims=("encode",))
def conv_autoencoder_with_large_codes():
    net = Net(
        lambda self, x: self.decode(torch.sigmoid(self.encode(x))),
        encode=nn.Conv2d(1, 8, 3, padding=1), decode=nn.Conv2d(8, 1, 3, padding=1),
    )  # fmt: skip
    nn.init.normal_(net.encode.weight, std=40.0)
    return Built(net, (torch.randn(4, 1, 8, 8),), mse(4, 1, 8, 8))


@SATURATED("saturated", "vanishing", culprits=("tanh", "act"), victims=("layers.0", "layers.1"))
def graph_net_summing_over_many():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.act = nn.Tanh()
            self.readout = nn.Linear(8, 2)
            self.register_buffer("links", torch.ones(80, 80))

        def forward(self, h):
            for layer in self.layers:
                h = self.act(self.links @ layer(h))
            return self.readout(h)

    return Built(Sum(), (torch.randn(80, 8) + 1.5,), xent(80, 2))


@SATURATED("saturated", "vanishing", culprits=("sigmoid",), victims=("trunk",))
def discriminator_too_sure():
    net = Net(
        lambda self, x: torch.sigmoid(self.score(torch.tanh(self.trunk(x)))),
        trunk=nn.Linear(8, 32),
        score=nn.Linear(32, 1),
    )
    with torch.no_grad():
        net.score.weight.copy_(net.score.weight.abs() * 0.1)
        net.score.bias.fill_(16.0)
    return Built(net, (torch.randn(32, 8),), lambda out: (out - 0.0).mean())


@SATURATED("saturated", "zero", "vanishing", culprits=("clamp",), victims=("first",))
def clamp_hit_nearly_always():
    net = Net(lambda self, x: self.head(self.first(x).clamp(-1, 1)), first=nn.Linear(12, 24), head=nn.Linear(24, 3))
    nn.init.normal_(net.first.weight, std=2000.0)
    return Built(net, (torch.randn(64, 12),), xent(64, 3))


@SATURATED("saturated", "starved", "vanishing", culprits=("softmax",), victims=("router",))
def router_that_is_too_sure():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            gates = torch.softmax(self.router(x) * 300, dim=-1)
            out = torch.stack([torch.tanh(e(x)) for e in self.experts], dim=1)
            return self.head((gates[..., None] * out).sum(1))

    return Built(Routed(), (torch.randn(48, 8),), xent(48, 3))


@SATURATED("saturated", "vanishing", culprits=("sigmoid",), victims=("update", "front"))
def update_gate_stuck():
    """A gated unit written out whose update gate keeps the empty first state."""

    class Stuck(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.update, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            nn.init.constant_(self.update.bias, 18.0)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 16)
            for t in range(3):
                new = torch.tanh(self.front(x[:, t]))
                z = torch.sigmoid(self.update(new))
                h = z * h + (1 - z) * new
            return self.head(h + new)

    return Built(Stuck(), (torch.randn(32, 3, 6),), xent(32, 3))


@SATURATED("saturated", "vanishing", culprits=("erf", "softsign", "tanh"), victims=("patch",))
def pixels_of_0_to_255_into_tanh():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.patch(x)).mean((2, 3))),
        patch=nn.Conv2d(3, 12, 4, stride=4), head=nn.Linear(12, 4),
    )  # fmt: skip
    return Built(net, (torch.randint(0, 256, (8, 3, 16, 16)).float(),), xent(8, 4))
