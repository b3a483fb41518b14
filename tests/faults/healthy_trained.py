"""Healthy nets: deep ones, trained ones, and some over several steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, Lora, MoE, ResNet, ce, image, lm, sq, tokens, trained


def fresh(case: Built, step: int) -> Built:
    return Built(case.model, (torch.randint(0, 40, (3, 12)),), case.loss)


@healthy()
def checkpointed_blocks() -> Built:
    class M(GPT):
        def forward(self, i: Tensor) -> Tensor:
            x = self.emb(i) + self.pos[: i.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    return Built(M(3), (tokens(),), lm())


@healthy()
def he_relu_forty() -> Built:
    m = nn.Sequential(*[x for _ in range(40) for x in (nn.Linear(96, 96), nn.ReLU())], nn.Linear(96, 4))
    for p in m.parameters():
        nn.init.kaiming_normal_(p) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(32, 96),), ce(32, 4))


@healthy()
def selu_thirty() -> Built:
    m = nn.Sequential(*[x for _ in range(30) for x in (nn.Linear(64, 64), nn.SELU())], nn.Linear(64, 4))
    for p in m.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(32, 64),), ce(32, 4))


@healthy()
def prenorm_residual_sixty() -> Built:
    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.a, self.b = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(F.gelu(self.a(self.n(x))))

    return Built(
        nn.Sequential(nn.Linear(8, 24), *[B() for _ in range(60)], nn.LayerNorm(24), nn.Linear(24, 3)),
        (torch.randn(8, 8),),
        ce(8, 3),
    )


@healthy()
def linear_fit_converged() -> Built:
    x = torch.randn(64, 6)
    y = x @ torch.randn(6, 1) + 0.5
    return Built(
        trained(Built(nn.Linear(6, 1), (x,), lambda o: F.mse_loss(o, y)), 1500, 0.02).model,
        (x,),
        lambda o: F.mse_loss(o, y),
        trains=False,
    )


@healthy()
def classifier_converged() -> Built:
    x, y = torch.randn(32, 10), torch.randint(0, 3, (32,))
    m = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return Built(
        trained(Built(m, (x,), lambda o: F.cross_entropy(o, y)), 400).model,
        (x,),
        lambda o: F.cross_entropy(o, y),
        trains=False,
    )


@healthy()
def autoencoder_trained_relu() -> Built:
    x = torch.rand(64, 20)
    m = nn.Sequential(
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
        nn.ReLU(),
        nn.Linear(4, 64),
        nn.ReLU(),
        nn.Linear(64, 20),
        nn.Sigmoid(),
    )
    return trained(Built(m, (x,), lambda o: F.binary_cross_entropy(o, x)), 200)


@healthy()
def binary_classifier_sigmoid_confident() -> Built:
    x = torch.randn(64, 5)
    y = (x[:, :1] > 0).float()
    m = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
    return trained(Built(m, (x,), lambda o: F.binary_cross_entropy(o, y)), 400, 0.01)


@healthy()
def moe_trained() -> Built:
    y = torch.randint(0, 3, (16,))
    return trained(Built(MoE(), (torch.randn(16, 12),), lambda o: F.cross_entropy(o, y)), 100)


@healthy()
def mlp_single_sample() -> Built:
    m = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    return Built(m, (torch.randn(1, 10),), lambda o: o.sum().pow(2))


@healthy()
def dropout_ninety() -> Built:
    m = nn.Sequential(
        nn.Linear(10, 128),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(128, 3),
    )
    return Built(m, (torch.randn(16, 10),), ce(16, 3), trains=False)


@healthy()
def auxiliary_loss_small() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.body(x))
            return self.a(h), self.b(h)

    y = torch.randint(0, 3, (16,))
    return Built(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o[0], y) + 0.003 * o[1].pow(2).mean())


@healthy()
def mobile_se_hardswish() -> Built:
    class SE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x * F.hardsigmoid(self.b(F.relu(self.a(x.mean((2, 3), keepdim=True)))))

    m = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2),
        nn.BatchNorm2d(24),
        nn.Hardswish(),
        SE(),
        nn.Conv2d(24, 24, 3, groups=24),
        nn.BatchNorm2d(24),
        nn.ReLU6(),
        SE(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    return Built(m, (image(8),), ce(8, 4))


@healthy()
def prelu_maxout_net() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b, self.c = nn.Linear(8, 24), nn.PReLU(24), nn.Linear(24, 96), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.act(self.a(x))).view(-1, 24, 4).amax(-1))

    return Built(M(), (torch.randn(32, 8),), ce(32, 3))


@healthy()
def top_k_pooling_soft() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.score, self.out = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.lin(x))
            s, i = self.score(h)[..., 0].topk(3, -1)
            picked = torch.gather(h, 1, i[..., None].expand(-1, -1, 16))
            return self.out((picked * torch.sigmoid(s)[..., None]).sum(1))

    return Built(M(), (torch.randn(8, 10, 8),), ce(8, 3))


@healthy()
def rope_rmsnorm_swiglu() -> Built:
    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2, self.qkv, self.o = (
                nn.RMSNorm(32),
                nn.RMSNorm(32),
                nn.Linear(32, 96, bias=False),
                nn.Linear(32, 32, bias=False),
            )
            self.g, self.u, self.d = (
                nn.Linear(32, 64, bias=False),
                nn.Linear(32, 64, bias=False),
                nn.Linear(64, 32, bias=False),
            )

        def rope(self, x: Tensor) -> Tensor:
            t = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(4) / 4)
            a, b = x.chunk(2, -1)
            return torch.cat([a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos()], -1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
            x = x + self.o(a.transpose(1, 2).flatten(2))
            n = self.n2(x)
            return x + self.d(F.silu(self.g(n)) * self.u(n))

    m = nn.Sequential(nn.Embedding(40, 32), *[B() for _ in range(4)], nn.RMSNorm(32), nn.Linear(32, 40, bias=False))
    for p in m.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    return Built(m, (tokens(),), lm())


@healthy()
def deep_resnet_thirty_blocks() -> Built:
    return Built(ResNet(16), (image(4, 16),), ce(4, 5), trains=False)


@healthy()
def half_sparse_bag() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(5000, 8, mode="mean", sparse=True), nn.Linear(8, 2)

        def forward(self, i: Tensor) -> Tensor:
            return self.out(self.bag(i))

    return Built(M(), (torch.randint(0, 5000, (8, 6)),), ce(8, 2), trains=False)


@healthy()
def siamese_margin_mostly_zero() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(8))

        def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
            d = (self.t(a) - self.t(b)).pow(2).sum(-1)
            return (same * d + (1 - same) * F.relu(1 - (d + 1e-9).sqrt()) ** 2).mean()

    m = M()
    m.t(image(2))
    return Built(m, (image(6), image(6), torch.tensor([1.0, 0, 0, 0, 1, 0])))


@healthy()
def double_where_safe_sqrt() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(6, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            d2 = ((h[:, None] - h[None]) ** 2).sum(-1)
            ok = d2 > 0
            d = torch.where(ok, torch.where(ok, d2, torch.ones(())).sqrt(), torch.zeros(()))
            return self.out(torch.exp(-d) @ h)

    return Built(M(), (torch.randn(6, 6),), sq)


@healthy()
def quantile_huber_heads() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 9))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            d = y - self.net(x)
            tau = torch.arange(0.1, 1.0, 0.1)
            return (torch.abs(tau - (d < 0).float()) * F.huber_loss(d, torch.zeros_like(d), reduction="none")).mean()

    return Built(M(), (torch.randn(32, 8), torch.randn(32, 1)))


@healthy(steps=36)
def mlp_thirty_six_steps() -> Built:
    y = torch.randint(0, 3, (32,))
    return Built(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
        (torch.randn(32, 8),),
        lambda o: F.cross_entropy(o, y),
    )


@healthy(steps=30, each=fresh)
def gpt_fresh_batches() -> Built:
    return Built(GPT(2), (tokens(),), lm(), trains=False)


@healthy(steps=12)
def zero_gamma_over_steps() -> Built:
    return Built(ResNet(2, zero_gamma=True), (image(8),), ce(8, 5))


@healthy(steps=12)
def lora_over_steps() -> Built:
    m = GPT(2).requires_grad_(False)
    for b in m.blocks:
        b.qkv = Lora(b.qkv)
    return Built(m, (tokens(),), lm(), trains=False)
