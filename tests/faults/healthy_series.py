"""Healthy nets made of parts, over several steps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Decoder, Net, ce, fresh, he, lins, mlp, mse
from tests.faults.places import healthy
from tests.faults.program import Built


def halving(case: Built, step: int) -> Built:
    """A loss scale that is halved and doubled on its way, as a scaler does."""
    now = fresh(case, step)
    factor = 65536.0 if step % 12 < 6 else 32768.0
    return Built(now.model, now.args, lambda o: case.loss(o) * factor)


def one_by_one(case: Built, step: int) -> Built:
    torch.manual_seed(900 + step)
    n = int(torch.randint(len(case.args[0]), ()))
    return Built(case.model, tuple(a[n : n + 1] for a in case.args), case.loss)


def some_masked(case: Built, step: int) -> Built:
    if step % 9 != 4:
        return case
    return Built(case.model, case.args, lambda o: case.loss(o) * 0.0)


@healthy(steps=14)
def residual_net_over_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            x = x + f(x).relu_()
        return m.out(x / math.sqrt(len(m.fs)))

    return Built(Net(run, fs=he(lins(6, 16)), out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3), trains=False)


@healthy(steps=40, each=fresh)
def fresh_batches_with_heavy_dropout() -> Built:
    m = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Dropout(0.9), nn.Linear(128, 3))
    return Built(m, (torch.randn(16, 8),), ce(16, 3), trains=False)


@healthy(steps=40, each=halving)
def loss_scale_changes_on_the_way() -> Built:
    y = torch.randint(0, 3, (16,))
    m = mlp(8, 3)
    for p in m.parameters():
        p.register_hook(lambda g: g / 65536)  # so that plain SGD may use it
    return Built(m, (torch.randn(16, 8),), lambda o: F.cross_entropy(o, y), trains=False)


@healthy(steps=45, each=one_by_one)
def batch_of_one_each_step() -> Built:
    x = torch.randn(64, 6)

    def run(m: Net, a: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.f(a), y)

    return Built(Net(run, f=mlp(6, 1)), (x, x[:, :1] * 2 + x[:, 1:2]), trains=False)


@healthy(steps=12)
def decoder_over_steps() -> Built:
    return Built(Decoder(-float("inf"), True), (torch.randint(0, 30, (4, 12)),), trains=False)


@healthy(steps=12, each=fresh)
def rezero_by_lerp_over_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, a in zip(m.fs, m.alpha, strict=True):
            x = torch.lerp(x, torch.tanh(f(x)), a)
        return m.out(x)

    return Built(
        Net(
            run,
            fs=lins(4, 12),
            alpha=nn.ParameterList(nn.Parameter(torch.zeros(12)) for _ in range(4)),
            out=nn.Linear(12, 3),
        ),
        (torch.randn(16, 12),),
        ce(16, 3),
        trains=False,
    )


@healthy(steps=30)
def steep_regression_at_the_beginning() -> Built:
    return Built(mlp(4, 1), (torch.randn(32, 4),), mse(32, 1, scale=30.0), trains=False)


@healthy(steps=40, each=some_masked)
def now_and_then_nothing_to_learn() -> Built:
    return Built(mlp(4, 3), (torch.randn(32, 4),), ce(32, 3), trains=False)


@healthy(steps=25, each=fresh)
def rarely_used_words() -> Built:
    def run(m: Net, x: Tensor, ids: Tensor) -> Tensor:
        return m.out(torch.cat([x, m.emb(ids)], -1))

    return Built(
        Net(run, emb=nn.Embedding(3000, 4), out=mlp(8, 3)),
        (torch.randn(16, 4), torch.randint(0, 3000, (16,))),
        ce(16, 3),
        trains=False,
    )
