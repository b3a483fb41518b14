"""Healthy programs: what is no trap any more, and training as it goes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Gpt, Net, he, mlp, mse, tokens, xent
from tests.faults.program import Built
from tests.faults.traps import Trap, plain, zero_row


def harmless(x=zero_row, out=0):
    """Registers the decorated op: it looks like a trap and is none."""

    def decorate(op):
        HEALTHY.add(op.__name__, lambda: Built(Trap(op, out), (x(),), lambda y: y.float().square().mean(), steps=4))
        return op

    return decorate


@harmless()
def norm_of_a_zero_row(h):
    return h.norm(dim=-1)


@harmless(plain)
def cdist_with_itself(h):
    return torch.cdist(h, h) + torch.cdist(h, h, p=1.0)


@harmless(out=4)
def normalize_of_a_zero_row(h):
    return F.normalize(h, dim=-1)


@harmless()
def cosine_similarity_of_zeros(h):
    return F.cosine_similarity(h, h + 0.5, dim=-1)


@harmless()
def spread_of_a_constant_row(h):
    return h.std(dim=-1) + h.sum(-1)


@harmless()
def product_with_a_zero(h):
    return h.prod(dim=-1) + h.sum(-1)


@harmless()
def arctangent_of_zeros(h):
    return torch.atan2(h[:, :2], h[:, 2:])


@harmless(plain)
def logits_far_out_with_a_safe_loss(h):
    return F.binary_cross_entropy_with_logits(h - 200, torch.zeros_like(h)) + F.logsigmoid(h - 50).mean() + h.mean()


@harmless()
def root_with_an_epsilon(h):
    return (h.square() + 1e-6).sqrt()


@harmless()
def log_with_a_clamp_in_front(h):
    return h.abs().clamp(min=1e-6).log() + h


@harmless()
def where_twice(h):
    safe = torch.where(h > 0, h, 1.0)
    return torch.where(h > 0, safe.log(), 0.0) + h


@harmless(plain)
def masked_softmax_with_infinities(h):
    return h.masked_fill(torch.eye(5, 4, dtype=torch.bool), float("-inf")).softmax(-1) * h


@harmless(plain)
def infinite_slope_that_a_clamp_keeps_back(h):
    return torch.asin((h * 100).clamp(-1, 1)) * 1e-3 + h


# ---- training ---------------------------------------------------------------------------------------------------


def adam(rate):
    return lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)


def trained(model, args, loss, steps, rate=1e-2):
    """The model after ``steps`` of Adam."""
    optimizer = adam(rate)(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(*args)).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


@HEALTHY()
def classifier_fitted_to_almost_nothing():
    x, loss = torch.randn(32, 16), xent(32, 4)
    model = trained(mlp(2, nn.ReLU, into=16, width=48, out=4), (x,), loss, 200)
    return Built(model, (x,), loss, adam(1e-3), 12)


@HEALTHY()
def regression_fitted_to_almost_nothing():
    x, loss = torch.randn(24, 8), mse(24, 1)
    model = trained(mlp(2, nn.Tanh, into=8, width=48, out=1), (x,), loss, 250)
    return Built(model, (x,), loss, adam(1e-4), 12)


@HEALTHY()
def binary_classifier_very_sure():
    x = torch.randn(48, 8)
    y = (x[:, :1] > 0).float()
    model = Net(
        lambda self, x: torch.sigmoid(self.out(F.relu(self.body(x)))), body=nn.Linear(8, 24), out=nn.Linear(24, 1)
    )

    def loss(out):
        return F.binary_cross_entropy(out, y)

    return Built(trained(model, (x,), loss, 150), (x,), loss, adam(1e-3), 10)


@HEALTHY()
def language_model_in_training():
    ids, loss = tokens()
    return Built(Gpt(2), (ids,), loss, lambda m: torch.optim.AdamW(m.parameters(), 3e-3, weight_decay=0.1), 24)


@HEALTHY()
def fresh_batches_with_momentum():
    weights = torch.randn(16, 4)

    def batch(step):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        return (x,), lambda out: F.cross_entropy(out, (x @ weights).argmax(-1))

    model = he(mlp(3, nn.ReLU, into=16, width=32, out=4))
    args, loss = batch(0)
    return Built(model, args, loss, lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), 30, batch)


@HEALTHY()
def cnn_with_batch_norm_in_training():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return Built(model, (torch.randn(16, 3, 8, 8),), xent(16, 4), adam(3e-3), 20)


@HEALTHY()
def zero_head_in_training():
    model = mlp(2, nn.ReLU, into=16, width=32, out=4)
    nn.init.zeros_(model[-1].weight)
    return Built(model, (torch.randn(64, 16),), xent(64, 4), adam(1e-3), 12)


@HEALTHY()
def warm_up_and_a_late_drop():
    """The learning rate rises over ten steps and falls by a hundred after twenty."""
    x, loss = torch.randn(64, 16), xent(64, 4)
    made = []

    def optimizer(model):
        made.append(torch.optim.SGD(model.parameters(), 1e-4))
        return made[-1]

    def batch(step):
        if made:
            made[-1].param_groups[0]["lr"] = 1e-3 if step > 20 else 0.1 * min(1.0, (step + 1) / 10)
        return (x,), loss

    return Built(mlp(2, nn.GELU, into=16, width=32, out=4), (x,), loss, optimizer, 26, batch)


@HEALTHY()
def noisy_labels_of_another_size_each_batch():
    model = mlp(2, nn.ReLU, into=8, width=24, out=1)

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)
        return (x,), lambda out: F.mse_loss(out, y * (1.0 + 0.5 * (step % 3)))

    args, loss = batch(0)
    return Built(model, args, loss, adam(1e-3), 36, batch)
