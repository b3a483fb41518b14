"""Healthy nets as people write them: nothing here deserves a warning."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.faults_heldout.nets import (
    GCN,
    GPT,
    Highway,
    HyperNet,
    MoE,
    ResNet,
    UNet,
    adjacency,
    image,
    lm,
    tokens,
)
from tests.faults_heldout.program import Case, healthy, scalar
from tests.faults_heldout.seeded import ce, sq


def trained(case: Case, steps: int = 60, lr: float = 3e-3) -> Case:
    """The same after some steps of Adam."""
    opt = torch.optim.Adam([p for p in case.model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        scalar(case, case.model(*case.args, **case.kwargs)).backward()
        opt.step()
    case.model.zero_grad(set_to_none=True)
    return case


class Wrap(nn.Module):
    """A module around a function of its parts, for short controls."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@healthy()
def small_resnet() -> Case:
    return Case(ResNet(), (image(8),), ce(8, 5))


@healthy()
def zero_gamma_resnet() -> Case:
    return Case(ResNet(4, zero_gamma=True), (image(8),), ce(8, 5))


@healthy("eval")
def resnet_eval_mode() -> Case:
    case = trained(Case(ResNet(), (image(8),), ce(8, 5)), 20)
    case.model.eval()
    return case


@healthy("batch")
def resnet_batch_two() -> Case:
    return Case(ResNet(), (image(2),), ce(2, 5))


@healthy()
def diffusion_unet_zero_out() -> Case:
    noise = torch.randn(4, 3, 16, 16)
    return Case(UNet(zero=True), (image(4, 16), torch.rand(4)), lambda o: F.mse_loss(o, noise))


@healthy("trained")
def diffusion_unet_trained() -> Case:
    noise = torch.randn(4, 3, 16, 16)
    return trained(Case(UNet(zero=True), (image(4, 16), torch.rand(4)), lambda o: F.mse_loss(o, noise)))


@healthy()
def gpt_tied() -> Case:
    return Case(GPT(6, tied=True), (tokens(),), lm())


@healthy()
def gpt_post_norm() -> Case:
    return Case(GPT(6, post=True), (tokens(),), lm())


@healthy("scaled")
def gpt_loss_sum_65536() -> Case:
    loss = lm()
    return Case(GPT(4), (tokens(),), lambda o: loss(o) * 65536 * 36)


@healthy("scaled")
def gpt_loss_1e_minus_6() -> Case:
    loss = lm()
    return Case(GPT(4), (tokens(),), lambda o: loss(o) * 1e-6)


@healthy("trained")
def gpt_overfitted() -> Case:
    return trained(Case(GPT(3, act=F.relu), (tokens(),), lm()), 150)


@healthy("batch")
def gpt_one_sequence() -> Case:
    y = torch.randint(0, 40, (5,))
    return Case(GPT(2), (tokens(1, 5),), lambda o: F.cross_entropy(o.flatten(0, 1), y))


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@healthy("precision")
def gpt_bf16_autocast() -> Case:
    return Case(Autocast(GPT(3)), (tokens(),), lm())


@healthy("precision")
def resnet_bf16_weights() -> Case:
    return Case(ResNet().bfloat16(), (image(8).bfloat16(),), ce(8, 5))


@healthy("precision")
def half_mlp_scaled() -> Case:
    m = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).half()
    y = torch.randn(64, 8)
    return Case(m, (torch.randn(64, 16).half(),), lambda o: F.mse_loss(o.float(), y) * 1024, trains=False)


@healthy("precision")
def double_lstm() -> Case:
    m = LstmTagger().double()
    return Case(m, (torch.randint(1, 20, (4, 9)), torch.tensor([9, 6, 4, 1])), ce(36, 5))


class LstmTagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 12, padding_idx=0)
        self.rnn, self.out = kind(12, 16, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(32, 5)

    def forward(self, i: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.emb(i), n, batch_first=True)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=i.shape[1])
        return self.out(h).flatten(0, 1)


