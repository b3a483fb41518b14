"""Seeded faults in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.nets import (
    MoE,
    ResNet,
    Sequence,
    image,
)
from tests.faults_heldout.program import Case, fault
from tests.faults_heldout.seeded1 import ce, sq
from tests.faults_heldout.seeded2 import none


@fault("cut", "detached", ".*(topk|getitem|sort|long|argsort|gather|index).*", none("scorer.weight"))
def hard_top_k_selection() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scorer, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            keep = self.scorer(x)[..., 0].topk(2, -1).indices
            return self.head(torch.gather(x, 1, keep[..., None].expand(-1, -1, 8)).mean(1))

    return Case(M(), (torch.randn(4, 6, 8),), ce(4, 3))


# ---- unused, frozen
@fault("unused", "unused", r"aux.*", none("aux.weight"))
def auxiliary_head_forgotten() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.aux = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("unused", "unused detached", r"norm.*", none("norm.weight"))
def norm_result_dropped() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.norm(h)
            return self.b(torch.relu(h))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("unused", "unused", r"experts\.3.*", none("experts.3.0.weight"))
def last_expert_off_by_one() -> Case:
    return Case(MoE(loop=3), (torch.randn(16, 12),), sq)


@fault("frozen", "frozen", r".*", lambda g: "body.0.weight" not in g.grads)
def frozen_body() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
            self.body.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("frozen", "frozen", r".*", lambda g: len(g.grads) == 2)
def frozen_resnet_train_head() -> Case:
    m = ResNet()
    for n, p in m.named_parameters():
        p.requires_grad_(n.startswith("head"))
    return Case(m, (image(4),), ce(4, 5))


# ---- low precision
@fault("underflow", "underflow", r".* outside.*", lambda g: float((g.grads["0.weight"] == 0).float().mean()) > 0.9)
def half_mlp_unscaled() -> Case:
    m = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).half()
    y = torch.randn(64, 8)
    return Case(m, (torch.randn(64, 16).half(),), lambda o: F.mse_loss(o.float(), y) * 1e-5)


@fault("underflow", "underflow", r".* outside.*", lambda g: float((g.grads["0.weight"] == 0).float().mean()) > 0.7)
def half_conv_loss_over_pixels() -> Case:
    m = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 3, 3, padding=1),
    ).half()
    y = torch.randn(4, 3, 32, 32)
    return Case(m, (image(4, 32).half(),), lambda o: ((o.float() - y) ** 2).mean() * 2e-5)


# ---- the loss's side
@fault("loss", "loss_seed", r"outside.*", lambda g: g.norm("0.weight") > 1e7)
def loss_times_5e10() -> Case:
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return Case(m, (torch.randn(16, 8),), lambda o: o.pow(2).mean() * 5e10)


@fault("loss", "loss_seed zero", r"outside.*", lambda g: g.norm("0.weight") == 0)
def hinge_never_active() -> Case:
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return Case(m, (torch.randn(16, 8),), lambda o: F.relu(o.abs() - 100).mean())


# ---- several steps
def louder(case: Case, step: int) -> Case:
    return case if step != 35 else Case(case.model, tuple(a * 1000 for a in case.args), case.loss)


@fault("spike", "spike", r".*", lambda g: g.finite, steps=36, each=louder)
def one_batch_thousand_times_larger() -> Case:
    y = torch.randn(32, 2)
    return Case(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), (torch.randn(32, 8),), lambda o: F.mse_loss(o, y)
    )


def jolt(case: Case, step: int) -> Case:
    if step == 34:
        with torch.no_grad():
            case.model.cells[1].weight.mul_(3000)
    return case


@fault("spike", "spike scale_break update_size", r".*cells\.1.*", lambda g: g.finite, steps=36, each=jolt)
def one_weight_jumps() -> Case:
    m = Sequence()
    return Case(m, (torch.randn(16, 8),), sq)


@fault("dead", "dead zero", r"1", lambda g: g.norm("0.weight") == 0, steps=8)
def dead_over_steps() -> Case:
    m = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(m[0].bias, -30)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))
