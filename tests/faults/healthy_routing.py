"""Healthy nets: adapters, experts, scans and heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, HyperNet, Lora, MoE, ce, image, lm, sq, tokens, trained


@healthy()
def detection_head_focal_masks() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
            )
            self.cls, self.box = nn.Conv2d(32, 6, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
            nn.init.constant_(self.cls.bias, -4.6)
            nn.init.normal_(self.cls.weight, std=0.01)
            nn.init.normal_(self.box.weight, std=0.01)

        def forward(self, x: Tensor, target: Tensor, pos: Tensor) -> Tensor:
            h = self.body(x)
            c, b = self.cls(h), self.box(h)
            p = torch.sigmoid(c)
            ce = F.binary_cross_entropy_with_logits(c, target, reduction="none")
            focal = (0.25 * (1 - (p * target + (1 - p) * (1 - target))) ** 2 * ce).sum()
            return (focal + F.smooth_l1_loss(b, torch.ones_like(b), reduction="none").mul(pos).sum()) / pos.sum().clamp(
                min=1
            )

    target = torch.zeros(2, 6, 8, 8)
    target[:, 1, 3, 4] = 1
    pos = torch.zeros(2, 1, 8, 8)
    pos[:, :, 3, 4] = 1
    return Built(M(), (image(2, 32), target, pos))


@healthy()
def lora_on_frozen_gpt() -> Built:
    m = GPT(3).requires_grad_(False)
    for b in m.blocks:
        b.qkv = Lora(b.qkv)
        b.down = Lora(b.down)
    return Built(m, (tokens(),), lm())


@healthy()
def lora_after_steps() -> Built:
    return trained(lora_on_frozen_gpt(), 20)


@healthy()
def adapters_zero_init() -> Built:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(32, 4), nn.Linear(4, 32)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(F.relu(self.down(x)))

    m = GPT(3).requires_grad_(False)
    for b in m.blocks:
        b.down = nn.Sequential(b.down, Adapter())
    return Built(m, (tokens(),), lm())


@healthy()
def moe_top_one_idle_expert() -> Built:
    class M(MoE):
        def forward(self, x: Tensor) -> Tensor:
            p = self.router(x).softmax(-1)
            best, which = p[:, :3].topk(1, -1)
            y = torch.zeros_like(x)
            for i in range(4):
                rows = (which[:, 0] == i).nonzero()[:, 0]
                if len(rows):
                    y = y.index_add(0, rows, best[rows] * self.experts[i](x[rows]))
            return self.head(x + y)

    return Built(M(), (torch.randn(16, 12),), ce(16, 3))


@healthy()
def moe_dense() -> Built:
    return Built(MoE(), (torch.randn(16, 12),), sq)


@healthy()
def hypernetwork() -> Built:
    return Built(HyperNet(depth=2), (torch.randn(8, 10), torch.randn(4)), sq)


@healthy()
def deq_loop() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.f, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            z, u = torch.zeros(len(x), 16), self.inject(x)
            for _ in range(25):
                z = torch.tanh(self.f(z) + u)
            return self.out(z)

    return Built(M(), (torch.randn(8, 8),), sq)


@healthy()
def mlstm_gates() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gates, self.out = nn.Linear(8, 36), nn.Linear(8, 2), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            i, f = self.gates(x).unbind(-1)
            c, n, m = torch.zeros(len(x), 12, 12), torch.zeros(len(x), 12), torch.zeros(len(x), 1)
            for t in range(x.shape[1]):
                lf = F.logsigmoid(f[:, t, None])
                m2 = torch.maximum(lf + m, i[:, t, None])
                a, b = torch.exp(lf + m - m2), torch.exp(i[:, t, None] - m2)
                c = a[..., None] * c + b[..., None] * v[:, t, :, None] * k[:, t, None] / 12**0.5
                n, m = a * n + b * k[:, t], m2
                h = (c @ q[:, t, :, None])[..., 0] / (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1)
            return self.out(h)

    return Built(M(), (torch.randn(4, 20, 8),), ce(4, 3))


@healthy()
def selective_scan() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.dt, self.bc, self.out = (
                nn.Linear(8, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 8),
            )
            self.log_a = nn.Parameter(torch.arange(1, 9.0).log().repeat(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            u = F.silu(self.inp(x))
            dt = F.softplus(self.dt(u) - 4)
            b, c = self.bc(u).chunk(2, -1)
            a = -self.log_a.exp()
            h, ys = torch.zeros(len(x), 16, 8), []
            for t in range(x.shape[1]):
                h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
                ys.append((h * c[:, t, None]).sum(-1))
            return self.out(torch.stack(ys, 1) + u)

    return Built(M(), (torch.randn(3, 24, 8),), sq)


@healthy()
def capsules_routing() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prim, self.w = nn.Conv2d(3, 16, 5, 2), nn.Parameter(torch.randn(1, 256, 4, 6, 4) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            u = self.squash(self.prim(x).flatten(2).reshape(len(x), 256, 4))
            hat = (self.w @ u[:, :, None, :, None])[..., 0]
            b = torch.zeros(len(x), 256, 4, 1)
            for r in range(3):
                c = b.softmax(2)
                v = self.squash((c * hat).sum(1, keepdim=True))
                if r < 2:
                    b = b + (hat.detach() * v.detach()).sum(-1, keepdim=True)
            return (v[:, 0].pow(2).sum(-1) + 1e-8).sqrt()

        @staticmethod
        def squash(s: Tensor) -> Tensor:
            n = s.pow(2).sum(-1, keepdim=True)
            return n / (1 + n) * s / (n + 1e-8).sqrt()

    hot = F.one_hot(torch.randint(0, 4, (3,)), 4).float()
    return Built(
        M(), (image(3),), lambda v: (hot * F.relu(0.9 - v) ** 2 + 0.5 * (1 - hot) * F.relu(v - 0.1) ** 2).sum(1).mean()
    )


@healthy()
def siren() -> Built:
    class Sine(nn.Module):
        def __init__(self, a: int, b: int, first: bool = False) -> None:
            super().__init__()
            self.lin = nn.Linear(a, b)
            bound = 1 / a if first else (6 / a) ** 0.5 / 30
            nn.init.uniform_(self.lin.weight, -bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(30 * self.lin(x))

    y = torch.rand(64, 3)
    return Built(
        nn.Sequential(Sine(2, 48, True), Sine(48, 48), Sine(48, 48), Sine(48, 48), nn.Linear(48, 3)),
        (torch.rand(64, 2) * 2 - 1,),
        lambda o: F.mse_loss(o, y),
    )


@healthy()
def nerf_compositing() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(39, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, rays: Tensor) -> Tensor:
            f = 2.0 ** torch.arange(6)
            e = torch.cat([rays, *(fn(rays * k) for k in f for fn in (torch.sin, torch.cos))], -1)
            out = self.net(e)
            sigma, rgb = F.relu(out[..., 3] + 0.1), torch.sigmoid(out[..., :3])
            alpha = 1 - torch.exp(-sigma * 0.1)
            trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
            return ((trans * alpha)[..., None] * rgb).sum(1)

    y = torch.rand(10, 3)
    return Built(M(), (torch.rand(10, 16, 3),), lambda o: F.mse_loss(o, y))


@healthy()
def tabular_embeddings() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embs = nn.ModuleList(nn.Embedding(n, 4) for n in (7, 300, 12))
            self.bn, self.net = (
                nn.BatchNorm1d(5),
                nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1)),
            )

        def forward(self, c: Tensor, x: Tensor) -> Tensor:
            return self.net(torch.cat([*(e(c[:, i]) for i, e in enumerate(self.embs)), self.bn(x)], 1))

    y = torch.randint(0, 2, (32, 1)).float()
    return Built(
        M(),
        (torch.randint(0, 7, (32, 3)), torch.randn(32, 5) * 1000),
        lambda o: F.binary_cross_entropy_with_logits(o, y),
    )


@healthy()
def actor_critic_masks() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
            self.pi, self.v = nn.Linear(32, 5), nn.Linear(32, 1)
            nn.init.orthogonal_(self.pi.weight, 0.01)

        def forward(self, x: Tensor, legal: Tensor, ret: Tensor) -> Tensor:
            h = self.body(x)
            dist = torch.distributions.Categorical(logits=self.pi(h).masked_fill(~legal, float("-1e9")))
            v = self.v(h)[:, 0]
            a = dist.probs.detach().argmax(-1)
            return (
                -(dist.log_prob(a) * (ret - v.detach())).mean()
                + 0.5 * F.mse_loss(v, ret)
                - 0.01 * dist.entropy().mean()
            )

    legal = torch.rand(32, 5) > 0.4
    legal[:, 0] = True
    return Built(M(), (torch.randn(32, 6), legal, torch.randn(32)), trains=False)


@healthy()
def policy_with_minus_inf() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))

        def forward(self, x: Tensor, legal: Tensor) -> Tensor:
            return (self.net(x) + legal.float().log()).log_softmax(-1)[:, 0]

    legal = torch.rand(32, 5) > 0.5
    legal[:, 0] = True
    return Built(M(), (torch.randn(32, 6), legal), lambda o: -o.mean())


@healthy()
def ctc_speech() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn, self.out = (
                nn.Conv1d(8, 16, 3, padding=1),
                nn.GRU(16, 16, batch_first=True, bidirectional=True),
                nn.Linear(32, 6),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(F.relu(self.conv(x)).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)

    y = torch.randint(1, 6, (3, 5))
    return Built(
        M(),
        (torch.randn(3, 8, 20),),
        lambda o: F.ctc_loss(o, y, torch.tensor([20, 18, 15]), torch.tensor([5, 4, 2]), zero_infinity=True),
    )
