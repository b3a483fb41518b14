"""Healthy programs: losses that apply something to activations, and large targets, as they should be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.cancelled import healthy_cousins
from tests.faults.healthy import HEALTHY
from tests.faults.nets import Block, Net, mlp, mse, tokens, xent
from tests.faults.program import Built


def classifier(classes: int = 5, act: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, classes), *([act] if act is not None else []))


@HEALTHY()
def log_softmax_and_nll():
    target = torch.randint(0, 5, (32,))
    return Built(classifier(5, nn.LogSoftmax(dim=1)), (torch.randn(32, 8),), lambda o: F.nll_loss(o, target))


@HEALTHY()
def log_softmax_into_cross_entropy():
    """Once more changes nothing."""
    return Built(classifier(5, nn.LogSoftmax(dim=1)), (torch.randn(32, 8),), xent(32, 5))


@HEALTHY()
def softmax_log_and_nll():
    target = torch.randint(0, 5, (32,))
    return Built(
        classifier(5, nn.Softmax(dim=1)), (torch.randn(32, 8),), lambda o: F.nll_loss(torch.log(o + 1e-9), target)
    )


@HEALTHY()
def softmax_and_squared_error():
    target = F.one_hot(torch.randint(0, 5, (32,)), 5).float()
    return Built(classifier(5, nn.Softmax(dim=1)), (torch.randn(32, 8),), lambda o: F.mse_loss(o, target))


@HEALTHY()
def sigmoid_and_plain_bce():
    target = torch.randint(0, 2, (32, 1)).float()
    return Built(classifier(1, nn.Sigmoid()), (torch.randn(32, 8),), lambda o: F.binary_cross_entropy(o, target))


@HEALTHY()
def focal_loss():
    target = torch.randint(0, 2, (32, 4)).float()

    def loss(out):
        p = torch.sigmoid(out)
        hardness = (p * (1 - target) + (1 - p) * target) ** 2
        return (hardness * F.binary_cross_entropy_with_logits(out, target, reduction="none")).mean()

    return Built(classifier(4), (torch.randn(32, 8),), loss)


@HEALTHY()
def soft_labels_of_a_teacher():
    teacher = torch.randn(32, 5)
    return Built(classifier(5), (torch.randn(32, 8),), lambda o: F.cross_entropy(o, torch.softmax(teacher / 2, 1)))


@HEALTHY()
def distillation_by_kl():
    teacher = torch.randn(32, 5)
    return Built(classifier(5), (torch.randn(32, 8),), lambda o: F.kl_div(
        F.log_softmax(o / 2, 1), torch.softmax(teacher / 2, 1), reduction="batchmean"))  # fmt: skip


@HEALTHY()
def logits_beside_their_softmax():
    """The model returns both, and the loss takes the logits."""
    target = torch.randint(0, 5, (32,))
    net = Net(lambda self, x: (h := self.net(x), h.softmax(-1)), net=classifier(5))
    return Built(net, (torch.randn(32, 8),), lambda o: F.cross_entropy(o[0], target) + 0.1 * o[1].square().mean())


@HEALTHY()
def attention_pooling_in_front_of_the_head():
    net = Net(
        lambda self, x: self.head((self.score(x).softmax(1) * x).sum(1)),
        score=nn.Linear(16, 1), head=nn.Linear(16, 5),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 6, 16),), xent(8, 5))


@HEALTHY()
def gates_of_a_router():
    """Softmax over experts, then over the chosen two once more."""

    def forward(self, x):
        top, index = self.gate(x).softmax(-1).topk(2)
        weights = top.softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outs.gather(1, index.unsqueeze(-1).expand(-1, -1, outs.shape[-1]))
        return self.head((weights.unsqueeze(-1) * chosen).sum(1))

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    net = Net(forward, gate=nn.Linear(8, 4), experts=experts, head=nn.Linear(8, 3))
    return Built(net, (torch.randn(64, 8),), xent(64, 3))


@HEALTHY()
def targets_of_a_dozen():
    return Built(mlp(2, nn.ReLU, into=8, out=1), (torch.randn(32, 8),), lambda o: F.mse_loss(o, 12 * torch.ones(32, 1)))


@HEALTHY()
def rare_positives_with_a_weight():
    target = (torch.rand(64, 1) < 0.1).float()
    return Built(classifier(1), (torch.randn(64, 8),), lambda o: F.binary_cross_entropy_with_logits(
        o, target, pos_weight=torch.tensor(9.0)))  # fmt: skip


@HEALTHY()
def pixels_behind_a_sigmoid():
    target = torch.rand(8, 12)
    return Built(classifier(12, nn.Sigmoid()), (torch.randn(8, 8),), lambda o: F.mse_loss(o, target))


@HEALTHY()
def ones_behind_a_tanh():
    target = torch.randint(0, 2, (16, 3)).float() * 2 - 1
    return Built(classifier(3, nn.Tanh()), (torch.randn(16, 8),), lambda o: ((target - o) ** 2).mean())


@HEALTHY()
def large_outputs_for_large_targets():
    """The head's scale is that of the targets."""
    net = Net(lambda self, x: self.net(x) * self.unit, net=classifier(1), unit=torch.tensor(1000.0))
    return Built(net, (torch.randn(32, 8),), lambda o: F.mse_loss(o, 500 * torch.ones(32, 1)) / 1e6)


@HEALTHY()
def values_of_a_critic():
    """Returns of some dozens, a policy beside it whose advantages are zero."""
    net = Net(lambda self, x: (self.policy(h := torch.tanh(self.body(x))), self.value(h)),
              body=nn.Linear(6, 32), policy=nn.Linear(32, 3), value=nn.Linear(32, 1))  # fmt: skip
    returns, action = 20 * torch.rand(64, 1), torch.randint(0, 3, (64, 1))

    def loss(out):
        chosen = out[0].log_softmax(-1).gather(1, action)
        return -(chosen * torch.zeros(64, 1)).mean() + 0.5 * F.mse_loss(out[1], returns)

    return Built(net, (torch.randn(64, 6),), loss)


@HEALTHY()
def tokens_through_a_tied_softmax():
    """Softmax of attention, cross entropy of logits, mean squared error of a second head."""
    ids, loss = tokens()
    near = mse(4, 12, 1)
    net = Net(lambda self, i: (h := self.block(self.embed(i)), self.head(h), self.second(h))[1:],
              embed=nn.Embedding(50, 32), block=Block(32, causal=True), head=nn.Linear(32, 50),
              second=nn.Linear(32, 1))  # fmt: skip
    return Built(net, (ids,), lambda out: loss(out[0]) + near(out[1]))


def _cousin(name: str):
    def make():
        net, samples = next((net, samples) for given, net, samples in healthy_cousins() if given == name)
        return Built(net, (torch.randn(samples, 8),), xent(samples, 3))

    HEALTHY.add(name, make)


for _name in ("router_of_two", "divided_by_its_norm", "norm_by_hand", "log_softmax_by_hand", "dueling",
              "softmax_written_out"):  # fmt: skip
    _cousin(_name)
