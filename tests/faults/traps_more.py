"""Traps for NaN and Inf: functions that few people know to have one, and places where they are hard to see."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.faults.nets import Net, mlp, mse, xent
from tests.faults.program import Built
from tests.faults.traps import plain, trap, zero_row
from tests.faults.traps_nets import nonfinite


@trap("pow", x=plain)
def learned_exponent_of_a_negative_base(h):
    return h[:, :1] ** (2.0 + h[:, 1:] * 0)


@trap("remainder", x=plain)
def remainder_by_zero(h):
    return torch.remainder(h, h.detach() * 0) + h


@trap("lgamma", x=plain)
def log_gamma_at_zero(h):
    return torch.lgamma(h * 0)


@trap("qr", x=plain, steps=1)
def qr_of_a_singular_matrix(h):
    q, r = torch.linalg.qr(h[:4] * torch.tensor([1.0, 0.0, 1.0, 1.0]))
    return q.sum() + r.sum()


@trap("sqrt")
def in_place_root(h):
    return h.abs().sqrt_()


@trap("log")
def harmonic_mean_by_logs(h):
    return torch.exp(-torch.log(h.abs()).mean(-1))


@trap("div")
def cosine_similarity_by_hand(h):
    return (h @ h.T) / (h.norm(dim=1)[:, None] * h.norm(dim=1)[None])


@trap("acosh", x=plain)
def hyperbolic_distance_to_itself(h):
    gap = (h - h).square().sum(-1)
    return torch.acosh(1 + 2 * gap)


@trap("log", x=plain)
def cross_entropy_by_hand(h):
    p = torch.softmax(h * 300, dim=-1)
    return -torch.log(p[:, 0])


@trap("exp", x=plain)
def poisson_rate_without_a_limit(h):
    rate = torch.exp(h * 100 + 150)
    return rate - 3.0 * (h * 100 + 150)


@trap("pow", x=plain)
def inverse_square_law_at_the_source(h):
    return (h - h.detach()).abs() ** -2.0


@trap("prod", "cumprod", "log", x=plain)
def product_that_overflows(h):
    return ((h + 10).abs() * 1e10).prod(dim=-1)


@nonfinite("norm#1", "norm_1", "sqrt")
def second_call_of_a_shared_norm():
    class Norm(nn.Module):
        def forward(self, h):
            return h / (h.square().mean(-1, keepdim=True).sqrt() + 1e-8)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
            self.norm, self.head = Norm(), nn.Linear(6, 2)

        def forward(self, x, keep):
            h = self.norm(F.gelu(self.first(x)))
            return self.head(self.norm(self.second(h * keep)))

    keep = torch.ones(8, 1)
    keep[5] = 0.0
    return Built(Shared(), (torch.randn(8, 6), keep), xent(8, 2), steps=3)


@nonfinite("checkpoint", "block", "sqrt")
def inside_of_a_checkpointed_block():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, 2)

        def block(self, h):
            return torch.sqrt(h.square())

        def forward(self, x):
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))

    return Built(Deep(), (zero_row(),), xent(5, 2), steps=3)


@nonfinite("std")
def spread_of_a_group_of_one():
    """Statistics over each group of samples; one group has a single member."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            first, second = h[:6], h[6:]
            return self.head(torch.stack([first.std(0), second.std(0)]))

    return Built(Grouped(), (torch.randn(7, 4),), mse(2, 2), steps=3)


@nonfinite("div", "truediv")
def attention_pooling_over_an_empty_document():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.score, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1), nn.Linear(8, 2)

        def forward(self, ids):
            h = self.embed(ids)
            weight = torch.exp(torch.tanh(self.score(h))) * (ids > 0)[..., None]
            return self.head((weight / weight.sum(1, keepdim=True) * h).sum(1))

    ids = torch.randint(1, 20, (6, 5))
    ids[3] = 0
    return Built(Pool(), (ids,), xent(6, 2), steps=3)


class _Broken(torch.autograd.Function):
    """The derivative of a root, written without a thought of zero."""

    @staticmethod
    def forward(ctx, h):
        root = h.abs() ** 0.5
        ctx.save_for_backward(h, root)
        return root

    @staticmethod
    def backward(ctx, gradient):
        h, root = ctx.saved_tensors
        return gradient * h.sign() / (2 * root)


@nonfinite("_Broken", "Broken", "external")
def own_function_with_a_bad_derivative():
    net = Net(
        lambda self, x: self.head(_Broken.apply(self.lin(x))), lin=nn.Linear(4, 8, bias=False), head=nn.Linear(8, 2)
    )
    return Built(net, (zero_row(),), xent(5, 2), steps=3)


@nonfinite("sqrt")
def two_traps_on_one_path():
    """Both roots are bad; the one nearer to the loss comes first, since only it got a finite gradient."""
    net = Net(
        lambda self, x: self.head(torch.sqrt(self.mid(torch.sqrt(self.lin(x).square())).square())),
        lin=nn.Linear(4, 8, bias=False), mid=nn.Linear(8, 8, bias=False), head=nn.Linear(8, 2),
    )  # fmt: skip
    return Built(net, (zero_row(),), xent(5, 2), steps=3)


# ---- not at an operation ----------------------------------------------------------------------------------------


@nonfinite("embed.weight", outside=True)
def embedding_row_already_nan():
    net = Net(lambda self, i: self.head(self.embed(i).mean(1)), embed=nn.Embedding(30, 8), head=nn.Linear(8, 2))
    with torch.no_grad():
        net.embed.weight[7] = math.nan
    ids = torch.randint(0, 30, (6, 4))
    ids[2, 1] = 7
    return Built(net, (ids,), xent(6, 2), steps=3)


@nonfinite(outside=True)
def scaled_loss_beyond_half_precision():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).half()
    x, y = torch.randn(16, 8).half(), torch.randn(16, 1)
    return Built(model, (x,), lambda out: F.mse_loss(out.float(), y) * 2.0**24, steps=3)


@nonfinite(outside=True)
def class_weights_of_one_over_zero():
    weight = 1.0 / torch.tensor([3.0, 5.0, 0.0])
    target = torch.tensor([0, 1, 2, 1, 0, 0, 2, 1])
    model = mlp(1, nn.ReLU, into=4, width=16, out=3)
    return Built(model, (torch.randn(8, 4),), lambda out: F.cross_entropy(out, target, weight), steps=3)


@nonfinite(outside=True)
def gaussian_likelihood_with_a_spread_of_zero():
    goal = torch.randn(16, 2)
    model = Net(
        lambda self, x: (self.mean(x), torch.relu(self.spread(x))), mean=nn.Linear(4, 2), spread=nn.Linear(4, 2)
    )
    nn.init.constant_(model.spread.bias, -4.0)

    def loss(out):
        return (((out[0] - goal) / out[1]).square() + 2 * out[1].log()).mean()

    return Built(model, (torch.randn(16, 4),), loss, steps=3)
