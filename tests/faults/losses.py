"""The loss does something to the outputs that they don't fit: an activation twice, targets out of reach."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Net, Vit, mlp, tokens, xent
from tests.faults.program import Built, Register

TWICE = Register("double_activation")
TARGETS = Register("target_range")


def labels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).float()


@TWICE("double_activation", culprits=("3",))
def mlp_with_a_softmax_layer():
    return Built(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5), nn.Softmax(dim=1)), (torch.randn(32, 8),),
                 xent(32, 5))  # fmt: skip


@TWICE("double_activation", culprits=("softmax",))
def vit_with_softmax_in_its_forward():
    body = Vit(2)
    net = Net(lambda self, x: F.softmax(self.body(x), dim=-1), body=body)
    return Built(net, (torch.randn(8, 3, 8, 8),), xent(8))


@TWICE("double_activation", culprits=("softmax",))
def language_model_over_all_positions():
    net = Net(
        lambda self, ids: self.head(self.block(self.embed(ids))).softmax(-1),
        embed=nn.Embedding(50, 32), block=Block(32, causal=True), head=nn.Linear(32, 50),
    )  # fmt: skip
    ids, loss = tokens()
    return Built(net, (ids,), loss)


@TWICE("double_activation", culprits=("act",))
def loss_inside_of_the_model():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.LSTM(6, 16, batch_first=True)
            self.head, self.act, self.loss = nn.Linear(16, 4), nn.Softmax(dim=-1), nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.act(self.head(self.body(x)[0][:, -1])), y)

    return Built(Whole(), (torch.randn(16, 5, 6), torch.randint(0, 4, (16,))), lambda out: out)


@TWICE("double_activation", outside=True)
def softmax_in_the_loss():
    target = torch.randint(0, 6, (32,))
    return Built(mlp(2, nn.GELU, into=8, out=6), (torch.randn(32, 8),), lambda o: F.cross_entropy(o.softmax(1), target))


@TWICE("double_activation", culprits=("sigmoid", "3"))
def sigmoid_into_bce_with_logits():
    target = labels(32, 1)
    net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1), nn.Sigmoid())
    return Built(net, (torch.randn(32, 10),), lambda o: F.binary_cross_entropy_with_logits(o, target))


@TWICE("double_activation", culprits=("sigmoid",))
def segmentation_with_a_sigmoid_mask():
    target = labels(4, 8, 8)
    net = Net(
        lambda self, x: torch.sigmoid(self.out(F.relu(self.conv(x)))),
        conv=nn.Conv2d(3, 8, 3, padding=1), out=nn.Conv2d(8, 1, 1),
    )  # fmt: skip
    return Built(net, (torch.randn(4, 3, 8, 8),), lambda o: F.binary_cross_entropy_with_logits(o.squeeze(1), target))


@TWICE("double_activation", culprits=("sigmoid",))
def multi_label_with_weights_and_half_a_loss_more():
    target, weight = labels(16, 6), torch.full((6,), 3.0)
    net = Net(lambda self, x: self.head(F.silu(self.body(x))).sigmoid(), body=nn.Linear(8, 16), head=nn.Linear(16, 6))
    return Built(net, (torch.randn(16, 8),), lambda o: F.binary_cross_entropy_with_logits(o, target, pos_weight=weight)
                 + 0.01 * o.square().mean())  # fmt: skip


@TWICE("double_activation", culprits=("sigmoid",))
def sigmoid_into_cross_entropy():
    net = Net(lambda self, x: torch.sigmoid(self.net(x)), net=mlp(2, nn.ReLU, into=8, out=4))
    return Built(net, (torch.randn(32, 8),), xent(32, 4))


def regression(out: nn.Module | None = None, width: int = 1) -> nn.Module:
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, width)]
    return nn.Sequential(*layers, *([out] if out is not None else []))


def distance(target: torch.Tensor):
    return lambda o: F.mse_loss(o, target)


@TARGETS("target_range", "update_size", outside=True)
def prices_in_single_units():
    return Built(regression(), (torch.randn(32, 8),), distance(2e5 + 5e4 * torch.randn(32, 1)))


@TARGETS("target_range", "update_size", outside=True, info_ok=True)
def years():
    return Built(regression(), (torch.randn(32, 8),), distance(2000 + 10 * torch.randn(32, 1)))


@TARGETS("target_range", outside=True)
def pixels_to_255_behind_a_sigmoid():
    net = Net(
        lambda self, x: torch.sigmoid(self.up(F.relu(self.down(x)))),
        down=nn.Conv2d(1, 8, 3, padding=1), up=nn.Conv2d(8, 1, 3, padding=1),
    )  # fmt: skip
    return Built(net, (torch.randn(4, 1, 8, 8),), distance(torch.randint(0, 256, (4, 1, 8, 8)).float()))


@TARGETS("target_range", outside=True)
def wide_targets_behind_a_tanh():
    target = 5.0 * torch.randn(32, 2)
    return Built(regression(nn.Tanh(), 2), (torch.randn(32, 8),), lambda o: ((o - target) ** 2).mean())


@TARGETS("target_range", "update_size", outside=True)
def summed_error_of_a_series():
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1]).squeeze(-1)

    target = 30000 * torch.rand(16)
    return Built(Forecast(), (torch.randn(16, 6, 3),), lambda o: F.mse_loss(o, target, reduction="sum"))


@TARGETS("target_range", outside=True)
def plus_and_minus_behind_a_softmax_of_two():
    target = 4 * F.one_hot(torch.randint(0, 2, (32,)), 2).float() - 2
    return Built(regression(nn.Softmax(-1), 2), (torch.randn(32, 8),), distance(target))


@TARGETS("target_range", outside=True)
def pixels_to_255_into_bce_with_logits():
    net = Net(lambda self, x: self.up(F.relu(self.down(x))), down=nn.Linear(16, 8), up=nn.Linear(8, 16))
    target = torch.randint(0, 256, (32, 16)).float()
    return Built(net, (torch.randn(32, 16),), lambda o: F.binary_cross_entropy_with_logits(o, target))


@TARGETS("target_range", outside=True)
def pixels_summed_over_each_sample():
    target = torch.randint(0, 256, (32, 12)).float()
    model = regression(nn.Sigmoid(), 12)
    return Built(model, (torch.randn(32, 8),), lambda o: ((o - target) ** 2).sum(1).mean())


@TARGETS("target_range", "update_size", outside=True)
def beside_a_penalty():
    target = 1e5 * torch.randn(32, 1)
    return Built(regression(), (torch.randn(32, 8),), lambda o: F.mse_loss(o, target) + 1e-3 * o.abs().mean())


@TARGETS("target_range", "update_size", outside=True)
def divided_for_accumulation():
    target = 1e5 * torch.randn(16, 6, 1)
    net = Net(lambda self, x: self.head(self.block(x)), block=Block(16), head=nn.Linear(16, 1))
    return Built(net, (torch.randn(16, 6, 16),), lambda o: F.mse_loss(o, target) / 4)
