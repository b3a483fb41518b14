"""Healthy nets made of parts: unusual mechanisms, recurrences and scales."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.faults.parts import Net, Out, ce, fit, he, lins, mlp, mse
from tests.faults.places import healthy
from tests.faults.program import Built


class Half(torch.autograd.Function):
    """Binary weights with a clipped straight-through estimate."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return grad * (w.abs() < 1)


@healthy()
def fourier_operator_with_complex_weights() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.lift(x)
        for w, s in ((m.w1, m.s1), (m.w2, m.s2)):
            f = torch.fft.rfft(h, dim=1)
            top = torch.einsum("bki,kio->bko", f[:, :6], torch.view_as_complex(w))
            h = F.gelu(torch.fft.irfft(F.pad(top, (0, 0, 0, f.shape[1] - 6)), n=x.shape[1], dim=1) + s(h))
        return m.out(h)

    model = Net(
        run,
        lift=nn.Linear(1, 12),
        w1=torch.randn(6, 12, 12, 2) * 0.2,
        w2=torch.randn(6, 12, 12, 2) * 0.2,
        s1=nn.Linear(12, 12),
        s2=nn.Linear(12, 12),
        out=nn.Linear(12, 1),
    )
    return Built(model, (torch.randn(4, 24, 1),), mse(4, 24, 1))


@healthy()
def flow_by_runge_kutta() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            return m.b(torch.tanh(m.a(z)))

        for _ in range(10):
            k1 = f(x)
            k2 = f(x + 0.05 * k1)
            k3 = f(x + 0.05 * k2)
            x = x + 0.1 / 6 * (k1 + 4 * k2 + k3)
        return m.out(x)

    return Built(
        Net(run, a=nn.Linear(4, 20), b=nn.Linear(20, 4), out=nn.Linear(4, 2)), (torch.randn(16, 4),), ce(16, 2)
    )


@healthy()
def gaussian_process_likelihood() -> Built:
    def run(m: Net, x: Tensor, y: Tensor) -> Tensor:
        z = m.f(x)
        k = m.log_amp.exp() * torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1)) + (
            m.log_noise.exp() + 1e-4
        ) * torch.eye(20)
        chol = torch.linalg.cholesky(k)
        a = torch.cholesky_solve(y[:, None], chol)
        return 0.5 * (y @ a[:, 0]) + chol.diagonal().log().sum()

    return Built(
        Net(run, f=mlp(3, 2, 16, nn.Tanh), log_amp=torch.zeros(()), log_noise=torch.tensor(-2.0)),
        (torch.randn(20, 3), torch.randn(20)),
    )


@healthy()
def called_with_changed_parameters() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        ws = {n: p * (1 + 0.1 * torch.tanh(m.delta)) for n, p in m.f.named_parameters()}
        return functional_call(m.f, ws, (x,))

    return Built(Net(run, f=mlp(5, 3), delta=torch.zeros(())), (torch.randn(16, 5),), ce(16, 3))


@healthy()
def written_into_slices_in_place() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12)
        h[:, :6] = m.a(x)
        h[:, 6:] = torch.relu(m.b(x))
        h[:, 0] += h[:, 6]
        h *= 0.5
        return m.out(h)

    return Built(Net(run, a=nn.Linear(5, 6), b=nn.Linear(5, 6), out=nn.Linear(12, 3)), (torch.randn(16, 5),), ce(16, 3))


@healthy()
def linear_bottleneck_of_one_and_bilinear() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.up(m.down(x))
        return m.out(F.gelu(m.bi(h, x)))

    return Built(
        Net(run, down=nn.Linear(8, 1), up=nn.Linear(1, 8), bi=nn.Bilinear(8, 8, 12), out=nn.Linear(12, 2)),
        (torch.randn(16, 8),),
        ce(16, 2),
    )


@healthy()
def minimal_gated_unit_eighty_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            z = torch.cat((x[:, t], h), -1)
            f = m.f(z).sigmoid()
            h = torch.lerp(h, m.h(torch.cat((x[:, t], f * h), -1)).tanh(), f)
        return m.out(h)

    model = Net(run, f=nn.Linear(20, 16), h=nn.Linear(20, 16), out=nn.Linear(16, 2))
    nn.init.constant_(model.f.bias, -2.0)
    return Built(model, (torch.randn(4, 80, 4),), ce(4, 2))


@healthy()
def nested_containers_with_one_shared_block() -> Built:
    shared = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.SiLU())
    inner = nn.Sequential(
        nn.Sequential(shared, nn.Sequential(shared)), nn.ModuleDict({"x": nn.Linear(12, 12)})["x"], shared
    )
    return Built(
        nn.Sequential(nn.Linear(4, 12), nn.Sequential(inner), nn.Linear(12, 2)), (torch.randn(16, 4),), ce(16, 2)
    )


@healthy()
def binary_weights_straight_through() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.hardtanh(F.batch_norm(F.linear(x, Half.apply(m.w)), None, None, training=True))
        return m.out(h)

    return Built(Net(run, w=torch.randn(24, 10) * 0.3, out=nn.Linear(24, 3)), (torch.randn(32, 10),), ce(32, 3))


