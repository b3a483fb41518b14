"""A second wave: bugs that are easy to make and hard to see, and healthy nets that look ill."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.program import Case, healthy
from tests.faults_heldout.seeded1 import ce


@healthy("looks ill")
def maml_inner_step() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 1) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(torch.tanh(x @ self.w1) @ self.w2, y)
            g1, g2 = torch.autograd.grad(loss, (self.w1, self.w2), create_graph=True)
            return F.mse_loss(torch.tanh(x @ (self.w1 - 0.1 * g1)) @ (self.w2 - 0.1 * g2), y)

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 1)))


@healthy("looks ill")
def padded_sample_in_sdpa() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, :].expand(-1, x.shape[1], -1))
            return self.out((h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1))

    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1, 3:] = False
    keep[2] = False
    return Case(M(), (torch.randn(4, 6, 16), keep), ce(4, 3))


@healthy("looks ill")
def sigmoid_gate_closed_by_design() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.gate, self.f, self.b = (
                nn.Linear(8, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 3),
            )
            nn.init.constant_(self.gate.bias, -4.0)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h + torch.sigmoid(self.gate(h)) * self.f(h))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def sampled_softmax_hard_attention() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.v, self.out, self.base = (
                nn.Linear(8, 6),
                nn.Embedding(6, 16),
                nn.Linear(16, 3),
                nn.Linear(8, 1),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            dist = torch.distributions.Categorical(logits=self.q(x))
            a = dist.sample()
            loss = F.cross_entropy(self.out(self.v(a)), y, reduction="none")
            b = self.base(x)[:, 0]
            return (
                loss.mean() + (dist.log_prob(a) * (loss - b).detach()).mean() + 0.5 * (b - loss.detach()).pow(2).mean()
            )

    return Case(M(), (torch.randn(16, 8), torch.randint(0, 3, (16,))), trains=False)


@healthy("looks ill")
def quantised_with_learned_scale() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.s, self.b = nn.Linear(8, 16), nn.Parameter(torch.tensor(0.1)), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = (self.a(x) / self.s).clamp(-8, 7)
            return self.b((h + (h.round() - h).detach()) * self.s)

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def surrogate_spikes() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            v, out = torch.zeros(len(x), 32), 0.0
            for _ in range(8):
                v = 0.9 * v + self.a(x)
                soft = torch.sigmoid(4 * (v - 0.5))
                s = soft + ((v > 0.5).float() - soft).detach()
                v = v - 0.5 * s.detach()
                out = out + self.b(s)
            return out / 8

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def relu_autoencoder_bottleneck_of_two() -> Case:
    x = torch.randn(32, 12)
    m = nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh(), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 12)
    )
    return Case(m, (x,), lambda o: F.mse_loss(o, x))


@healthy("looks ill")
def loss_of_a_summed_video() -> Case:
    m = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 3, padding=1))
    y = torch.randn(2, 3, 6, 24, 24)
    return Case(m, (torch.randn(2, 3, 6, 24, 24),), lambda o: F.mse_loss(o, y, reduction="sum"))


@healthy("looks ill")
def confident_trained_attention() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (
                nn.Embedding(12, 16),
                nn.Embedding(12, 16),
                nn.Embedding(12, 16),
                nn.Linear(16, 12),
            )

        def forward(self, i: Tensor) -> Tensor:
            s = self.q(i) @ self.k(i).transpose(1, 2) / 4
            return self.out(s.softmax(-1) @ self.v(i))

    i = torch.stack([torch.randperm(12) for _ in range(8)])
    m = M()
    opt = torch.optim.Adam(m.parameters(), lr=0.02)
    target = (i + 1) % 12
    for _ in range(120):
        opt.zero_grad()
        F.cross_entropy(m(i).flatten(0, 1), target.flatten()).backward()
        opt.step()
    return Case(m, (i,), lambda o: F.cross_entropy(o.flatten(0, 1), target.flatten()))