@healthy()
def bilstm_packed_padding() -> Case:
    i, n = torch.randint(1, 20, (4, 9)), torch.tensor([9, 6, 4, 1])
    i[torch.arange(9)[None] >= n[:, None]] = 0
    return Case(LstmTagger(), (i, n), ce(36, 5))


@healthy()
def gru_seq2seq_attention() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.src, self.tgt = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(20, 16)
            self.enc, self.dec, self.key = nn.GRU(16, 24, batch_first=True), nn.GRUCell(40, 24), nn.Linear(24, 24)
            self.out = nn.Linear(24, 20)

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            mem, h = self.enc(self.src(s))
            h, outs = h[0], []
            mask = s == 0
            for k in range(t.shape[1]):
                score = (self.key(mem) @ h[..., None])[..., 0].masked_fill(mask, float("-inf"))
                ctx = (score.softmax(-1)[:, None] @ mem)[:, 0]
                h = self.dec(torch.cat([self.tgt(t[:, k]), ctx], -1), h)
                outs.append(self.out(h))
            return torch.stack(outs, 1)

    s = torch.randint(1, 20, (4, 8))
    s[2, 5:] = 0
    t = torch.randint(0, 20, (4, 7))
    return Case(M(), (s, t), lambda o: F.cross_entropy(o.flatten(0, 1), t.flatten()))


@healthy()
def lstm_hundred_steps() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(4, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = c = torch.zeros(x.shape[0], 16)
            for k in range(x.shape[1]):
                h, c = self.cell(x[:, k], (h, c))
            return self.out(h)

    return Case(M(), (torch.randn(4, 60, 4),), sq)


@healthy()
def vae() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.mu, self.lv = (
                nn.Sequential(nn.Linear(20, 32), nn.ReLU()),
                nn.Linear(32, 4),
                nn.Linear(32, 4),
            )
            self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 20))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            mu, lv = self.mu(h), self.lv(h)
            y = self.dec(mu + torch.randn_like(mu) * (0.5 * lv).exp())
            kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(-1).mean()
            return F.binary_cross_entropy_with_logits(y, (x > 0).float(), reduction="sum") / len(x) + kl

    return Case(M(), (torch.randn(32, 20),))


@healthy()
def gan_generator_through_frozen_critic() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
            self.d = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
            self.d.requires_grad_(False)

        def forward(self, z: Tensor) -> Tensor:
            return F.softplus(-self.d(self.g(z))).mean()

    return Case(M(), (torch.randn(16, 8),))


@healthy()
def gan_critic_detaches_fakes() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
            self.d = nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)
            )

        def forward(self, z: Tensor, real: Tensor) -> Tensor:
            fake = self.g(z).detach()
            return F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 16)))


@healthy()
def realnvp_zero_init() -> Case:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6))
            nn.init.zeros_(self.net[2].weight)
            nn.init.zeros_(self.net[2].bias)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, -1)
            s, t = self.net(a).chunk(2, -1)
            s = torch.tanh(s)
            return torch.cat([b * s.exp() + t, a], -1), s.sum(-1)

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Coupling() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            logdet = 0.0
            for step in self.steps:
                x, d = step(x)
                logdet = logdet + d
            return (0.5 * x.pow(2).sum(-1) - logdet).mean()

    return Case(M(), (torch.randn(32, 6) * 2 + 1,))


@healthy()
def triplet_with_easy_ones() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
            return F.triplet_margin_loss(self.net(a), self.net(p), self.net(n), margin=0.5)

    a = torch.randn(32, 10)
    return Case(M(), (a, a + 0.3 * torch.randn(32, 10), torch.randn(32, 10)))


