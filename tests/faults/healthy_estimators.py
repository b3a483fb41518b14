"""Healthy nets: straight-through estimators, graphs, teachers and parametrizations."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import GCN, Highway, adjacency, ce, image, sq


@healthy()
def crf_tagger_forbidden_moves() -> Built:
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

    return Built(M(), (torch.randn(4, 10, 8), torch.ones(4, 10, dtype=torch.long)))


@healthy()
def gumbel_straight_through() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.code, self.dec = nn.Linear(8, 12), nn.Linear(12, 6, bias=False), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.dec(self.code(F.gumbel_softmax(self.enc(x), tau=0.7, hard=True))), x)

    return Built(M(), (torch.randn(32, 8),))


@healthy()
def vqvae_with_ste() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.book = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.enc(x)
            e = self.book(torch.cdist(z.detach(), self.book.weight.detach()).argmin(-1))
            q = z + (e - z).detach()
            return F.mse_loss(self.dec(q), x) + F.mse_loss(e, z.detach()) + 0.25 * F.mse_loss(z, e.detach())

    return Built(M(), (torch.randn(16, 8),))


@healthy()
def round_with_ste() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h + (torch.round(h * 8) / 8 - h).detach())

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy()
def weight_norm_wavenet() -> Built:
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

    return Built(M(), (torch.randn(2, 1, 40),), sq)


@healthy()
def orthogonal_parametrization() -> Built:
    m = nn.Sequential(
        *[x for _ in range(20) for x in (nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh())],
        nn.Linear(16, 3),
    )
    return Built(m, (torch.randn(8, 16),), ce(8, 3))


@healthy()
def torch_transformer() -> Built:
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
    return Built(M(), (s, t), lambda o: F.cross_entropy(o.flatten(0, 1), t.flatten()))


@healthy()
def vit_layer_scale() -> Built:
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

    return Built(M(), (image(4),), ce(4, 5))


@healthy()
def swin_shifted_windows() -> Built:
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

    return Built(M(), (image(4, 16),), ce(4, 5))


@healthy()
def perceiver_latents() -> Built:
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

    return Built(M(), (torch.randn(4, 50, 7),), ce(4, 4))


@healthy()
def gin_scatter() -> Built:
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

    return Built(M(), (torch.randint(0, 6, (40,)), torch.randint(0, 40, (2, 120)), torch.arange(40) // 10), sq)


@healthy()
def gat_masked() -> Built:
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

    return Built(M(), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@healthy()
def gcn_two() -> Built:
    return Built(GCN(2), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@healthy()
def highway_bias_minus_two() -> Built:
    m = Highway()
    for gate in m.gates:
        nn.init.constant_(gate.bias, -2)
    return Built(m, (torch.randn(16, 12),), ce(16, 4))


@healthy()
def byol_teacher() -> Built:
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
    return Built(M(), (x + 0.1 * torch.randn(32, 10), x + 0.1 * torch.randn(32, 10)))


@healthy()
def simsiam_stop_gradient() -> Built:
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

    return Built(M(), (torch.randn(32, 10), torch.randn(32, 10)))
