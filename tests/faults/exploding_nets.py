"""Gradients that explode, in one step or suddenly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GCN, C, Captioner, Net, Sequence, sq


class Loud(nn.Module):
    """Residual blocks whose branch is four times too loud."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(16))
        for p in self.blocks.parameters():
            if p.ndim > 1:
                nn.init.kaiming_normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + 4 * block(h)
        return self.head(h)


# ---- several steps
def louder(case: Built, step: int) -> Built:
    return case if step != 35 else Built(case.model, tuple(a * 1000 for a in case.args), case.loss)


def jolt(case: Built, step: int) -> Built:
    if step == 34:
        with torch.no_grad():
            case.model.cells[1].weight.mul_(3000)
    return case


@fault("exploding scale_break", r"/.*div.*|/.*", lambda g: g.norm("a.weight") > 1e3)
def standardise_near_constant() -> Built:
    def op(h: Tensor) -> Tensor:
        h = h * 1e-8
        return (h - h.mean(-1, keepdim=True)) / 1e-14

    return Built(Net(op), (torch.randn(16, 8),), lambda o: o.mean())


# ---- exploding
@fault("exploding", r"\d+ .*", lambda g: g.norm("0.weight") > 1e4)
def generator_three_times_he() -> Built:
    m = nn.Sequential(*[x for _ in range(14) for x in (nn.Linear(48, 48), nn.LeakyReLU(0.2))], nn.Linear(48, 10))
    for p in m.parameters():
        nn.init.normal_(p, std=3 * (2 / 48) ** 0.5) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(8, 48),), lambda o: o.mean())


@fault("exploding", r"blocks.* /.*", lambda g: g.norm("stem.weight") > 1e5)
def residual_branch_times_four() -> Built:
    return Built(Loud(), (torch.randn(8, 16),), lambda o: o.mean())


@fault(
    "exploding",
    rf"cell.*{C} /.*",
    lambda g: g.ratio("encoder.weight", "head.weight") > 1e3 or g.norm("encoder.weight") > 1e6,
)
def linear_rnn_radius_two() -> Built:
    m = Captioner(gain=2.5, act=False)
    return Built(m, (torch.randn(4, 12),), lambda o: o.mean())


@fault("exploding", r".*", lambda g: g.norm("lins.0.weight") > 1e6)
def gnn_sums_dense_graph() -> Built:
    m = GCN(10)
    return Built(m, (torch.randn(60, 8), torch.ones(60, 60)), lambda o: o.mean())


@fault("exploding", r"\d+ .*", lambda g: g.norm("0.weight") > 1e4)
def orthogonal_gain_four() -> Built:
    m = nn.Sequential(*[x for _ in range(12) for x in (nn.Linear(32, 32), nn.GELU())], nn.Linear(32, 3))
    for p in m.parameters():
        nn.init.orthogonal_(p, 5) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(2, 32),), lambda o: o.sum())


@fault("spike", r".*", lambda g: g.finite, steps=36, each=louder)
def one_batch_thousand_times_larger() -> Built:
    y = torch.randn(32, 2)
    return Built(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), (torch.randn(32, 8),), lambda o: F.mse_loss(o, y)
    )


@fault("spike scale_break update_size", r".*cells\.1.*", lambda g: g.finite, steps=36, each=jolt)
def one_weight_jumps() -> Built:
    m = Sequence()
    return Built(m, (torch.randn(16, 8),), sq)