@healthy()
def contrastive_clip_scale() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = (
                nn.Linear(12, 16),
                nn.Linear(9, 16),
                nn.Parameter(torch.tensor(math.log(1 / 0.07))),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = (
                self.scale.exp().clamp(max=100) * F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t()
            )
            t = torch.arange(len(x))
            return (F.cross_entropy(logits, t) + F.cross_entropy(logits.t(), t)) / 2

    return Case(M(), (torch.randn(16, 12), torch.randn(16, 9)))


@healthy()
def detection_head_focal_masks() -> Case:
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
            return (
                focal + F.smooth_l1_loss(b, torch.ones_like(b), reduction="none").mul(pos).sum()
            ) / pos.sum().clamp(min=1)

    target = torch.zeros(2, 6, 8, 8)
    target[:, 1, 3, 4] = 1
    pos = torch.zeros(2, 1, 8, 8)
    pos[:, :, 3, 4] = 1
    return Case(M(), (image(2, 32), target, pos))


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(r, base.in_features) * 0.02),
            nn.Parameter(torch.zeros(base.out_features, r)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * (x @ self.a.t()) @ self.b.t()


@healthy()
def lora_on_frozen_gpt() -> Case:
    m = GPT(3).requires_grad_(False)
    for b in m.blocks:
        b.qkv = Lora(b.qkv)
        b.down = Lora(b.down)
    return Case(m, (tokens(),), lm())


@healthy("trained")
def lora_after_steps() -> Case:
    return trained(lora_on_frozen_gpt(), 20)


@healthy()
def adapters_zero_init() -> Case:
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
    return Case(m, (tokens(),), lm())


@healthy()
def moe_top_one_idle_expert() -> Case:
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

    return Case(M(), (torch.randn(16, 12),), ce(16, 3))


@healthy()
def moe_dense() -> Case:
    return Case(MoE(), (torch.randn(16, 12),), sq)


@healthy()
def hypernetwork() -> Case:
    return Case(HyperNet(depth=2), (torch.randn(8, 10), torch.randn(4)), sq)


@healthy()
def deq_loop() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.f, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            z, u = torch.zeros(len(x), 16), self.inject(x)
            for _ in range(25):
                z = torch.tanh(self.f(z) + u)
            return self.out(z)

    return Case(M(), (torch.randn(8, 8),), sq)


@healthy()
def mlstm_gates() -> Case:
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

    return Case(M(), (torch.randn(4, 20, 8),), ce(4, 3))


@healthy()
def selective_scan() -> Case:
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

    return Case(M(), (torch.randn(3, 24, 8),), sq)


@healthy()
def capsules_routing() -> Case:
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
    return Case(
        M(), (image(3),), lambda v: (hot * F.relu(0.9 - v) ** 2 + 0.5 * (1 - hot) * F.relu(v - 0.1) ** 2).sum(1).mean()
    )


@healthy()
def siren() -> Case:
    class Sine(nn.Module):
        def __init__(self, a: int, b: int, first: bool = False) -> None:
            super().__init__()
            self.lin = nn.Linear(a, b)
            bound = 1 / a if first else (6 / a) ** 0.5 / 30
            nn.init.uniform_(self.lin.weight, -bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(30 * self.lin(x))

    y = torch.rand(64, 3)
    return Case(
        nn.Sequential(Sine(2, 48, True), Sine(48, 48), Sine(48, 48), Sine(48, 48), nn.Linear(48, 3)),
        (torch.rand(64, 2) * 2 - 1,),
        lambda o: F.mse_loss(o, y),
    )


@healthy()
def nerf_compositing() -> Case:
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
    return Case(M(), (torch.rand(10, 16, 3),), lambda o: F.mse_loss(o, y))


@healthy()
def tabular_embeddings() -> Case:
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
    return Case(
        M(),
        (torch.randint(0, 7, (32, 3)), torch.randn(32, 5) * 1000),
        lambda o: F.binary_cross_entropy_with_logits(o, y),
    )


@healthy()
def actor_critic_masks() -> Case:
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
    return Case(M(), (torch.randn(32, 6), legal, torch.randn(32)), trains=False)


@healthy()
def policy_with_minus_inf() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))

        def forward(self, x: Tensor, legal: Tensor) -> Tensor:
            return (self.net(x) + legal.float().log()).log_softmax(-1)[:, 0]

    legal = torch.rand(32, 5) > 0.5
    legal[:, 0] = True
    return Case(M(), (torch.randn(32, 6), legal), lambda o: -o.mean())


