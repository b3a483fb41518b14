"""Healthy nets with odd contents: NaN and Inf that never reach the loss, gates that are closed on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import Reverse, ce, sq


def sparse_reward(case: Built, step: int) -> Built:
    weight = float(step % 4 == 3)
    return Built(case.model, case.args, lambda o: -(o.log_softmax(-1)[:, 0]).mean() * weight)


@healthy()
def nan_sentinel_in_idle_buffer() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("last_metric", torch.tensor(float("nan")))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def mask_as_frozen_parameter() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.mask = nn.Parameter(torch.full((6, 6), float("-inf")).triu(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 4 + self.mask
            return self.out(scores.softmax(-1) @ self.v(x))

    return Built(M(), (torch.randn(4, 6, 16),), sq)


@healthy()
def inf_in_a_row_never_looked_up() -> Built:
    m = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        m[0].weight[19] = float("-inf")
    return Built(m, (torch.randint(0, 19, (8, 4)),), ce(8, 3))


@healthy()
def one_token_sequences() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.q(x) @ self.k(x).transpose(1, 2) / 4).softmax(-1) @ self.v(x) + x)

    return Built(M(), (torch.randn(4, 1, 16),), sq)


@healthy(steps=14, each=sparse_reward)
def reward_only_now_and_then() -> Built:
    m = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    return Built(m, (torch.randn(16, 8),), lambda o: -(o.log_softmax(-1)[:, 0]).mean())


@healthy()
def output_named_but_not_in_the_loss() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = F.relu(self.body(x))
            return {"logits": self.head(h), "hidden": h, "labels": x.argmax(-1)}

    y = torch.randint(0, 3, (16,))
    return Built(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o["logits"], y))


# ---- healthy that look ill
@healthy()
def nan_input_imputed() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

        def forward(self, x: Tensor) -> Tensor:
            gone = torch.isnan(x)
            return self.net(torch.cat([torch.nan_to_num(x), gone.float()], -1))

    x = torch.randn(32, 8)
    x[torch.rand(32, 8) < 0.1] = float("nan")
    return Built(M(), (x,), ce(32, 2))


@healthy()
def additive_mask_argument() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out((self.q(x) @ self.k(x).transpose(1, 2) / 4 + mask).softmax(-1) @ self.v(x))

    mask = torch.zeros(4, 6, 6).masked_fill(torch.rand(4, 6, 6) < 0.3, float("-inf"))
    mask[:, :, 0] = 0
    return Built(M(), (torch.randn(4, 6, 16), mask), sq)


@healthy()
def observer_buffers_start_at_inf() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("low", torch.tensor(float("inf")))
            self.register_buffer("best", torch.tensor(float("-inf")))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def distance_inf_kernel_zero() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, d: Tensor) -> Tensor:
            return self.b(torch.exp(-d) @ F.relu(self.a(x)))

    d = torch.rand(16, 16)
    d[torch.rand(16, 16) < 0.5] = float("inf")
    d.fill_diagonal_(0)
    return Built(M(), (torch.randn(16, 8), d), ce(16, 3))


@healthy()
def domain_reversal() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.y, self.d = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.f(x)
            return self.y(h), self.d(Reverse.apply(h, 0.3))

    y, d = torch.randint(0, 3, (16,)), torch.randint(0, 2, (16,))
    return Built(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o[0], y) + F.cross_entropy(o[1], d))


@healthy()
def gradient_penalty_inside() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            t = torch.rand(len(a), 1)
            m = (t * a + (1 - t) * b).requires_grad_()
            (g,) = torch.autograd.grad(self.d(m).sum(), m, create_graph=True)
            return self.d(a).mean() - self.d(b).mean() + 10 * (g.norm(dim=-1) - 1).pow(2).mean()

    return Built(M(), (torch.randn(16, 8), torch.randn(16, 8)))


@healthy()
def accuracy_and_logs_in_forward() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.a(x))
            self.active = (h > 0).float().mean().item()
            o = self.b(h)
            self.last = o.detach()
            return F.cross_entropy(o, y), (o.argmax(-1) == y).float().mean()

    return Built(M(), (torch.randn(16, 8), torch.randint(0, 3, (16,))), lambda o: o[0])


@healthy()
def guidance_drops_the_condition() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cond, self.a, self.b = nn.Linear(4, 16), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, c: Tensor, keep: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x) + self.cond(c) * keep))

    return Built(M(), (torch.randn(4, 8), torch.randn(4, 4), torch.zeros(4, 1)), sq)


@healthy()
def stochastic_depth_drops_block() -> Built:
    class B(nn.Module):
        def __init__(self, keep: float) -> None:
            super().__init__()
            self.a, self.b, self.keep = nn.Linear(16, 32), nn.Linear(32, 16), keep

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.bernoulli(torch.full((len(x), 1), self.keep))
            return x + self.b(F.gelu(self.a(x))) * keep

    return Built(
        nn.Sequential(nn.Linear(8, 16), B(1.0), B(0.0), B(1.0), nn.Linear(16, 3)), (torch.randn(8, 8),), ce(8, 3)
    )


@healthy()
def maml_inner_step() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 1) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(torch.tanh(x @ self.w1) @ self.w2, y)
            g1, g2 = torch.autograd.grad(loss, (self.w1, self.w2), create_graph=True)
            return F.mse_loss(torch.tanh(x @ (self.w1 - 0.1 * g1)) @ (self.w2 - 0.1 * g2), y)

    return Built(M(), (torch.randn(16, 8), torch.randn(16, 1)))


@healthy()
def padded_sample_in_sdpa() -> Built:
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
    return Built(M(), (torch.randn(4, 6, 16), keep), ce(4, 3))


@healthy()
def sigmoid_gate_closed_by_design() -> Built:
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

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def sampled_softmax_hard_attention() -> Built:
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

    return Built(M(), (torch.randn(16, 8), torch.randint(0, 3, (16,))), trains=False)


@healthy()
def quantised_with_learned_scale() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.s, self.b = nn.Linear(8, 16), nn.Parameter(torch.tensor(0.1)), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = (self.a(x) / self.s).clamp(-8, 7)
            return self.b((h + (h.round() - h).detach()) * self.s)

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def surrogate_spikes() -> Built:
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

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def relu_autoencoder_bottleneck_of_two() -> Built:
    x = torch.randn(32, 12)
    m = nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh(), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 12)
    )
    return Built(m, (x,), lambda o: F.mse_loss(o, x))


@healthy()
def loss_of_a_summed_video() -> Built:
    m = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 3, padding=1))
    y = torch.randn(2, 3, 6, 24, 24)
    return Built(m, (torch.randn(2, 3, 6, 24, 24),), lambda o: F.mse_loss(o, y, reduction="sum"))


@healthy()
def confident_trained_attention() -> Built:
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
    return Built(m, (i,), lambda o: F.cross_entropy(o.flatten(0, 1), target.flatten()))
