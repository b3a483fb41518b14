"""Healthy programs: parameters that are nowhere registered, or seem so, and rightly."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Block, Net, mse, tokens, xent
from tests.faults.program import Built


@HEALTHY()
def frozen_features_in_a_list():
    """Kept in a list so that they are no part of the model."""
    net = Net(
        lambda self, x: self.head(self.body(x) + self.features[0](x)),
        body=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    net.features = [nn.Linear(8, 16).requires_grad_(requires_grad=False)]
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def teacher_in_a_list_without_gradients():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.teacher = [copy.deepcopy(self.body)]
            nn.init.normal_(self.teacher[0][0].weight, std=0.5)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher[0](x)
            return self.body(x) - target

    return Built(Student(), (torch.randn(16, 8),), lambda out: out.square().mean())


@HEALTHY()
def teacher_in_a_list_detached():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 4)
            self.teacher = [nn.Linear(8, 4)]

        def forward(self, x):
            return F.mse_loss(self.body(x), self.teacher[0](x).detach())

    return Built(Student(), (torch.randn(16, 8),), lambda out: out)


@HEALTHY()
def tied_weight_in_a_list():
    """The output uses the embedding's weight through a list, so that it is registered once."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block, self.norm = nn.Embedding(50, 16), Block(16, causal=True), nn.LayerNorm(16)
            self.output = [self.embed.weight]

        def forward(self, ids):
            return F.linear(self.norm(self.block(self.embed(ids))), self.output[0])

    ids, loss = tokens()
    return Built(Tied(), (ids,), loss)


@HEALTHY()
def latent_code_as_an_argument():
    """What is optimised is the input; it belongs to the caller."""
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 5))
    return Built(net, (nn.Parameter(torch.randn(8, 6)),), mse(8, 5))


@HEALTHY()
def parametrized_weights():
    net = nn.Sequential(
        weight_norm(nn.Linear(8, 24)), nn.SiLU(), spectral_norm(nn.Linear(24, 24)), nn.SiLU(), nn.Linear(24, 3)
    )
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def weights_of_a_hypernetwork():
    """The second layer's weight is computed, and no parameter."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, 16 * 8)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(torch.relu(F.linear(x, self.make(self.code).view(16, 8))))

    return Built(Hyper(), (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def modules_in_their_containers():
    class Contained(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.heads = nn.ModuleDict({"a": nn.Linear(16, 2), "b": nn.Linear(16, 2)})
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(3))

        def forward(self, x):
            for block, scale in zip(self.blocks, self.scales, strict=True):
                x = x + scale * torch.relu(block(x))
            return torch.cat([head(x) for head in self.heads.values()], dim=1)

    return Built(Contained(), (torch.randn(16, 16),), mse(16, 4))


@HEALTHY()
def swapped_around_the_call():
    """A wrapper replaces the weight by another parameter for the time of the call, as sharding does."""
    layer = nn.Linear(8, 8)
    net = nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3))
    kept = layer.weight

    def gather(module, _):
        whole = module.weight = nn.Parameter(kept.detach().clone())
        whole.register_post_accumulate_grad_hook(lambda p: setattr(kept, "grad", p.grad))

    def shard(module, _, output):
        module.weight = kept
        return output

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(shard)
    return Built(net, (torch.randn(16, 6),), xent(16, 3))