@healthy()
def ctc_speech() -> Case:
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
    return Case(
        M(),
        (torch.randn(3, 8, 20),),
        lambda o: F.ctc_loss(o, y, torch.tensor([20, 18, 15]), torch.tensor([5, 4, 2]), zero_infinity=True),
    )


@healthy()
def crf_tagger_forbidden_moves() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit, self.trans = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4) * 0.1)
            ban = torch.zeros(4, 4)
            ban[0, 2] = ban[3, 1] = float("-inf")
            self.register_buffer("ban", ban)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            e, tr = self.emit(x), self.trans + self.ban
            alpha, gold = e[:, 0], e[torch.arange(len(x)), 0, y[:, 0]]
            for t in range(1, x.shape[1]):
                alpha = torch.logsumexp(alpha[:, :, None] + tr, 1) + e[:, t]
                gold = gold + tr[y[:, t - 1], y[:, t]] + e[torch.arange(len(x)), t, y[:, t]]
            return (torch.logsumexp(alpha, 1) - gold).mean()

    return Case(M(), (torch.randn(4, 10, 8), torch.ones(4, 10, dtype=torch.long)))


@healthy()
def gumbel_straight_through() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.code, self.dec = nn.Linear(8, 12), nn.Linear(12, 6, bias=False), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.dec(self.code(F.gumbel_softmax(self.enc(x), tau=0.7, hard=True))), x)

    return Case(M(), (torch.randn(32, 8),))


@healthy()
def vqvae_with_ste() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.book = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.enc(x)
            e = self.book(torch.cdist(z.detach(), self.book.weight.detach()).argmin(-1))
            q = z + (e - z).detach()
            return F.mse_loss(self.dec(q), x) + F.mse_loss(e, z.detach()) + 0.25 * F.mse_loss(z, e.detach())

    return Case(M(), (torch.randn(16, 8),))


@healthy()
def round_with_ste() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h + (torch.round(h * 8) / 8 - h).detach())

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def weight_norm_wavenet() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wn = nn.utils.parametrizations.weight_norm
            self.stem, self.out = nn.Conv1d(1, 12, 1), nn.Conv1d(12, 1, 1)
            self.f = nn.ModuleList(wn(nn.Conv1d(12, 24, 2, dilation=2**i)) for i in range(4))
            self.r = nn.ModuleList(nn.Conv1d(12, 24, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            h, skips = self.stem(x), 0.0
            for i, (f, r) in enumerate(zip(self.f, self.r, strict=True)):
                a, b = f(F.pad(h, (2**i, 0))).chunk(2, 1)
                res, skip = r(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
                h, skips = h + res, skips + skip
            return self.out(F.relu(skips))

    return Case(M(), (torch.randn(2, 1, 40),), sq)


@healthy()
def orthogonal_parametrization() -> Case:
    m = nn.Sequential(
        *[x for _ in range(20) for x in (nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh())],
        nn.Linear(16, 3),
    )
    return Case(m, (torch.randn(8, 16),), ce(8, 3))


@healthy()
def torch_transformer() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.t = nn.Embedding(20, 16), nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True)
            self.out = nn.Linear(16, 20)

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            mask = self.t.generate_square_subsequent_mask(t.shape[1])
            return self.out(
                self.t(
                    self.emb(s),
                    self.emb(t),
                    tgt_mask=mask,
                    src_key_padding_mask=torch.zeros(s.shape).masked_fill(s == 0, float("-inf")),
                    tgt_is_causal=True,
                )
            )

    s, t = torch.randint(1, 20, (3, 7)), torch.randint(1, 20, (3, 6))
    s[1, 4:] = 0
    return Case(M(), (s, t), lambda o: F.cross_entropy(o.flatten(0, 1), t.flatten()))


@healthy()
def vit_layer_scale() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.cls, self.pos = (
                nn.Conv2d(3, 32, 5, 5),
                nn.Parameter(torch.zeros(1, 1, 32)),
                nn.Parameter(torch.randn(1, 17, 32) * 0.02),
            )
            self.attn = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(4))
            self.mlp = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
            )
            self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
            self.g = nn.ParameterList(nn.Parameter(torch.full((32,), 1e-6)) for _ in range(8))
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.patch(x).flatten(2).transpose(1, 2)
            h = torch.cat([self.cls.expand(len(x), -1, -1), h], 1) + self.pos
            for i in range(4):
                n = self.norms[i](h)
                h = h + self.g[2 * i] * self.attn[i](n, n, n, need_weights=False)[0]
                h = h + self.g[2 * i + 1] * self.mlp[i](h)
            return self.head(self.norm(h)[:, 0])

    return Case(M(), (image(4),), ce(4, 5))


