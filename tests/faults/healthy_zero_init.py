"""Healthy nets made of parts: branches that begin at zero, masks, objectives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, Out, ce, lins, mlp, mse
from tests.faults.places import healthy
from tests.faults.program import Built


@healthy()
def gates_from_a_zero_modulation() -> Built:
    def run(m: Net, x: Tensor, t: Tensor) -> Tensor:
        for f, mod in zip(m.fs, m.mods, strict=True):
            shift, scale, gate = mod(F.silu(t)).chunk(3, -1)
            x = x + gate * f(F.layer_norm(x, (16,)) * (1 + scale) + shift)
        return m.out(x)

    model = Net(
        run,
        fs=nn.ModuleList(mlp(16, 16, 32, nn.GELU) for _ in range(3)),
        mods=nn.ModuleList(nn.Linear(8, 48) for _ in range(3)),
        out=nn.Linear(16, 4),
    )
    for p in model.mods.parameters():
        nn.init.zeros_(p)
    return Built(model, (torch.randn(12, 16), torch.randn(12, 8)), mse(12, 4))


@healthy()
def control_branch_behind_zero_convolution() -> Built:
    def run(m: Net, x: Tensor, c: Tensor) -> Tensor:
        h = F.silu(m.stem(x))
        return m.out(h + m.zero(F.silu(m.copy(c))))

    model = Net(
        run,
        stem=nn.Conv2d(3, 8, 3, padding=1),
        copy=nn.Conv2d(3, 8, 3, padding=1),
        zero=nn.Conv2d(8, 8, 1),
        out=nn.Conv2d(8, 3, 3, padding=1),
    )
    model.stem.requires_grad_(False)
    for p in model.zero.parameters():
        nn.init.zeros_(p)
    return Built(model, (torch.randn(3, 3, 10, 10), torch.randn(3, 3, 10, 10)), mse(3, 3, 10, 10))


@healthy()
def lerp_towards_block_by_zero_parameter() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, a in zip(m.fs, m.alpha, strict=True):
            x = torch.lerp(x, torch.tanh(f(x)), a)
        return m.out(x)

    return Built(
        Net(
            run,
            fs=lins(5, 12),
            alpha=nn.ParameterList(nn.Parameter(torch.zeros(12)) for _ in range(5)),
            out=nn.Linear(12, 3),
        ),
        (torch.randn(16, 12),),
        ce(16, 3),
    )


@healthy()
def layer_scale_by_einsum() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, g in zip(m.fs, m.gamma, strict=True):
            x = x + torch.einsum("bd,d->bd", F.gelu(f(F.layer_norm(x, (12,)))), g)
        return m.out(x)

    return Built(
        Net(
            run,
            fs=lins(6, 12),
            gamma=nn.ParameterList(nn.Parameter(torch.full((12,), 1e-5)) for _ in range(6)),
            out=nn.Linear(12, 3),
        ),
        (torch.randn(16, 12),),
        ce(16, 3),
    )


@healthy()
def spatial_transformer_starts_at_identity() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        theta = m.loc(F.relu(m.conv(x)).mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        return m.out(F.relu(m.body(F.grid_sample(x, grid, align_corners=False))).flatten(1))

    model = Net(run, conv=nn.Conv2d(1, 6, 5), loc=nn.Linear(6, 6), body=nn.Conv2d(1, 6, 3, 2), out=nn.Linear(150, 4))
    nn.init.zeros_(model.loc.weight)
    with torch.no_grad():
        model.loc.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
    return Built(model, (torch.randn(6, 1, 12, 12),), ce(6, 4))


@healthy()
def key_and_query_of_zero() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        w = (m.q(x) @ m.k(x).mT / 4).softmax(-1)
        return m.out((x + w @ m.v(x)).mean(1))

    model = Net(
        run, q=nn.Linear(16, 16, bias=False), k=nn.Linear(16, 16, bias=False), v=nn.Linear(16, 16), out=nn.Linear(16, 3)
    )
    nn.init.zeros_(model.q.weight)
    return Built(model, (torch.randn(5, 8, 16),), ce(5, 3))


@healthy()
def contrast_with_masked_diagonal() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        z = F.normalize(m.f(x), dim=-1)
        s = (z @ z.t() / 0.1).masked_fill(torch.eye(16, dtype=torch.bool), -math.inf)
        return Out(F.cross_entropy(s, (torch.arange(16) + 8) % 16), s)

    return Built(Net(run, f=mlp(6, 12)), (torch.randn(16, 6),))


@healthy()
def additive_mask_of_finfo_min() -> Built:
    def run(m: Net, x: Tensor, keep: Tensor) -> Tensor:
        bias = (1.0 - keep)[:, None, None, :] * torch.finfo(torch.float32).min
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in m.qkv(x).chunk(3, -1))
        p = F.dropout((torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8) + bias).softmax(-1), 0.1)
        return m.out(m.ln(x + torch.matmul(p, v).transpose(1, 2).flatten(2))[:, 0])

    keep = torch.ones(4, 9)
    keep[1, 5:] = 0
    keep[2, 1:] = 0
    return Built(
        Net(run, qkv=nn.Linear(16, 48), ln=nn.LayerNorm(16), out=nn.Linear(16, 3)),
        (torch.randn(4, 9, 16), keep),
        ce(4, 3),
    )


@healthy()
def masked_maximum_over_a_set() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.f(x)).masked_fill(~m.b_keep, -math.inf).amax(1)
        return m.out(h)

    keep = torch.rand(6, 10, 1) < 0.5
    keep[:, 0] = True
    return Built(Net(run, f=nn.Linear(4, 24), b_keep=keep, out=nn.Linear(24, 3)), (torch.randn(6, 10, 4),), ce(6, 3))


@healthy()
def softmax_over_neighbours_by_scatter() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.f(x)
        e = F.leaky_relu((h[m.b_src] * h[m.b_dst]).sum(-1), 0.2)
        top = torch.full((12,), -math.inf).scatter_reduce(0, m.b_dst, e, "amax")
        w = (e - top[m.b_dst]).exp()
        z = torch.zeros(12).index_add(0, m.b_dst, w)
        return m.out(
            torch.zeros_like(h).index_add(0, m.b_dst, (w / (z[m.b_dst] + 1e-9)).unsqueeze(-1) * h[m.b_src]) + h
        )

    return Built(
        Net(
            run,
            f=nn.Linear(5, 8),
            out=nn.Linear(8, 3),
            b_src=torch.randint(0, 12, (40,)),
            b_dst=torch.randint(0, 12, (40,)),
        ),
        (torch.randn(12, 5),),
        ce(12, 3),
    )


@healthy()
def hidden_markov_left_to_right() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        emit = m.f(x).log_softmax(-1)
        trans = (m.trans + m.b_band).log_softmax(-1)
        alpha = torch.tensor([0.0] + [-math.inf] * 4) + emit[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(-1) + trans, 1).clamp(min=-1e30) + emit[:, t]
        loss = -torch.logsumexp(alpha, -1).mean()
        return Out(loss, alpha)

    band = torch.full((5, 5), -math.inf).tril(-1) + torch.full((5, 5), -1e4).triu(2)
    return Built(
        Net(run, f=nn.Linear(4, 5), trans=torch.randn(5, 5), b_band=torch.where(torch.isfinite(band), band, -1e4)),
        (torch.randn(3, 9, 4),),
    )


@healthy()
def head_without_labels_in_this_batch() -> Built:
    y, keep = torch.randn(16, 2), torch.zeros(16, 2)
    keep[:, 0] = 1

    def loss(o: Tensor) -> Tensor:
        return sum(((o[:, i] - y[:, i]).square() * keep[:, i]).sum() / keep[:, i].sum().clamp(min=1) for i in range(2))

    def run(m: Net, x: Tensor) -> Tensor:
        h = m.body(x)
        return torch.stack([m.a(h).squeeze(-1), m.b(h).squeeze(-1)], -1)

    return Built(Net(run, body=mlp(5, 12), a=nn.Linear(12, 1), b=nn.Linear(12, 1)), (torch.randn(16, 5),), loss)


@healthy()
def variational_with_annealing_at_zero() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        mu, logvar = m.enc(x).chunk(2, -1)
        y = m.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp())
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
        return Out(F.mse_loss(y, x) + 0.0 * kl, y)

    return Built(Net(run, enc=mlp(12, 8), dec=mlp(4, 12)), (torch.randn(16, 12),))


@healthy()
def clipped_policy_ratio_at_first_step() -> Built:
    act, adv = torch.randint(0, 4, (32,)), torch.randn(32)

    def run(m: Net, x: Tensor) -> Tensor:
        logp = m.pi(x).log_softmax(-1).gather(1, act[:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        v = m.v(x)[:, 0]
        return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() + 0.5 * (v - adv).pow(2).mean()

    return Built(Net(run, pi=mlp(6, 4, 24, nn.Tanh), v=mlp(6, 1, 24, nn.Tanh)), (torch.randn(32, 6),))


@healthy()
def additive_angular_margin() -> Built:
    y = torch.randint(0, 10, (24,))

    def run(m: Net, x: Tensor) -> Tensor:
        c = F.linear(F.normalize(m.f(x)), F.normalize(m.w)).clamp(-1 + 1e-6, 1 - 1e-6)
        c = torch.where(F.one_hot(y, 10).bool(), torch.cos(c.acos() + 0.3), c)
        return F.cross_entropy(30 * c, y)

    return Built(Net(run, f=mlp(6, 16), w=torch.randn(10, 16)), (torch.randn(24, 6),))


@healthy()
def output_brought_back_to_thousands() -> Built:
    y = 500 + 1000 * torch.randn(32, 1)
    model = Net(
        lambda m, x: m.f(x) * m.b_std + m.b_mean, f=mlp(6, 1), b_std=torch.tensor(1000.0), b_mean=torch.tensor(500.0)
    )
    return Built(model, (torch.randn(32, 6),), lambda o: F.mse_loss(o, y) / 1e6)


@healthy()
def logits_capped_softly_with_z_loss() -> Built:
    y = torch.randint(0, 50, (24,))

    def loss(o: Tensor) -> Tensor:
        return F.cross_entropy(o, y) + 1e-4 * o.logsumexp(-1).square().mean()

    model = Net(lambda m, x: torch.tanh(m.f(x) / 30) * 30, f=mlp(8, 50, 32, nn.SiLU))
    return Built(model, (torch.randn(24, 8),), loss)


@healthy()
def raw_pixels_into_batch_norm() -> Built:
    m = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 5))
    return Built(m, (torch.randint(0, 256, (8, 3, 12, 12)).float(),), ce(8, 5))
