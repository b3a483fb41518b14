"""Healthy nets made of parts: depth, attention, norms, activations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.faults.parts import Decoder, Net, ce, fit, he, lins, mse, params
from tests.faults.places import healthy
from tests.faults.program import Built


@healthy()
def functional_mlp_of_parameters() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for w, b in zip(m.ws, m.bs, strict=True):
            x = F.leaky_relu(torch.addmm(b, x, w), 0.1)
        return x @ m.out

    model = Net(
        run, ws=params(5, 20, 20, std=(2 / 20) ** 0.5), bs=params(5, 20, std=0.01), out=torch.randn(20, 3) * 0.2
    )
    return Built(model, (torch.randn(16, 20),), ce(16, 3))


@healthy()
def width_two_xor() -> Built:
    x = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).repeat(4, 1)
    y = (x[:, 0] != x[:, 1]).float()
    m = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))
    return Built(m, (x,), lambda o: F.binary_cross_entropy_with_logits(o[:, 0], y))


@healthy()
def width_three_elu() -> Built:
    return Built(
        nn.Sequential(nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 1)),
        (torch.randn(32, 3),),
        mse(32, 1),
    )


@healthy()
def width_512_crelu() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        h = m.b(torch.cat([h.relu(), (-h).relu()], 1))
        return m.c(torch.cat([h.clamp(min=0), (-h).clamp(min=0)], 1))

    return Built(
        Net(run, a=nn.Linear(32, 512), b=nn.Linear(1024, 512), c=nn.Linear(1024, 10)), (torch.randn(8, 32),), ce(8, 10)
    )


@healthy()
def hundred_residuals_scaled_by_depth() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for lin in m.ls:
            x = x + F.silu(lin(x)) / math.sqrt(100)
        return m.out(x)

    return Built(Net(run, ls=lins(100, 16), out=nn.Linear(16, 4)), (torch.randn(8, 16),), ce(8, 4))


@healthy()
def prenorm_rms_stack_of_forty() -> Built:
    def rms(x: Tensor, g: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * g

    def run(m: Net, x: Tensor) -> Tensor:
        for lin, g in zip(m.ls, m.gs, strict=True):
            x = x + lin(F.gelu(rms(x, g)))
        return m.out(rms(x, m.g))

    gs = nn.ParameterList(nn.Parameter(torch.ones(24)) for _ in range(40))
    return Built(
        Net(run, ls=lins(40, 24), gs=gs, g=torch.ones(24), out=nn.Linear(24, 5)), (torch.randn(6, 24),), ce(6, 5)
    )


@healthy()
def he_leaky_fifty() -> Built:
    m = he(nn.Sequential(*[x for _ in range(50) for x in (nn.Linear(64, 64), nn.LeakyReLU(0.01))]), 2.0)
    return Built(nn.Sequential(m, nn.Linear(64, 3)), (torch.randn(16, 64),), ce(16, 3))


@healthy()
def orthogonal_tanh_twenty() -> Built:
    ls = [x for _ in range(20) for x in (parametrizations.orthogonal(nn.Linear(20, 20)), nn.Tanh())]
    return Built(nn.Sequential(*ls, nn.Linear(20, 2)), (torch.randn(16, 20) * 0.5,), ce(16, 2))


@healthy()
def multi_query_alibi_minus_inf() -> Built:
    return Built(Decoder(-math.inf, False), (torch.randint(0, 30, (4, 12)),))


@healthy()
def multi_query_post_norm_finite_mask() -> Built:
    return Built(Decoder(-1e9, True), (torch.randint(0, 30, (4, 12)),))


@healthy()
def decoder_with_cross_attention_trained() -> Built:
    return fit(Built(Decoder(-1e4, False, True), (torch.randint(0, 30, (4, 10)), torch.randn(4, 7, 24))), 50)


@healthy()
def decoder_batch_one_long() -> Built:
    return Built(Decoder(-math.inf, False), (torch.randint(0, 30, (1, 160)),))


@healthy()
def decoder_eval_in_bf16_autocast() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decoder(-math.inf, False)

        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(ids).loss

    return Built(M().eval(), (torch.randint(0, 30, (4, 12)),))


@healthy()
def linear_attention_softplus_causal() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        q, k, v = (z for z in m.qkv(x).chunk(3, -1))
        q, k = F.softplus(q), F.softplus(k)
        state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        y = torch.einsum("btd,btde->bte", q, state) / torch.einsum("btd,btd->bt", q, k.cumsum(1)).unsqueeze(-1)
        return m.out(x + y)

    return Built(Net(run, qkv=nn.Linear(12, 36), out=nn.Linear(12, 4)), (torch.randn(3, 40, 12),), mse(3, 40, 4))


@healthy()
def rotary_functional_sdpa() -> Built:
    def rotate(x: Tensor) -> Tensor:
        t, d = x.shape[-2:]
        ang = torch.arange(t)[:, None] * 100 ** (-torch.arange(d // 2) / (d // 2))
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1).flatten(-2)

    def run(m: Net, x: Tensor) -> Tensor:
        q, k, v = (torch.matmul(x, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in m.ws)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return m.out((x + y.transpose(1, 2).flatten(2)).mean(1))

    return Built(Net(run, ws=params(3, 16, 16, std=0.25), out=nn.Linear(16, 3)), (torch.randn(5, 14, 16),), ce(5, 3))


@healthy()
def weight_standardised_group_norm_cnn() -> Built:
    class WS(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, w / w[0].numel() ** 0.5, self.bias, self.stride, self.padding)

    m = nn.Sequential(
        WS(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(inplace=True),
        WS(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 7),
    )
    return Built(m, (torch.randn(6, 3, 16, 16),), ce(6, 7))


@healthy()
def instance_norm_style_net() -> Built:
    m = nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 8, 3),
        nn.InstanceNorm2d(8, affine=True),
        nn.PReLU(8),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 3, 3, padding=1),
        nn.Tanh(),
    )
    return Built(m, (torch.randn(2, 3, 10, 10),), mse(2, 3, 20, 20))


@healthy()
def batch_norm_by_hand_eval_stats() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        h = F.batch_norm(h, m.b_mean, m.b_var, m.g, m.s, training=False)
        return m.c(h.clamp_min(0))

    model = Net(
        run,
        a=nn.Linear(6, 12),
        g=torch.ones(12),
        s=torch.zeros(12),
        b_mean=torch.zeros(12),
        b_var=torch.ones(12),
        c=nn.Linear(12, 2),
    )
    return Built(model, (torch.randn(1, 6),), ce(1, 2))


@healthy()
def every_activation_once() -> Built:
    acts = [
        nn.SELU(),
        nn.CELU(),
        nn.Mish(),
        nn.Softplus(),
        nn.Hardtanh(-2, 2),
        nn.ReLU6(),
        nn.RReLU(),
        nn.Softsign(),
        nn.LogSigmoid(),
        nn.Tanhshrink(),
    ]
    return Built(
        nn.Sequential(*[x for a in acts for x in (nn.Linear(24, 24), nn.LayerNorm(24), a)], nn.Linear(24, 4)),
        (torch.randn(16, 24),),
        ce(16, 4),
    )


@healthy()
def swish_and_maxout_by_hand() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        h = h / (1 + torch.exp(-h))
        h = m.b(h).unflatten(-1, (8, 3)).max(-1).values
        u, v = m.c(h).tensor_split(2, -1)
        return m.d(u * v.sigmoid())

    return Built(
        Net(run, a=nn.Linear(5, 12), b=nn.Linear(12, 24), c=nn.Linear(8, 16), d=nn.Linear(8, 2)),
        (torch.randn(16, 5),),
        mse(16, 2),
    )


@healthy()
def dropout_ninety_functional() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.b(F.dropout(torch.relu(m.a(x)), 0.9, training=True))

    return Built(Net(run, a=nn.Linear(10, 256), b=nn.Linear(256, 3)), (torch.randn(32, 10),), ce(32, 3))


@healthy()
def stochastic_depth_per_sample() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            keep = torch.bernoulli(torch.full((x.shape[0], 1), 0.5)) / 0.5
            x = x + keep * torch.tanh(f(x))
        return m.out(x)

    return Built(Net(run, fs=lins(8, 12), out=nn.Linear(12, 3)), (torch.randn(16, 12),), ce(16, 3))


@healthy()
def checkpoint_sequential_blocks() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            x = x + checkpoint(f, x, use_reentrant=False)
        return m.out(x)

    fs = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(4)
    )
    return Built(Net(run, fs=fs, out=nn.Linear(12, 3)), (torch.randn(16, 12),), ce(16, 3))