@healthy()
def swin_shifted_windows() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.n = nn.Conv2d(3, 24, 2, 2), nn.LayerNorm(24)
            self.qkv, self.proj = (
                nn.ModuleList([nn.Linear(24, 72) for _ in range(4)]),
                nn.ModuleList([nn.Linear(24, 24) for _ in range(4)]),
            )
            self.bias = nn.Parameter(torch.zeros(4, 3, 16, 16))
            self.head = nn.Linear(24, 5)
            for p in self.parameters():
                if p.ndim == 2:
                    nn.init.trunc_normal_(p, std=0.02)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).permute(0, 2, 3, 1)
            b, s = len(x), h.shape[1]
            ids = torch.zeros(s, s)
            ids[-2:] += 1
            ids[:, -2:] += 2
            for i in range(4):
                n = self.n(h)
                n = torch.roll(n, (-2, -2), (1, 2)) if i % 2 else n
                w = n.view(b, s // 4, 4, s // 4, 4, 24).transpose(2, 3).reshape(-1, 16, 24)
                q, k, v = (z.view(-1, 16, 3, 8).transpose(1, 2) for z in self.qkv[i](w).chunk(3, -1))
                a = q @ k.transpose(-1, -2) / 8**0.5 + self.bias[i]
                if i % 2:
                    g = ids.view(s // 4, 4, s // 4, 4).transpose(1, 2).reshape(-1, 16)
                    m = (g[:, None] != g[:, :, None]).float() * -100
                    a = a + m.repeat(b, 1, 1)[:, None]
                w = self.proj[i]((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, 24))
                n = w.view(b, s // 4, s // 4, 4, 4, 24).transpose(2, 3).reshape(b, s, s, 24)
                h = h + (torch.roll(n, (2, 2), (1, 2)) if i % 2 else n)
            return self.head(self.n(h).mean((1, 2)))

    return Case(M(), (image(4, 16),), ce(4, 5))


@healthy()
def perceiver_latents() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lat, self.inp = nn.Parameter(torch.randn(6, 24) * 0.02), nn.Linear(7, 24)
            self.cross, self.self_ = (
                nn.MultiheadAttention(24, 3, batch_first=True),
                nn.TransformerEncoderLayer(24, 3, 48, norm_first=True, batch_first=True),
            )
            self.head = nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            z, x = self.lat.expand(len(x), -1, -1), self.inp(x)
            for _ in range(3):
                z = z + self.cross(z, x, x)[0]
                z = self.self_(z)
            return self.head(z.mean(1))

    return Case(M(), (torch.randn(4, 50, 7),), ce(4, 4))


@healthy()
def gin_scatter() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.eps = nn.Embedding(6, 16), nn.Parameter(torch.zeros(3))
            self.mlps = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)
            )
            self.out = nn.Linear(16, 1)

        def forward(self, a: Tensor, e: Tensor, g: Tensor) -> Tensor:
            h = self.emb(a)
            for i, mlp in enumerate(self.mlps):
                m = torch.zeros_like(h).index_add_(0, e[1], h[e[0]])
                h = F.relu(mlp((1 + self.eps[i]) * h + m))
            return self.out(torch.zeros(4, 16).index_add(0, g, h))

    return Case(M(), (torch.randint(0, 6, (40,)), torch.randint(0, 40, (2, 120)), torch.arange(40) // 10), sq)


@healthy()
def gat_masked() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a = (
                nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)]),
                nn.ParameterList([torch.randn(32) * 0.2 for _ in range(2)]),
            )
            self.out = nn.Linear(16, 3)

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            for w, a in zip(self.w, self.a, strict=True):
                h = w(x)
                s = F.leaky_relu((h @ a[:16])[:, None] + (h @ a[16:])[None], 0.2)
                x = F.elu(s.masked_fill(adj == 0, float("-inf")).softmax(-1) @ h)
            return self.out(x)

    return Case(M(), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@healthy()
def gcn_two() -> Case:
    return Case(GCN(2), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@healthy()
def highway_bias_minus_two() -> Case:
    m = Highway()
    for gate in m.gates:
        nn.init.constant_(gate.bias, -2)
    return Case(m, (torch.randn(16, 12),), ce(16, 4))


@healthy()
def byol_teacher() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.pred = (
                nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)),
                nn.Linear(8, 8),
            )
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            with torch.no_grad():
                t = self.teacher(b)
            return 2 - 2 * F.cosine_similarity(self.pred(self.net(a)), t, dim=-1).mean()

    x = torch.randn(32, 10)
    return Case(M(), (x + 0.1 * torch.randn(32, 10), x + 0.1 * torch.randn(32, 10)))


