"""The gradient loses many decades on its way: no single operation, or one, is to blame."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Attention, Net, he, mlp, mse, normal, tokens, xavier, xent
from tests.faults.program import Built, Register

VANISHING = Register("vanishing")


@VANISHING("vanishing", culprits=("1", "3", "5", "7", "9", "11", "13", "15", "17", "19", "21", "23"), victims=("0.",))
def mlp_sigmoid():
    return Built(xavier(mlp(12, nn.Sigmoid)), (torch.randn(32, 32),), xent())


@VANISHING("vanishing", culprits=tuple(str(2 * i) for i in range(1, 21)), victims=("0.",))
def mlp_tanh_small_gain():
    return Built(xavier(mlp(20, nn.Tanh), 0.4), (torch.randn(32, 32),), xent())


@VANISHING("vanishing", culprits=tuple(str(2 * i) for i in range(1, 31)), victims=("0.",))
def mlp_relu_torch_default():
    return Built(mlp(30, nn.ReLU), (torch.randn(32, 32),), xent())


@VANISHING("vanishing", culprits=("2", "4", "6", "8", "10", "12", "14", "16"), victims=("0.",))
def mlp_tiny_normal_init():
    return Built(normal(mlp(8, nn.ReLU, width=128), 0.01), (torch.randn(32, 32),), xent())


class Recurrent(nn.Module):
    """An Elman network, unrolled; answers from its last state."""

    def __init__(self, radius: float, act=torch.tanh, width: int = 24) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        self.rec = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 4)
        self.act = act
        nn.init.orthogonal_(self.rec.weight, gain=radius)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.rec.in_features, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.act(self.into(x[:, t]) + self.rec(h))
        return self.head(h)


class Remembering(Recurrent):
    """The same, but the first input comes from a trainable front end and the rest are zeros: only it can be learnt."""

    def __init__(self, radius: float, **options) -> None:
        super().__init__(radius, **options)
        self.front = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.into(self.front(x)))
        for _ in range(40):
            h = self.act(self.rec(h))
        return self.head(h)


@VANISHING("vanishing", culprits=("rec", "tanh"), victims=("front",))
def rnn_forgets():
    return Built(Remembering(0.5), (torch.randn(8, 8),), xent(8, 4))


@VANISHING("vanishing", culprits=("rec", "sigmoid"), victims=("front",))
def rnn_of_sigmoids():
    return Built(Remembering(0.9, act=torch.sigmoid), (torch.randn(8, 8),), xent(8, 4))


class LstmCells(nn.Module):
    """An LSTM written out whose forget gate stays shut."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.front = nn.Linear(6, width)
        self.gates = nn.Linear(2 * width, 4 * width)
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            self.gates.weight.mul_(0.3)
            self.gates.bias[width : 2 * width] = -4.0

    def forward(self, x):
        h = c = torch.tanh(self.front(x))
        quiet = torch.zeros_like(h)
        for _ in range(12):
            i, f, g, o = self.gates(torch.cat([quiet, h], dim=1)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


@VANISHING("vanishing", culprits=("gates", "sigmoid", "tanh", "mul", "add", "chunk", "cat"), victims=("front",))
def lstm_with_shut_forget_gate():
    return Built(LstmCells(), (torch.randn(8, 6),), xent(8, 3))


@VANISHING(
    "vanishing", culprits=("attn", "mlp", "blocks", "softmax", "matmul", "linear"), victims=("embed", "position")
)
def transformer_without_residuals():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.position = nn.Parameter(0.02 * torch.randn(12, 32))
            self.blocks = nn.ModuleList(nn.Sequential(Attention(32), nn.Linear(32, 32)) for _ in range(8))
            self.head = nn.Linear(32, 50)

        def forward(self, ids):
            x = self.embed(ids) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    ids, loss = tokens()
    return Built(Stack(), (ids,), loss)


@VANISHING("vanishing", culprits=("conv", "stages", "hardtanh", "relu", "leaky_relu"), victims=("stages.0",))
def cnn_without_norm_small_weights():
    class Cnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(14))
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            for conv in self.stages:
                x = F.leaky_relu(conv(x), 0.1)
            return self.head(x.mean(dim=(2, 3)))

    return Built(normal(Cnn(), 0.02), (torch.randn(4, 3, 8, 8),), xent(4, 5))


@VANISHING("vanishing", culprits=("layers", "softsign", "linear"), victims=("layers.0",))
def functional_softsign_chain():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList(nn.Parameter(torch.randn(20, 20) * 0.08) for _ in range(16))
            self.head = nn.Parameter(torch.randn(4, 20) * 0.2)

        def forward(self, x):
            for weight in self.layers:
                x = F.softsign(F.linear(x, weight))
            return F.linear(x, self.head)

    return Built(Chain(), (torch.randn(16, 20),), xent(16, 4))


