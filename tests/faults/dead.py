"""Units that never fire, for a reason in their bias or their weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Graph, Net, he, mlp, mse, xent
from tests.faults.program import HISTORY, Built, Register

DEAD = Register("dead")
DIED = ("dead", "zero")


@DEAD(*DIED, culprits=("3",), not_culprits=("1", "5"), victims=("0.", "2."))
def mlp_bias_far_below():
    model = he(mlp(4, nn.ReLU))
    nn.init.constant_(model[2].bias, -30.0)
    return Built(model, (torch.randn(64, 32),), xent(64))


@DEAD("dead", culprits=("3",), not_culprits=("1", "5"), victims=("2.",))
def mlp_most_units_dead():
    model = he(mlp(4, nn.ReLU))
    with torch.no_grad():
        model[2].bias[: int(0.7 * 64)] = -30.0
    return Built(model, (torch.randn(128, 32),), xent(128))


@DEAD(*DIED, culprits=("relu",), victims=("into",))
def positive_inputs_negative_weights():
    net = Net(lambda self, x: self.out(F.relu(self.into(x))), into=nn.Linear(16, 32), out=nn.Linear(32, 4))
    with torch.no_grad():
        net.into.weight.copy_(-net.into.weight.abs() - 0.05)
        net.into.bias.fill_(-0.1)
    return Built(net, (torch.rand(64, 16) + 0.1,), xent(64, 4))


@DEAD("dead", culprits=("relu",), victims=("conv",))
def channels_of_a_convolution():
    net = Net(
        lambda self, x: self.head(F.relu(self.conv(x)).mean(dim=2)), conv=nn.Conv1d(2, 8, 3), head=nn.Linear(8, 1)
    )
    with torch.no_grad():
        net.conv.bias[[0, 1, 3, 4, 6]] = -30.0
    return Built(net, (torch.randn(32, 2, 40),), mse(32, 1))


@DEAD(*DIED, culprits=("act#1", "act_1"), victims=("fc1", "fc2"))
def second_call_of_a_shared_relu():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.act, self.head = nn.ReLU(), nn.Linear(16, 2)
            nn.init.constant_(self.fc2.bias, -40.0)

        def forward(self, x):
            return self.head(self.act(self.fc3(self.act(self.fc2(self.act(self.fc1(x)))))))

    return Built(Shared(), (torch.randn(64, 5),), mse(64, 2))


@DEAD(*DIED, culprits=("blocks.1.relu", "blocks.1.act", "blocks.1/"), victims=("stem", "blocks.0", "blocks.1"))
def block_of_a_plain_cnn():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()

        def forward(self, x):
            return self.relu(self.norm(self.conv(x)))

    class Cnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 3, padding=1)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(6, 4)
            nn.init.constant_(self.blocks[1].norm.bias, -25.0)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))

    return Built(Cnn(), (torch.randn(8, 3, 8, 8),), xent(8, 4))


@DEAD(*DIED, culprits=("clamp",), victims=("fc1", "fc2"))
def clamp_as_relu():
    net = Net(
        lambda self, x: self.head(torch.clamp(self.fc2(torch.tanh(self.fc1(x))), min=0)),
        fc1=nn.Linear(8, 16), fc2=nn.Linear(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    nn.init.constant_(net.fc2.bias, -20.0)
    return Built(net, (torch.randn(64, 8),), xent(64, 3))


@DEAD(*DIED, culprits=("relu",), victims=("own", "message"))
def graph_net_after_a_bad_update():
    model = Graph(depth=1)
    nn.init.constant_(model.own[0].bias, -60.0)
    return Built(model, (torch.randn(12, 16),), xent(12, 4))


@DEAD(*DIED, culprits=("relu6", "hardtanh", "act"), victims=("expand",))
def inverted_bottleneck_below_relu6():
    net = Net(
        lambda self, x: self.head(self.project(self.act(self.expand(x))).mean((2, 3))),
        expand=nn.Conv2d(4, 16, 1), act=nn.ReLU6(), project=nn.Conv2d(16, 4, 1), head=nn.Linear(4, 3),
    )  # fmt: skip
    nn.init.constant_(net.expand.bias, -30.0)
    return Built(net, (torch.randn(8, 4, 6, 6),), xent(8, 3))


@DEAD("dead", culprits=("relu",), victims=("feed.0",))
def feed_forward_of_a_transformer():
    """A residual keeps the model alive while the feed-forward part is dead in nine of ten units."""

    class Relu(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(6, 16)
            self.norm = nn.LayerNorm(16)
            self.feed = nn.Sequential(nn.Linear(16, 40), nn.Identity(), nn.Linear(40, 16))
            self.head = nn.Linear(16, 3)
            with torch.no_grad():
                self.feed[0].bias[:36] = -40.0

        def forward(self, x):
            x = self.embed(x)
            y = torch.relu(self.feed[0](self.norm(x)))
            return self.head((x + self.feed[2](y)).mean(1))

    return Built(Relu(), (torch.randn(8, 20, 6),), xent(8, 3))


@DEAD(*DIED, culprits=("relu",), victims=("rec", "into"))
def recurrent_net_of_relus():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.rec, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            nn.init.constant_(self.rec.bias, -50.0)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 16)
            for t in range(5):
                h = torch.relu(self.into(x[:, t]) + self.rec(h))
            return self.head(h)

    return Built(Rnn(), (torch.randn(64, 5, 6),), xent(64, 3))


@DEAD(*DIED, "update_size", culprits=("net.3", "relu", "net.2"), victims=("net.0", "net.2"), forms=HISTORY)
def killed_by_one_step():
    """Healthy at first; the third batch has targets far below the others, and its step kills the second layer."""
    net = Net(lambda self, x: self.net(x), net=he(mlp(2, nn.ReLU, into=8, width=24, out=1)))
    with torch.no_grad():
        net.net[4].weight.abs_().add_(0.3)
    x, y = torch.randn(128, 8), torch.randn(128, 1)

    def batch(step):
        return (x,), lambda out: F.mse_loss(out, y - 1000.0 * (step == 2))

    def optimizer(model):
        groups = [{"params": model.net[:4].parameters()}, {"params": model.net[4].parameters(), "lr": 1e-6}]
        return torch.optim.SGD(groups, 0.02)

    args, loss = batch(0)
    return Built(net, args, loss, optimizer, 12, batch)


@DEAD("dead", "zero", "saturated", "vanishing", culprits=("gelu",), victims=("fc1", "fc2"))
def gelu_far_below_zero():
    net = Net(
        lambda self, x: self.head(F.gelu(self.fc2(torch.tanh(self.fc1(x))))),
        fc1=nn.Linear(8, 16), fc2=nn.Linear(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    nn.init.constant_(net.fc2.bias, -40.0)
    return Built(net, (torch.randn(64, 8),), xent(64, 3))


@DEAD("dead", "zero", "saturated", culprits=("hardsigmoid", "gate"), victims=("squeeze", "excite", "conv"))
def hard_gates_all_shut():
    net = Net(
        lambda self, x: self.head(_gated(self, self.conv(x)).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3), squeeze=nn.Linear(8, 4), excite=nn.Linear(4, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    nn.init.constant_(net.excite.bias, -12.0)
    return Built(net, (torch.randn(16, 3, 8, 8),), xent(16, 3))


def _gated(net, h):
    gate = F.hardsigmoid(net.excite(F.silu(net.squeeze(h.mean((2, 3))))))
    return h * gate[:, :, None, None]


@DEAD(*DIED, culprits=("relu",), victims=("lower",))
def relu_of_minus_a_relu():
    net = Net(
        lambda self, x: self.head(torch.relu(-torch.relu(self.lower(x)))), lower=nn.Linear(8, 16), head=nn.Linear(16, 3)
    )
    return Built(net, (torch.randn(64, 8),), xent(64, 3))


@DEAD("dead", culprits=("layers.1", "relu"), not_culprits=("layers.0", "layers.2"), victims=("layers.1",))
def wide_layer_mostly_below_its_threshold():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(24, 4)
            with torch.no_grad():
                self.layers[1][0].bias[4:] = -15.0

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return Built(Wide(), (torch.randn(128, 24),), xent(128, 4))