@healthy()
def simsiam_stop_gradient() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.pred = (
                nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)),
                nn.Linear(8, 8),
            )

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            u, v = self.net(a), self.net(b)
            return (
                -(
                    F.cosine_similarity(self.pred(u), v.detach()).mean()
                    + F.cosine_similarity(self.pred(v), u.detach()).mean()
                )
                / 2
            )

    return Case(M(), (torch.randn(32, 10), torch.randn(32, 10)))


@healthy()
def checkpointed_blocks() -> Case:
    class M(GPT):
        def forward(self, i: Tensor) -> Tensor:
            x = self.emb(i) + self.pos[: i.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    return Case(M(3), (tokens(),), lm())


@healthy()
def he_relu_forty() -> Case:
    m = nn.Sequential(*[x for _ in range(40) for x in (nn.Linear(96, 96), nn.ReLU())], nn.Linear(96, 4))
    for p in m.parameters():
        nn.init.kaiming_normal_(p) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(32, 96),), ce(32, 4))


@healthy()
def selu_thirty() -> Case:
    m = nn.Sequential(*[x for _ in range(30) for x in (nn.Linear(64, 64), nn.SELU())], nn.Linear(64, 4))
    for p in m.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(32, 64),), ce(32, 4))


@healthy()
def prenorm_residual_sixty() -> Case:
    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.a, self.b = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(F.gelu(self.a(self.n(x))))

    return Case(
        nn.Sequential(nn.Linear(8, 24), *[B() for _ in range(60)], nn.LayerNorm(24), nn.Linear(24, 3)),
        (torch.randn(8, 8),),
        ce(8, 3),
    )


@healthy("trained")
def linear_fit_converged() -> Case:
    x = torch.randn(64, 6)
    y = x @ torch.randn(6, 1) + 0.5
    return Case(
        trained(Case(nn.Linear(6, 1), (x,), lambda o: F.mse_loss(o, y)), 1500, 0.02).model,
        (x,),
        lambda o: F.mse_loss(o, y),
        trains=False,
    )


@healthy("trained")
def classifier_converged() -> Case:
    x, y = torch.randn(32, 10), torch.randint(0, 3, (32,))
    m = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return Case(
        trained(Case(m, (x,), lambda o: F.cross_entropy(o, y)), 400).model,
        (x,),
        lambda o: F.cross_entropy(o, y),
        trains=False,
    )


@healthy("trained")
def autoencoder_trained_relu() -> Case:
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
    return trained(Case(m, (x,), lambda o: F.binary_cross_entropy(o, x)), 200)


@healthy("trained")
def binary_classifier_sigmoid_confident() -> Case:
    x = torch.randn(64, 5)
    y = (x[:, :1] > 0).float()
    m = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
    return trained(Case(m, (x,), lambda o: F.binary_cross_entropy(o, y)), 400, 0.01)


