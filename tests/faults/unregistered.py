"""Parameters take part and get a gradient, but the model does not know of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Net, mse, tokens, xent
from tests.faults.program import Built, Register

UNREGISTERED = Register("unregistered")


@UNREGISTERED("unregistered", culprits=("blocks",))
def hidden_layers_in_a_list():
    net = Net(
        lambda self, x: self.head(self.run(x)),
        stem=nn.Linear(16, 32), head=nn.Linear(32, 10),
    )  # fmt: skip
    net.blocks = [nn.Linear(32, 32) for _ in range(3)]

    def run(x):
        h = torch.relu(net.stem(x))
        for block in net.blocks:
            h = torch.relu(block(h))
        return h

    net.run = run
    return Built(net, (torch.randn(32, 16),), xent())


@UNREGISTERED("unregistered", culprits=("heads",))
def heads_of_several_tasks_in_a_dict():
    net = Net(
        lambda self, x: torch.cat([head(torch.tanh(self.body(x))) for head in self.heads.values()], dim=1),
        body=nn.Linear(8, 24),
    )  # fmt: skip
    net.heads = {"age": nn.Linear(24, 1), "weight": nn.Linear(24, 1)}
    return Built(net, (torch.randn(16, 8),), mse(16, 2))


@UNREGISTERED("unregistered", culprits=("pairs",))
def stage_of_convolutions_in_a_nested_list():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)] for _ in range(2)]

        def forward(self, x):
            for conv, norm in self.pairs:
                x = x + F.relu(norm(conv(x)))
            return x

    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Stage(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return Built(net, (torch.randn(8, 3, 8, 8),), xent(8, 4))


@UNREGISTERED("unregistered", culprits=("mul",))
def scale_made_in_forward():
    net = Net(
        lambda self, x: self.head(F.gelu(self.body(x)) * nn.Parameter(torch.full((24,), 0.5))),
        body=nn.Linear(8, 24), head=nn.Linear(24, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@UNREGISTERED("unregistered", culprits=("linear",))
def layer_made_in_forward():
    net = Net(
        lambda self, x: self.head(torch.relu(nn.Linear(24, 24)(torch.relu(self.body(x))))),
        body=nn.Linear(8, 24), head=nn.Linear(24, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@UNREGISTERED("unregistered", culprits=("layers",))
def recurrent_layers_in_a_list():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 12)
            self.layers = [nn.LSTM(12, 12, batch_first=True) for _ in range(2)]
            self.head = nn.Linear(12, 5)

        def forward(self, ids):
            h = self.embed(ids)
            for layer in self.layers:
                h = layer(h)[0]
            return self.head(h).flatten(0, 1)

    return Built(Tagger(), (torch.randint(30, (4, 7)),), xent(28, 5))


@UNREGISTERED("unregistered", culprits=("experts",))
def experts_in_a_tuple():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = tuple(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
            return x + (weights.unsqueeze(-1) * outputs).sum(-2)

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Experts(), nn.Linear(16, 4))
    return Built(net, (torch.randn(32, 8),), xent(32, 4))


@UNREGISTERED("unregistered", culprits=("leaf", "add"))
def positions_as_a_plain_tensor():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(50, 32), Block(32, causal=True), nn.Linear(32, 50)
            self.position = (0.02 * torch.randn(12, 32)).requires_grad_()

        def forward(self, ids):
            return self.head(self.block(self.embed(ids) + self.position))

    ids, loss = tokens()
    return Built(Model(), (ids,), loss)


@UNREGISTERED("unregistered", culprits=("rest",))
def transformer_block_in_a_list_of_a_submodule():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Block(16)
            self.rest = [Block(16) for _ in range(2)]

        def forward(self, x):
            x = self.first(x)
            for block in self.rest:
                x = block(x)
            return x

    net = Net(lambda self, x: self.head(self.encoder(x).mean(1)), encoder=Encoder(), head=nn.Linear(16, 3))
    return Built(net, (torch.randn(8, 6, 16),), xent(8, 3))


@UNREGISTERED("unregistered", culprits=("linear",))
def global_layer():
    shared = nn.Linear(24, 24)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), _Calls(shared), nn.Linear(24, 3))
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


class _Calls(nn.Module):
    """Calls a layer that it knows only by a function, as of a global."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.call = lambda x: F.silu(layer(x))

    def forward(self, x):
        return self.call(x)
