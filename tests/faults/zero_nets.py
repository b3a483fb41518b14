"""Gradients that are exactly zero in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import Net, Reverse, ce, dull, sq


@fault("zero saturated", ".*softmax.*", lambda g: g.norm("score.weight") < 1e-8)
def softmax_over_wrong_axis() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.out = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            w = torch.softmax(self.score(h), dim=-1)
            return self.out((w * h).sum(1))

    return Built(M(), (torch.randn(4, 7, 8),), ce(4, 3))


@fault("zero vanishing scale_break saturated", ".*norm.*", dull())
def layer_norm_over_one_feature() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 1), nn.LayerNorm(1), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("zero dead", r"/where.* /.*", lambda g: g.norm("f.weight") == 0)
def where_never_taken() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.f, self.b = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(torch.where(h > 1.5, self.f(h), h))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("zero", r".*Reverse.*|.*apply.*", dull())
def reversal_with_rate_zero() -> Built:
    return Built(Net(lambda h: torch.tanh(Reverse.apply(h, 0.0))), (torch.randn(16, 8),), ce(16, 3))


@fault("zero", r".*mul.*", lambda g: g.norm("a.weight") == 0)
def gate_buffer_of_zeros() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("gate", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.gate)

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


# ---- zero
@fault("zero", ".*round", lambda g: g.norm("0.weight") == 0)
def quantised_latent() -> Built:
    class Q(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.round(x * 8) / 8

    return Built(nn.Sequential(nn.Linear(10, 6), nn.Tanh(), Q(), nn.Linear(6, 10)), (torch.randn(8, 10),), sq)


@fault("zero", "/floor", lambda g: g.norm("warp.weight") == 0)
def floor_of_coordinates() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.warp, self.field = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            cell = torch.floor(self.warp(x) * 16)
            return self.field(torch.sin(cell))

    return Built(M(), (torch.rand(50, 3),), sq)


@fault("zero", "/sign", lambda g: g.norm("a.weight") == 0)
def binary_activations() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).sign())

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("zero", r"\d .*weight", lambda g: g.norm("0.weight") == 0 and g.norm("2.weight") == 0)
def all_weights_zero() -> Built:
    m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    for p in m.parameters():
        nn.init.zeros_(p)
    return Built(m, (torch.randn(8, 8),), ce(8, 3))


@fault("zero", "/mul", lambda g: g.norm("a.weight") == 0)
def mask_inverted() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = (torch.arange(5)[None] >= lengths[:, None]).float()[..., None]
            return self.b((F.gelu(self.a(x)) * mask).sum(1))

    return Built(M(), (torch.randn(4, 5, 8), torch.full((4,), 5)), ce(4, 3))


@fault("zero saturated", "/clamp .*clamp.*", lambda g: g.norm("dec.weight") == 0)
def image_clamped_outside() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dec = nn.Linear(8, 48)

        def forward(self, z: Tensor) -> Tensor:
            return torch.clamp(self.dec(z) * 10 + 128, 0, 1)

    return Built(M(), (torch.randn(8, 8),), lambda o: F.mse_loss(o, torch.zeros_like(o)))


@fault("zero", "2", lambda g: g.norm("0.weight") == 0)
def dropout_of_everything() -> Built:
    return Built(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(1.0), nn.Linear(16, 3)), (torch.randn(8, 8),), ce(8, 3)
    )


@fault("zero", "/trunc /long /to /ceil", lambda g: g.norm("a.weight") == 0)
def fake_quant_ceil() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) * 127).ceil().mean(-1) / 127)

    return Built(M(), (torch.randn(4, 4, 12),), ce(4, 3))
