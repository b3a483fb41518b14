"""Healthy programs that earlier versions of the rules were loud about."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.bodies import BODIES, built
from tests.faults.healthy import HEALTHY
from tests.faults.nets import Net, he, mlp, mse, xent
from tests.faults.program import HISTORY, Built

# ---- a gradient penalty --------------------------------------------------------------------------------------------


def penalised(run, optimizer, only=False):
    """A critic's steps: real against made, and the gradient at points between them pulled to norm 1."""
    generator = torch.Generator().manual_seed(7)
    for step in range(run.steps):
        (real,), _ = run.at(step)
        made = torch.randn(real.shape, generator=generator) + 1.0
        optimizer.zero_grad()
        share = torch.rand((len(real),) + (1,) * (real.ndim - 1), generator=generator)
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(run.model(between).sum(), between, create_graph=True)
        loss = 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        if not only:
            loss = loss + run.model(made).mean() - run.model(real).mean()
        loss.backward()
        optimizer.step()


def critic(act):
    return nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 1))


def image_critic():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)
    )


def penalty(name, make, shape, only=False):
    def program():
        x = torch.randn(*shape)
        return Built(make(), (x,), lambda out: out.mean(), lambda m: torch.optim.Adam(m.parameters(), 1e-3), 8,
                     lambda step: ((torch.randn(*shape, generator=torch.Generator().manual_seed(step)),), None),
                     functools.partial(penalised, only=only))  # fmt: skip

    HEALTHY.add(name, program, forms=HISTORY)


penalty("penalty_on_a_relu_critic", lambda: critic(nn.ReLU()), (16, 8))
penalty("penalty_on_a_leaky_critic", lambda: critic(nn.LeakyReLU(0.2)), (16, 8))
penalty("penalty_on_a_smooth_critic", lambda: critic(nn.Softplus()), (16, 8))
penalty("penalty_on_images", image_critic, (8, 3, 6, 6))
penalty("penalty_alone", lambda: critic(nn.ReLU()), (16, 8), only=True)
penalty("penalty_alone_on_images", image_critic, (8, 3, 6, 6), only=True)


@HEALTHY()
def penalty_inside_of_the_model():
    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (slope + x).square().mean() + 0.1 * energy.square().mean()

    return Built(Net(forward, energy=critic(nn.ReLU())), (torch.randn(16, 8),), lambda out: out)


# ---- margins that are met ------------------------------------------------------------------------------------------

ONE_SHOT = frozenset({"one_shot"})


def _apart():
    """Anchors, their neighbours, and points far away, one behind the other."""
    anchor = torch.randn(8, 8)
    return torch.cat([anchor, anchor + 1e-3 * torch.randn(8, 8), anchor + 50])


def met(name, loss, *, inside):
    def program():
        body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
        nn.init.orthogonal_(body[3].weight)
        body[3].weight.data.mul_(20)
        if inside:
            return Built(Net(lambda self, x: loss(*self.body(x).chunk(3)), body=body), (_apart(),), lambda out: out)
        return Built(body, (_apart(),), lambda out: loss(*out.chunk(3)))

    HEALTHY.add(name, program, forms=ONE_SHOT)


def _by_hand(a, p, n):
    return torch.relu((a - p).norm(dim=1) - (a - n).norm(dim=1) + 0.1).mean()


def _clamped(a, p, n):
    return torch.clamp((a - p).square().sum(1) - (a - n).square().sum(1) + 0.1, min=0).sum()


def _ranked(a, p, n):
    return F.margin_ranking_loss(-(a - p).norm(dim=1), -(a - n).norm(dim=1), torch.ones(8), margin=0.1)


for _name, _loss in (
    ("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=0.1)),
    ("triplet_by_hand", _by_hand), ("clamped_triplet", _clamped), ("ranking", _ranked),
):  # fmt: skip
    met(f"{_name}_all_met_inside", _loss, inside=True)
    met(f"{_name}_all_met_outside", _loss, inside=False)


# ---- memory that nobody has written to -----------------------------------------------------------------------------


def unwritten(name, take):
    """What ``take`` makes of the hidden values goes through memory that is filled before it is read."""

    def program():
        junk = [torch.full((64, 16), float("nan")) for _ in range(20)]  # what such memory may well hold
        net = Net(
            lambda self, x: self.head(take(torch.tanh(self.body(x)))), body=nn.Linear(8, 16), head=nn.Linear(16, 3)
        )
        del junk
        return Built(net, (torch.randn(64, 8),), xent(64, 3))

    HEALTHY.add(name, program)


def _filled(make):
    def take(h):
        memory = make(h)
        memory[:] = h
        return memory

    return take


unwritten("filled_new_empty", _filled(lambda h: h.new_empty(h.shape)))
unwritten("filled_empty", _filled(lambda h: torch.empty(h.shape)))
unwritten("filled_empty_like", _filled(torch.empty_like))
unwritten("empty_and_zeroed", lambda h: h + torch.empty_like(h).zero_())
unwritten("noise_into_empty", lambda h: h + 0.1 * torch.empty_like(h).normal_())


def _rows(h):
    memory = h.new_empty(h.shape)
    for number, row in enumerate(h.chunk(4)):
        memory[number * 16 : number * 16 + 16] = row
    return memory


unwritten("filled_row_by_row", _rows)


# ---- steps ---------------------------------------------------------------------------------------------------------


def _large_first_step(seed_rate):
    """Small weights and a rate of 0.5: the first step is as large as a matrix, and the loss falls from then on."""
    name, rate = seed_rate
    run = built(name, lambda m: torch.optim.SGD(m.parameters(), rate), 20)
    for parameter in run.model.head.parameters():
        parameter.data.mul_(0.15)
    return run


for _name in BODIES:
    HEALTHY.add(f"large_first_step_{_name}", functools.partial(_large_first_step, (_name, 0.5)), forms=HISTORY)


def fitted(make, x, loss, rate):
    """A model that Adam has fitted to one batch, and keeps fitting."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return Built(model, (x,), loss, lambda m: torch.optim.Adam(m.parameters(), rate), 60)


for _name, _make, _shape, _loss in (
    ("tanh", lambda: mlp(2, nn.Tanh, into=8, width=32, out=1), (24, 8), lambda: mse(24, 1)),
    ("relu", lambda: he(mlp(2, nn.ReLU, into=8, width=32, out=3)), (24, 8), lambda: xent(24, 3)),
    ("deep", lambda: mlp(4, nn.GELU, into=8, width=24, out=1), (24, 8), lambda: mse(24, 1)),
    ("images", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)), (8, 3, 6, 6),
     lambda: xent(8, 4)),
    ("normed", lambda: nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 1)), (24, 8),
     lambda: mse(24, 1)),
    ("narrow", lambda: mlp(1, nn.SiLU, into=8, width=8, out=1), (16, 8), lambda: mse(16, 1)),
):  # fmt: skip
    HEALTHY.add(
        f"adam_swings_on_one_batch_{_name}",
        lambda make=_make, shape=_shape, loss=_loss: fitted(make, torch.randn(*shape), loss(), 1e-2), forms=HISTORY,
    )  # fmt: skip