@VANISHING("vanishing", culprits=("message", "own", "matmul", "sigmoid", "add"), victims=("embed",))
def graph_net_of_sigmoids():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(5, 16)
            self.message = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))
            self.readout = nn.Linear(16, 3)
            links = (torch.rand(12, 12) < 0.4).float() + torch.eye(12)
            self.register_buffer("adjacency", links / links.sum(1, keepdim=True))

        def forward(self, h):
            h = self.embed(h)
            for layer in self.message:
                h = torch.sigmoid(self.adjacency @ layer(h))
            return self.readout(h)

    return Built(Deep(), (torch.randn(12, 5),), xent(12, 3))


@VANISHING("vanishing", culprits=("block", "gate", "mul", "sigmoid"), victims=("stem",))
def highway_that_is_closed():
    """Gates multiply every block's output and let neither the old nor the new value through."""

    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(10, 24)
            self.block = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
            self.gate = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
            self.head = nn.Linear(24, 4)
            for gate in self.gate:
                nn.init.constant_(gate.bias, -3.0)

        def forward(self, x):
            x = self.stem(x)
            for block, gate in zip(self.block, self.gate, strict=True):
                x = torch.tanh(block(x)) * torch.sigmoid(gate(x))
            return self.head(x)

    return Built(Closed(), (torch.randn(16, 10),), xent(16, 4))


@VANISHING("vanishing", culprits=("shared", "gelu", "linear"), victims=("stem",))
def one_shared_block_twenty_times():
    net = Net(
        lambda self, x: self.head(_repeated(self.shared, self.stem(x), 20)),
        stem=nn.Linear(10, 24), shared=nn.Linear(24, 24), head=nn.Linear(24, 4),
    )  # fmt: skip
    nn.init.orthogonal_(net.shared.weight)
    return Built(net, (torch.randn(16, 10),), xent(16, 4))


def _repeated(layer, x, times):
    for _ in range(times):
        x = F.gelu(layer(x))
    return x


@VANISHING("vanishing", culprits=("encoder", "decoder", "mid", "softplus"), victims=("encoder.0",))
def autoencoder_of_softplus_and_small_weights():
    sizes = [16, 12, 10, 8, 6, 8, 10, 12, 14]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Softplus())]
    net = Net(lambda self, x: self.decoder(self.encoder(x)), encoder=nn.Sequential(*layers), decoder=nn.Linear(14, 16))
    return Built(normal(net, 0.12), (torch.randn(16, 16),), mse(16, 16))


@VANISHING("vanishing", culprits=tuple(str(2 * i) for i in range(1, 17)), victims=("0.",))
def mlp_elu_half_he():
    return Built(he(mlp(16, nn.ELU), 0.35), (torch.randn(32, 32),), xent())


@VANISHING("vanishing", culprits=("mul", "add", "blocks"), victims=("stem",))
def residual_halved_in_each_block():
    """``(x + f(x)) / 2``, 30 blocks deep: a mean where a sum was meant."""

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(12, 24)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(30))
            self.head = nn.Linear(24, 3)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = (x + block(x)) * 0.5
            return self.head(x)

    return Built(normal(Halved(), 0.05), (torch.randn(16, 12),), xent(16, 3))


@VANISHING("vanishing", culprits=("mul", "sub", "add"), victims=("start",))
def stiff_decay_integrated():
    """An explicit Euler scheme over a fast decay forgets its learned start."""

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.drive, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2)

        def forward(self, x):
            state = self.start(x)
            for _ in range(18):
                state = state - 0.6 * (state - 0.1 * torch.tanh(self.drive(state)))
            return self.head(state)

    return Built(Decay(), (torch.randn(16, 6),), mse(16, 2))


@VANISHING("vanishing", culprits=("attend", "matmul", "mean", "mul", "bmm"), victims=("embed",))
def pooled_pyramid_of_means():
    """Each level averages over all positions and shrinks what it hands on: a chain of means with small weights."""

    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, 16)
            self.attend = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(7))
            self.head = nn.Linear(16, 3)
            for layer in self.attend:
                nn.init.normal_(layer.weight, std=0.04)

        def forward(self, x):
            x = torch.relu(self.embed(x))
            for layer in self.attend:
                x = F.gelu(layer(x.mean(dim=1, keepdim=True).expand_as(x)))
            return self.head(x.mean(1))

    return Built(Pyramid(), (torch.randn(8, 10, 8),), xent(8, 3))
