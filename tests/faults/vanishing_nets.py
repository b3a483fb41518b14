"""Gradients that vanish in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import (
    GCN,
    GPT,
    C,
    Captioner,
    HyperNet,
    Net,
    Plain2d,
    adjacency,
    ce,
    dull,
    image,
    lm,
    sq,
    tokens,
)


@fault("vanishing scale_break saturated zero", ".*bn.*", dull(1e-3))
def batch_norm_over_two_samples() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.bn(self.a(x))))

    return Built(M(), (torch.randn(2, 8) * 100,), ce(2, 3))


@fault("vanishing scale_break zero saturated", ".*normalize.* .*", dull(1e-5))
def normalize_of_one_dimension() -> Built:
    return Built(Net(lambda h: F.normalize(h, dim=-1), (8, 1, 1, 3)), (torch.randn(16, 8),), ce(16, 3))


@fault("vanishing scale_break zero saturated underflow", r"/prod.* .*", dull(1e-6))
def product_of_probabilities() -> Built:
    return Built(
        Net(lambda h: torch.sigmoid(h - 4).prod(-1, keepdim=True), (8, 30, 1, 3)), (torch.randn(16, 8),), ce(16, 3)
    )


@fault("vanishing scale_break zero saturated dead", r"/exp.* .*", dull(1e-6))
def rbf_too_narrow() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(10, 3)
            self.register_buffer("centres", torch.randn(10, 16) * 3)

        def forward(self, x: Tensor) -> Tensor:
            d = (self.a(x)[:, None] - self.centres).pow(2).sum(-1)
            return self.b(torch.exp(-d))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


# ---- vanishing
@fault("vanishing", rf"cell.*{C} /.*", lambda g: g.norm("encoder.weight") < 1e-8)
def captioner_forgets() -> Built:
    m = Captioner(gain=0.35)
    return Built(m, (torch.randn(4, 12),), ce(4, 5))


@fault("vanishing", r"\d+", lambda g: g.ratio("0.weight", "40.weight") < 1e-5)
def deep_sigmoid_default_init() -> Built:
    parts: list[nn.Module] = [nn.Linear(20, 48), nn.Sigmoid()]
    for _ in range(19):
        parts += [nn.Linear(48, 48), nn.Sigmoid()]
    return Built(nn.Sequential(*parts, nn.Linear(48, 4)), (torch.randn(16, 20),), ce(16, 4))


@fault("vanishing", r"features\.\d+ .*", lambda g: g.ratio("features.0.weight", "head.weight") < 3e-5)
def vgg_without_norm() -> Built:
    return Built(Plain2d(18), (image(4),), ce(4, 6))


@fault("vanishing", r".*(lins|matmul|relu).*", lambda g: g.ratio("lins.0.weight", "head.weight") < 1e-5)
def deep_gcn_smooths() -> Built:
    return Built(GCN(22), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@fault("vanishing", r"blocks\..* head.* .*", lambda g: g.ratio("emb.weight", "head.weight") < 1e-4)
def gpt_without_residual() -> Built:
    return Built(GPT(10, residual=False, norm=False), (tokens(),), lm())


@fault("vanishing scale_break", r"/.* main.* gen.*", lambda g: g.norm("enter.weight") < 1e-8)
def hypernet_tiny_weights() -> Built:
    return Built(HyperNet(scale=1e-3), (torch.randn(8, 10), torch.randn(4)), sq)


@fault("vanishing", r"\d+ layers.* .*", lambda g: g.norm("0.weight") < 1e-6)
def gelu_mlp_std_002() -> Built:
    m = nn.Sequential(*[x for _ in range(8) for x in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 3))
    for p in m.parameters():
        nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(16, 64),), ce(16, 3))


@fault("vanishing", r".*", lambda g: g.ratio("net.0.weight", "net.36.weight") < 1e-4)
def autocast_sigmoid_chain() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *[x for _ in range(18) for x in (nn.Linear(32, 32), nn.Sigmoid())], nn.Linear(32, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    return Built(M(), (torch.randn(8, 32),), ce(8, 3))


@fault("vanishing", r".*dw.* .*", lambda g: g.ratio("stem.weight", "head.weight") < 1e-4)
def temporal_conv_batch_one() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv1d(4, 16, 3, padding=1)
            self.dw = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(16))
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            for conv in self.dw:
                h = torch.relu(conv(h))
            return self.head(h.mean(-1))

    return Built(M(), (torch.randn(1, 4, 40),), ce(1, 2))
