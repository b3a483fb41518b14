"""More faults beside the same program with the remedy: data, schedules, estimators, and what lies around a step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.advice import adam, case
from tests.faults.causes import CAUSES
from tests.faults.healthy import HEALTHY
from tests.faults.nets import Net, mse, xent
from tests.faults.program import HISTORY, Built


def in_a_loop(*expect, **answer):
    """As ``case``, for a fault of the loop, which no single step shows."""

    def decorate(make):
        CAUSES.add(make.__name__, partial(make, False), expect, outside=True, forms=HISTORY, **answer)
        HEALTHY.add(f"{make.__name__}_mended", partial(make, True), forms=HISTORY)

    return decorate


def two_layers(last=3):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, last))


# ---- data ----------------------------------------------------------------------------------------------------------


@case("zero", culprits=("input",), says=("cast to integers",), forms=HISTORY)
def image_divided_in_integers(mended):
    pixels = torch.randint(0, 255, (16, 1, 8, 8), dtype=torch.uint8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    return Built(model, ((pixels / 255 if mended else pixels // 255).float(),), xent(16, 3), adam(1e-2), steps=12)


# ---- the loss and the optimizer ------------------------------------------------------------------------------------


@case("detached", outside=True, says=("torch.tensor(loss)",), forms=HISTORY)
def loss_made_anew(mended):
    loss = xent(16, 3)
    return Built(
        two_layers(), (torch.randn(16, 8),),
        loss if mended else lambda out: torch.tensor(loss(out).item(), requires_grad=True), adam(1e-2),
        trains=mended,
    )  # fmt: skip


def stepped_by(every):
    def loop(run, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.1)
        for step in range(run.steps):
            optimizer.zero_grad()
            run.loss_at(step).backward()
            optimizer.step()
            schedule.step()

    return loop


@in_a_loop("optimizer_idle", says=("once an epoch",), proof=lambda run: len(set(run.losses[-8:])) == 1)
def epochs_of_a_schedule_counted_in_batches(mended):
    optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)  # noqa: E731  # one line
    x = torch.randn(32, 8)
    return Built(two_layers(), (x,), xent(32, 3), optimizer, 25, loop=stepped_by(10 if mended else 1))


def clipped(unscaled):
    def loop(run, optimizer):
        for step in range(run.steps):
            optimizer.zero_grad()
            run.scaler.scale(run.loss_at(step)).backward()
            if unscaled:
                run.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.scaler.step(optimizer)
            run.scaler.update()

    return loop


@in_a_loop("optimizer_idle", says=("unscale_(optimizer) before",), proof=lambda run: max(run.moved.values()) < 1e-3)
def clipped_while_scaled(mended):
    optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)  # noqa: E731  # one line
    scaler = torch.amp.GradScaler("cpu")
    return Built(nn.Linear(8, 3), (torch.randn(16, 8),), xent(16, 3), optimizer, 12, loop=clipped(mended),
                 scaler=scaler)  # fmt: skip


@case("loss_seed", outside=True, says=("old_log_prob.detach()",), forms=HISTORY)
def policy_ratio_of_one_value(mended):
    actions, advantage = torch.randint(3, (64, 1)), torch.randn(64)

    def loss(out):
        new = out.log_softmax(-1).gather(1, actions)[:, 0]
        ratio = (new - (new.detach() if mended else new)).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return Built(two_layers(), (torch.randn(64, 8),), loss, adam(1e-2), 12, trains=mended)


# ---- operations ----------------------------------------------------------------------------------------------------


@case("zero", culprits=("drop",), says=("1 - keep_prob",), forms=HISTORY)
def dropout_given_what_to_keep(mended):
    model = Net(lambda self, x: self.head(self.drop(torch.tanh(self.first(x)))),
                first=nn.Linear(8, 16), drop=nn.Dropout(0.1 if mended else 1.0), head=nn.Linear(16, 3))  # fmt: skip
    return Built(model, (torch.randn(32, 8),), xent(32, 3), adam(1e-2))


@case("zero", culprits=("softmax",), says=("before", "softmax over all scores"), forms=HISTORY)
def softmax_behind_the_choice_of_one(mended):
    def forward(self, x):
        scores = self.router(x)
        weight = scores.softmax(-1).topk(1, dim=-1)[0] if mended else scores.topk(1, dim=-1)[0].softmax(-1)
        return self.head(x + weight * torch.tanh(self.body(x)))

    model = Net(forward, router=nn.Linear(8, 4), body=nn.Linear(8, 8), head=nn.Linear(8, 3))
    return Built(model, (torch.randn(64, 8),), xent(64, 3), adam(1e-2))


@case("zero", culprits=("add",), says=("(round(x) - x).detach()",), forms=HISTORY)
def straight_through_without_its_detach(mended):
    def forward(self, x):
        h = self.first(x)
        rest = h.round() - h
        return self.head(h + (rest.detach() if mended else rest))

    return Built(Net(forward, first=nn.Linear(8, 16), head=nn.Linear(16, 3)), (torch.randn(32, 8),), xent(32, 3),
                 adam(1e-2))  # fmt: skip


@case("dead", culprits=("3",), says=("at the model's output",), forms=HISTORY)
def rectified_output_of_negative_targets(mended):
    target = -1 - torch.rand(256, 4)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4), nn.Identity() if mended else nn.ReLU())
    x = torch.randn(256, 4)
    if not mended:
        nn.init.constant_(model[2].bias, -4.0)
    return Built(model, (x,), lambda out: F.mse_loss(out, target), adam(1e-3), 10, trains=mended)


@case("vanishing", culprits=("0", "2", "4", "6", "8", "linear"), says=("weights are clipped",), forms=HISTORY)
def weights_clipped_too_tight(mended):
    sizes = (8, 64, 64, 64, 64, 1)
    parts = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.LeakyReLU(0.2))][:-1]
    model = nn.Sequential(*parts)
    if not mended:
        for parameter in model.parameters():
            parameter.data.clamp_(-1e-3, 1e-3)
    return Built(model, (torch.randn(32, 8),), mse(32, 1), adam(1e-9 if not mended else 1e-3), 6)


@HEALTHY()
def hard_gumbel_codes():
    """One-hot codes by construction: their values say nothing of the slope."""
    model = Net(
        lambda self, x: self.head(F.gumbel_softmax(self.first(x), tau=5.0, hard=True)),
        first=nn.Linear(8, 6), head=nn.Linear(6, 8, bias=False),
    )  # fmt: skip
    nn.init.normal_(model.first.weight, std=1.0)
    return Built(model, (torch.randn(128, 8),), mse(128, 8), adam(1e-2), 10)