@healthy()
def trained_binary_gates_and_small_tanh_input() -> Built:
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long()
    model = Net(
        lambda m, z: m.out(torch.sigmoid(3 * m.g(z)) * torch.tanh(m.f(z))),
        g=nn.Linear(6, 16),
        f=nn.Linear(6, 16),
        out=nn.Linear(16, 2),
    )
    return fit(Built(model, (x,), lambda o: F.cross_entropy(o, y)), 300, 1e-2)


@healthy()
def plain_he_conv_thirty_in_eval() -> Built:
    m = he(
        nn.Sequential(*[x for _ in range(30) for x in (nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(inplace=True))]), 2.0
    )
    return Built(
        nn.Sequential(nn.Conv2d(3, 12, 1), m, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)).eval(),
        (torch.randn(4, 3, 12, 12),),
        ce(4, 4),
    )


@healthy()
def residual_by_addcdiv_of_zero() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, s in zip(m.fs, m.scales, strict=True):
            x = torch.addcdiv(x, s * F.gelu(f(x)), torch.ones(()))
        return m.out(x)

    scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(4))
    return Built(Net(run, fs=lins(4, 16), scales=scales, out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3))


@healthy()
def low_rank_by_baddbmm_and_addmm() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.addmm(m.b, x, m.w)
        h = torch.addmm(h, x @ m.down, m.up, beta=1.0, alpha=0.5)
        return m.out(F.gelu(h))

    model = Net(
        run,
        w=torch.randn(8, 12) * 0.3,
        b=torch.zeros(12),
        down=torch.randn(8, 2) * 0.3,
        up=torch.zeros(2, 12),
        out=nn.Linear(12, 3),
    )
    model.w.requires_grad_(False)
    return Built(model, (torch.randn(16, 8),), ce(16, 3))


@healthy()
def where_flag_starts_a_zero_gate() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.out(x + F.hardtanh(m.gate) * torch.relu(m.f(x)) + torch.tanh(m.g2) * m.f2(x))

    return Built(
        Net(run, f=nn.Linear(8, 8), f2=nn.Linear(8, 8), gate=torch.zeros(1), g2=torch.zeros(8), out=nn.Linear(8, 3)),
        (torch.randn(16, 8),),
        ce(16, 3),
    )


@healthy()
def skip_init_through_functional_norm_weight() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, g in zip(m.fs, m.gs, strict=True):
            x = x + F.layer_norm(F.silu(f(x)), (16,), g, None)
        return m.out(x)

    gs = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4))
    return Built(Net(run, fs=lins(4, 16), gs=gs, out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3))


@healthy()
def gru_by_hand_forty_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            r, z = m.gates(torch.cat([x[:, t], h], -1)).sigmoid().chunk(2, -1)
            n = torch.tanh(m.cand(torch.cat([x[:, t], r * h], -1)))
            h = (1 - z) * n + z * h
        return m.out(h)

    return Built(
        Net(run, gates=nn.Linear(20, 32), cand=nn.Linear(20, 16), out=nn.Linear(16, 2)),
        (torch.randn(4, 40, 4),),
        ce(4, 2),
    )


@healthy()
def lstm_by_hand_forget_bias_one() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 16)
        outs = []
        for xt in x.unbind(1):
            i, f, g, o = (F.linear(xt, m.wx) + F.linear(h, m.wh, m.b)).split(16, -1)
            c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return m.out(torch.stack(outs, 1))

    b = torch.zeros(64)
    b[16:32] = 1
    return Built(
        Net(run, wx=torch.randn(64, 4) * 0.3, wh=torch.randn(64, 16) * 0.2, b=b, out=nn.Linear(16, 2)),
        (torch.randn(4, 50, 4),),
        mse(4, 50, 2),
    )


@healthy()
def exponential_average_of_features() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.f(x[:, 0])
        for t in range(1, x.shape[1]):
            h = h.mul(0.8).add(m.f(x[:, t]), alpha=0.2)
        return m.out(torch.tanh(h))

    return Built(Net(run, f=nn.Linear(4, 12), out=nn.Linear(12, 2)), (torch.randn(6, 60, 4),), ce(6, 2))


@healthy()
def output_in_physical_units_of_two_thousand() -> Built:
    y = 2000 * torch.randn(32, 1)
    return Built(
        Net(lambda m, x: 2000.0 * m.f(x), f=mlp(6, 1)), (torch.randn(32, 6),), lambda o: F.mse_loss(o / 2000, y / 2000)
    )


@healthy()
def forces_in_milli_units_inside() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        h = m.g(m.f(x) / 500)
        return Out(F.smooth_l1_loss(h * 300, torch.ones_like(h)), h)

    return Built(Net(run, f=mlp(6, 8), g=nn.Linear(8, 1)), (torch.randn(32, 6),))


@healthy()
def summed_over_a_hundred_thousand_positions() -> Built:
    m = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1))
    y = torch.randn(2, 1, 224, 224)
    return Built(m, (torch.randn(2, 1, 224, 224),), lambda o: (o - y).abs().sum())


@healthy()
def cube_of_radius_hundred() -> Built:
    model = Net(
        lambda m, x: m.out(torch.tanh(m.f(x / x.norm(dim=-1, keepdim=True)))), f=nn.Linear(3, 16), out=nn.Linear(16, 1)
    )
    return Built(model, (torch.randn(32, 3) * 1e4,), mse(32, 1))
