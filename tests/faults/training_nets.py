"""Underflow, symmetry and losses in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, image, lm, tokens


@fault("underflow", r".* outside.*", lambda g: float((g.grads["emb.weight"] == 0).float().mean()) > 0.9)
def half_gpt_unscaled() -> Built:
    loss = lm()
    return Built(GPT(3).half(), (tokens(),), lambda o: loss(o.float()) * 1e-6)


@fault(
    "symmetry",
    r"\d.*",
    lambda g: bool((g.grads["0.weight"] - g.grads["0.weight"][:1]).abs().max() < 1e-9) and g.norm("0.weight") > 1e-4,
)
def constant_init_one_output() -> Built:
    m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    y = torch.randn(16, 1)
    return Built(m, (torch.randn(16, 8),), lambda o: F.mse_loss(o, y))


# ---- low precision
@fault("underflow", r".* outside.*", lambda g: float((g.grads["0.weight"] == 0).float().mean()) > 0.9)
def half_mlp_unscaled() -> Built:
    m = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).half()
    y = torch.randn(64, 8)
    return Built(m, (torch.randn(64, 16).half(),), lambda o: F.mse_loss(o.float(), y) * 1e-5)


@fault("underflow", r".* outside.*", lambda g: float((g.grads["0.weight"] == 0).float().mean()) > 0.7)
def half_conv_loss_over_pixels() -> Built:
    m = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 3, 3, padding=1),
    ).half()
    y = torch.randn(4, 3, 32, 32)
    return Built(m, (image(4, 32).half(),), lambda o: ((o.float() - y) ** 2).mean() * 2e-5)


# ---- the loss's side
@fault("loss_seed", r"outside.*", lambda g: g.norm("0.weight") > 1e7)
def loss_times_5e10() -> Built:
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return Built(m, (torch.randn(16, 8),), lambda o: o.pow(2).mean() * 5e10)


@fault("loss_seed zero", r"outside.*", lambda g: g.norm("0.weight") == 0)
def hinge_never_active() -> Built:
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return Built(m, (torch.randn(16, 8),), lambda o: F.relu(o.abs() - 100).mean())