@healthy("trained")
def moe_trained() -> Case:
    y = torch.randint(0, 3, (16,))
    return trained(Case(MoE(), (torch.randn(16, 12),), lambda o: F.cross_entropy(o, y)), 100)


@healthy("batch")
def mlp_single_sample() -> Case:
    m = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    return Case(m, (torch.randn(1, 10),), lambda o: o.sum().pow(2))


@healthy()
def dropout_ninety() -> Case:
    m = nn.Sequential(
        nn.Linear(10, 128),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(128, 3),
    )
    return Case(m, (torch.randn(16, 10),), ce(16, 3), trains=False)


@healthy()
def auxiliary_loss_small() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.body(x))
            return self.a(h), self.b(h)

    y = torch.randint(0, 3, (16,))
    return Case(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o[0], y) + 0.003 * o[1].pow(2).mean())


@healthy()
def mobile_se_hardswish() -> Case:
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
    return Case(m, (image(8),), ce(8, 4))


@healthy()
def prelu_maxout_net() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b, self.c = nn.Linear(8, 24), nn.PReLU(24), nn.Linear(24, 96), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.act(self.a(x))).view(-1, 24, 4).amax(-1))

    return Case(M(), (torch.randn(32, 8),), ce(32, 3))


@healthy()
def top_k_pooling_soft() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.score, self.out = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.lin(x))
            s, i = self.score(h)[..., 0].topk(3, -1)
            picked = torch.gather(h, 1, i[..., None].expand(-1, -1, 16))
            return self.out((picked * torch.sigmoid(s)[..., None]).sum(1))

    return Case(M(), (torch.randn(8, 10, 8),), ce(8, 3))


@healthy()
def rope_rmsnorm_swiglu() -> Case:
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
    return Case(m, (tokens(),), lm())


@healthy()
def deep_resnet_thirty_blocks() -> Case:
    return Case(ResNet(16), (image(4, 16),), ce(4, 5), trains=False)


@healthy()
def half_sparse_bag() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(5000, 8, mode="mean", sparse=True), nn.Linear(8, 2)

        def forward(self, i: Tensor) -> Tensor:
            return self.out(self.bag(i))

    return Case(M(), (torch.randint(0, 5000, (8, 6)),), ce(8, 2), trains=False)


@healthy()
def siamese_margin_mostly_zero() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(8))

        def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
            d = (self.t(a) - self.t(b)).pow(2).sum(-1)
            return (same * d + (1 - same) * F.relu(1 - (d + 1e-9).sqrt()) ** 2).mean()

    m = M()
    m.t(image(2))
    return Case(m, (image(6), image(6), torch.tensor([1.0, 0, 0, 0, 1, 0])))


@healthy()
def double_where_safe_sqrt() -> Case:
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

    return Case(M(), (torch.randn(6, 6),), sq)


@healthy()
def quantile_huber_heads() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 9))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            d = y - self.net(x)
            tau = torch.arange(0.1, 1.0, 0.1)
            return (torch.abs(tau - (d < 0).float()) * F.huber_loss(d, torch.zeros_like(d), reduction="none")).mean()

    return Case(M(), (torch.randn(32, 8), torch.randn(32, 1)))


@healthy("series", steps=36)
def mlp_thirty_six_steps() -> Case:
    y = torch.randint(0, 3, (32,))
    return Case(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
        (torch.randn(32, 8),),
        lambda o: F.cross_entropy(o, y),
    )


def fresh(case: Case, step: int) -> Case:
    return Case(case.model, (torch.randint(0, 40, (3, 12)),), case.loss)


@healthy("series", steps=30, each=fresh)
def gpt_fresh_batches() -> Case:
    return Case(GPT(2), (tokens(),), lm(), trains=False)


@healthy("series", steps=12)
def zero_gamma_over_steps() -> Case:
    return Case(ResNet(2, zero_gamma=True), (image(8),), ce(8, 5))


@healthy("series", steps=12)
def lora_over_steps() -> Case:
    m = GPT(2).requires_grad_(False)
    for b in m.blocks:
        b.qkv = Lora(b.qkv)
    return Case(m, (tokens(),), lm(), trains=False)
