"""Healthy nets made of parts: units, scales and margins that look a little ill."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, Out, ce, fit, he, lins, mlp, mse
from tests.faults.places import healthy
from tests.faults.program import Built


@healthy()
def ones_for_matrices_of_gains() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.tanh(m.f(x)).unflatten(-1, (4, 6)) * m.d + m.pos
        return m.out(h.flatten(1))

    return Built(
        Net(run, f=nn.Linear(6, 24), d=torch.ones(4, 6), pos=torch.zeros(4, 6), out=nn.Linear(24, 3)),
        (torch.randn(16, 6),),
        ce(16, 3),
    )


@healthy()
def learned_queries_of_zero() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        y, _ = m.att(m.query.expand(x.shape[0], -1, -1) + m.b_pos, x, x, need_weights=False)
        return m.out(m.query + y).mean(1)

    return Built(
        Net(
            run,
            query=torch.zeros(1, 3, 16),
            b_pos=torch.randn(3, 16),
            att=nn.MultiheadAttention(16, 2, batch_first=True),
            out=nn.Linear(16, 3),
        ),
        (torch.randn(8, 7, 16),),
        ce(8, 3),
    )


@healthy()
def decay_rates_in_log_space_over_two_hundred_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        u, g = m.f(x), torch.sigmoid(m.g(x))
        h, a = torch.zeros(x.shape[0], 12), torch.exp(-torch.exp(m.log_rate))
        ys = []
        for t in range(x.shape[1]):
            h = a * h + (1 - a) * u[:, t]
            ys.append(h)
        return m.out((torch.stack(ys, 1) * g).mean(1))

    return Built(
        Net(run, f=nn.Linear(4, 12), g=nn.Linear(4, 12), log_rate=torch.linspace(-4, 0, 12), out=nn.Linear(12, 3)),
        (torch.randn(4, 100, 4),),
        ce(4, 3),
    )


@healthy()
def sparse_code_by_iterated_shrinkage() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        z = F.softshrink(m.enc(x) * 0.5, 0.1)
        for _ in range(4):
            z = F.softshrink(z + 0.1 * F.linear(x - F.linear(z, m.d), m.d.t()), 0.05)
        return F.linear(z, m.d)

    x = torch.randn(16, 10)
    return Built(Net(run, enc=nn.Linear(10, 20), d=torch.randn(10, 20) * 0.3), (x,), lambda o: F.mse_loss(o, x))


@healthy()
def most_samples_behind_the_margin() -> Built:
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).float() * 2 - 1
    return fit(Built(mlp(6, 1, 16), (x,), lambda o: F.relu(1 - y * o[:, 0]).square().mean()), 25, 3e-3)


@healthy()
def relu_bottleneck_with_few_active_units() -> Built:
    model = Net(lambda m, x: m.out(F.relu(m.f(x) - 1.0)), f=nn.Linear(12, 256), out=nn.Linear(256, 4))
    return Built(he(model), (torch.randn(32, 12),), ce(32, 4))


@healthy()
def relu_of_width_two_and_four() -> Built:
    m = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        for i in (0, 2):
            m[i].bias.fill_(0.3)
    return Built(m, (torch.randn(64, 2),), mse(64, 1))


@healthy()
def copy_head_with_sharp_attention() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        h = m.emb(x)
        w = (m.q(h) @ m.k(h).mT).softmax(-1)
        logits = m.out(h + w @ h)
        return Out(F.cross_entropy(logits.flatten(0, 1), x.flip(1).flatten()), logits)

    return fit(
        Built(
            Net(run, emb=nn.Embedding(12, 24), q=nn.Linear(24, 24), k=nn.Linear(24, 24), out=nn.Linear(24, 12)),
            (torch.randint(0, 12, (8, 6)),),
        ),
        150,
        1e-2,
    )


@healthy()
def probability_outputs_with_binary_loss_fitted() -> Built:
    x = torch.randn(48, 6)
    y = (x[:, :1] > 0).float()
    m = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())
    return fit(Built(m, (x,), lambda o: F.binary_cross_entropy(o, y)), 250, 1e-2)


@healthy()
def bfloat_transformer_layer_with_tiny_loss() -> Built:
    y = torch.randint(0, 3, (4,))
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = Net(lambda m, x: m.out(m.layer(x)[:, 0]), layer=layer, out=nn.Linear(16, 3)).bfloat16()
    return Built(model, (torch.randn(4, 6, 16).bfloat16(),), lambda o: F.cross_entropy(o.float(), y) * 1e-3)


@healthy()
def half_model_with_loss_times_4096() -> Built:
    y = torch.randint(0, 3, (16,))
    m = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)).half()
    return Built(m, (torch.randn(16, 8).half(),), lambda o: F.cross_entropy(o.float(), y) * 4096, trains=False)


@healthy()
def pixel_and_time_constants_inside() -> Built:
    def run(m: Net, x: Tensor, t: Tensor) -> Tensor:
        w = torch.exp(-math.log(10000.0) * torch.arange(8) / 8)
        e = torch.cat([(t[:, None] * 1000 * w).sin(), (t[:, None] * 1000 * w).cos()], -1)
        h = F.silu(m.f(x / 255.0 * 2 - 1) + m.t(e))
        return m.out(h) * 127.5 + 127.5

    model = Net(run, f=nn.Linear(12, 24), t=nn.Linear(16, 24), out=nn.Linear(24, 12))
    return Built(model, (torch.randint(0, 256, (8, 12)).float(), torch.rand(8)), mse(8, 12, scale=50.0))


@healthy()
def coordinates_in_metres_and_loss_in_kilometres() -> Built:
    y = torch.randn(16, 2) * 5
    model = Net(lambda m, x: torch.cumsum(m.f(x).view(16, 10, 2), 1)[:, -1] * 1e3, f=mlp(4, 20))
    return Built(model, (torch.randn(16, 4),), lambda o: F.l1_loss(o / 1e3, y))


@healthy()
def potential_with_coulomb_constant() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        q = torch.tanh(m.f(x))
        r = torch.cdist(x, x) + 10 * torch.eye(8)
        return 332.06 * 0.5 * (q * q.mT / r).sum((1, 2)) / 100

    return Built(Net(run, f=mlp(3, 1)), (torch.randn(6, 8, 3) * 3,), mse(6))


@healthy()
def normalised_small_embeddings() -> Built:
    model = Net(
        lambda m, i: m.out(F.layer_norm(m.emb(i), (16,)).mean(1)), emb=nn.Embedding(50, 16), out=nn.Linear(16, 3)
    )
    nn.init.normal_(model.emb.weight, std=0.002)
    return Built(model, (torch.randint(0, 50, (8, 6)),), ce(8, 3))


@healthy()
def centred_by_its_own_mean_everywhere() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            h = f(x)
            h = h - h.mean(-1, keepdim=True)
            x = x + torch.tanh(h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt())
        return m.out(x)

    return Built(Net(run, fs=lins(4, 12), out=nn.Linear(12, 3)), (torch.randn(16, 12),), ce(16, 3))


@healthy()
def wavelet_lifting_with_detached_statistics() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        d = b - m.p(a)
        s = a + m.u(d)
        scale = s.detach().std() + 1e-3
        return m.out(torch.cat([s / scale, d / scale], -1))

    return Built(
        Net(run, p=nn.Linear(6, 6), u=nn.Linear(6, 6), out=nn.Linear(12, 2)), (torch.randn(16, 12),), ce(16, 2)
    )


@healthy()
def conv_gru_over_frames() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 6, 8, 8)
        for t in range(x.shape[1]):
            z, r = torch.sigmoid(m.zr(torch.cat([x[:, t], h], 1))).chunk(2, 1)
            h = torch.lerp(torch.tanh(m.h(torch.cat([x[:, t], r * h], 1))), h, z)
        return m.out(h.mean((2, 3)))

    return Built(
        Net(run, zr=nn.Conv2d(8, 12, 3, padding=1), h=nn.Conv2d(8, 6, 3, padding=1), out=nn.Linear(6, 3)),
        (torch.randn(2, 16, 2, 8, 8),),
        ce(2, 3),
    )


@healthy()
def gru_cell_of_torch_forty_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 16)
        for t in range(40):
            h = m.cell(x[:, t], h)
        return m.out(h)

    return Built(Net(run, cell=nn.GRUCell(4, 16), out=nn.Linear(16, 2)), (torch.randn(4, 40, 4),), ce(4, 2))


@healthy()
def leaky_integrator_reservoir_trained() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 20)
        for t in range(x.shape[1]):
            h = 0.7 * h + 0.3 * torch.tanh(m.i(x[:, t]) + m.r(h))
        return m.out(h)

    return fit(
        Built(
            Net(run, i=nn.Linear(3, 20), r=nn.Linear(20, 20), out=nn.Linear(20, 2)), (torch.randn(6, 40, 3),), ce(6, 2)
        ),
        30,
    )
