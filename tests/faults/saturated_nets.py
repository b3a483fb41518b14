"""Saturated units in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, Captioner, Highway, MoE, ce, dull, lm, sq, tokens


@fault("saturated vanishing", r".*sigmoid.*", dull(1e-2))
def sigmoid_image_with_mse() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 48)
            nn.init.constant_(self.b.bias, 30)

        def forward(self, z: Tensor) -> Tensor:
            return torch.sigmoid(self.b(torch.relu(self.a(z))))

    return Built(M(), (torch.randn(8, 8),), lambda o: F.mse_loss(o, torch.full_like(o, 0.3)))


@fault(
    "saturated vanishing", r"/tanh.* cell.*", lambda g: g.norm("encoder.weight") < 1e-3 * g.norm("head.weight"), seeds=1
)
def recurrence_saturates() -> Built:
    return Built(Captioner(gain=60.0, steps=12), (torch.randn(4, 12) * 10,), ce(4, 5))


# ---- saturated
@fault("saturated", r".*sigmoid.* .*gate.*", lambda g: g.ratio("gates.0.weight", "head.weight") < 1e-2)
def highway_gates_shut() -> Built:
    m = Highway()
    with torch.no_grad():
        for gate in m.gates:
            gate.bias.fill_(-60)
    return Built(m, (torch.randn(16, 12),), ce(16, 4))


@fault("saturated", r".*softmax.*", lambda g: g.norm("blocks.0.qkv.weight") >= 0)
def attention_without_scaling() -> Built:
    m = GPT(2)
    with torch.no_grad():
        for b in m.blocks:
            b.qkv.weight *= 60
    return Built(m, (tokens(),), lm())


@fault("saturated vanishing", r".*tanh.* 1", lambda g: g.ratio("0.weight", "2.weight") < 20)
def raw_observations_into_tanh() -> Built:
    m = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    return Built(m, (torch.randn(32, 6) * 4000,), sq)


@fault("saturated", r".*softmax.*", lambda g: g.norm("router.weight") < 1e-3)
def router_of_one_expert() -> Built:
    m = MoE()
    nn.init.constant_(m.router.bias, 0)
    with torch.no_grad():
        m.router.bias[0] = 300
    return Built(m, (torch.randn(16, 12),), sq)


@fault("saturated zero dead", "1", lambda g: g.norm("0.weight") == 0)
def hardtanh_outside() -> Built:
    m = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(), nn.Linear(16, 3))
    nn.init.constant_(m[0].bias, 20)
    return Built(m, (torch.randn(16, 8),), ce(16, 3))


@fault("saturated vanishing zero", ".*sigmoid.*", lambda g: g.norm("tower.weight") < 1e-6)
def verification_sigmoid() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.cal = nn.Linear(8, 16), nn.Linear(1, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            d = (self.tower(a) - self.tower(b)).pow(2).sum(-1, keepdim=True)
            return self.cal(torch.sigmoid(30 * d + 60))

    return Built(M(), (torch.randn(16, 8), torch.randn(16, 8)), sq)
