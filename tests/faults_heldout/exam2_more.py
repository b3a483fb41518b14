"""What the second examiner tried around the first misses and false alarms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.exam2_faults2 import between
from tests.faults_heldout.exam2_healthy2 import mlp
from tests.faults_heldout.exam2_nets import Net, Out, ce, lins, mse, nil
from tests.faults_heldout.program import Case, fault, healthy


@fault("dead", "dead zero", r"/(relu|neg|sub|abs).*", nil("a.weight"))
def always_negative_and_wide() -> Case:
    return between(lambda h: torch.relu(-h.abs() - 1), width=64)


@fault("dead", "dead zero saturated", r"act", nil("a.weight"))
def hard_sigmoid_outside_and_wide() -> Case:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 64), act=nn.Hardsigmoid(), c=nn.Linear(64, 3))
    nn.init.constant_(model.a.bias, 50.0)
    return Case(model, (torch.randn(64, 6),), ce(64, 3))


@fault("zero", "dead zero saturated", r"/clamp.*", nil("a.weight"))
def clamped_from_thirty_and_wide() -> Case:
    return between(lambda h: h.clamp(min=30.0), width=64)


@fault("zero", "dead zero saturated", r"/hardtanh.*|/clamp.*", nil("a.weight"))
def clamped_below_minus_thirty() -> Case:
    return between(lambda h: torch.clamp(h, max=-30.0), width=8)


@fault("dead", "dead zero", r"/relu.*", nil("a.weight"))
def relu_of_minus_softplus() -> Case:
    return between(lambda h: F.relu(-F.softplus(h)), width=4)


@fault("dead", "dead zero saturated", r"/softshrink.*", nil("a.weight"))
def soft_shrinkage_of_everything() -> Case:
    return between(lambda h: F.softshrink(h, 80.0))


@fault("zero", "zero saturated", r"/(sub|add|mean|sum|stack|sigmoid|softmax).* a", nil("a.weight", 1e-7))
def difference_of_the_same_thing_twice() -> Case:
    return between(lambda h: torch.tanh(h) - torch.tanh(h) + 0.5)


@fault("zero", "zero", r"/(pow|mul).* a", nil("a.weight"))
def to_the_power_of_zero() -> Case:
    return between(lambda h: h.abs().add(1).pow(0))


@fault(
    "cut",
    "zero detached",
    r"/(eq|ne|lt|le|gt|ge|to|float|type).*|/mul.*",
    lambda g: g.grads["a.weight"] is None or g.norm("a.weight") == 0,
)
def gate_by_comparison_only() -> Case:
    return between(lambda h: h.gt(0).to(torch.float32) * 2 - 1)


@healthy("zero init")
def residual_by_addcdiv_of_zero() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, s in zip(m.fs, m.scales, strict=True):
            x = torch.addcdiv(x, s * F.gelu(f(x)), torch.ones(()))
        return m.out(x)

    scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(4))
    return Case(Net(run, fs=lins(4, 16), scales=scales, out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3))


@healthy("zero init")
def low_rank_by_baddbmm_and_addmm() -> Case:
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
    return Case(model, (torch.randn(16, 8),), ce(16, 3))


@healthy("zero init")
def where_flag_starts_a_zero_gate() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.out(x + F.hardtanh(m.gate) * torch.relu(m.f(x)) + torch.tanh(m.g2) * m.f2(x))

    return Case(
        Net(run, f=nn.Linear(8, 8), f2=nn.Linear(8, 8), gate=torch.zeros(1), g2=torch.zeros(8), out=nn.Linear(8, 3)),
        (torch.randn(16, 8),),
        ce(16, 3),
    )


@healthy("zero init")
def skip_init_through_functional_norm_weight() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, g in zip(m.fs, m.gs, strict=True):
            x = x + F.layer_norm(F.silu(f(x)), (16,), g, None)
        return m.out(x)

    gs = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4))
    return Case(Net(run, fs=lins(4, 16), gs=gs, out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3))


@healthy("recurrent")
def gru_by_hand_forty_steps() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            r, z = m.gates(torch.cat([x[:, t], h], -1)).sigmoid().chunk(2, -1)
            n = torch.tanh(m.cand(torch.cat([x[:, t], r * h], -1)))
            h = (1 - z) * n + z * h
        return m.out(h)

    return Case(
        Net(run, gates=nn.Linear(20, 32), cand=nn.Linear(20, 16), out=nn.Linear(16, 2)),
        (torch.randn(4, 40, 4),),
        ce(4, 2),
    )


@healthy("recurrent")
def lstm_by_hand_forget_bias_one() -> Case:
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
    return Case(
        Net(run, wx=torch.randn(64, 4) * 0.3, wh=torch.randn(64, 16) * 0.2, b=b, out=nn.Linear(16, 2)),
        (torch.randn(4, 50, 4),),
        mse(4, 50, 2),
    )


@healthy("recurrent")
def exponential_average_of_features() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.f(x[:, 0])
        for t in range(1, x.shape[1]):
            h = h.mul(0.8).add(m.f(x[:, t]), alpha=0.2)
        return m.out(torch.tanh(h))

    return Case(Net(run, f=nn.Linear(4, 12), out=nn.Linear(12, 2)), (torch.randn(6, 60, 4),), ce(6, 2))


@healthy("scaled")
def output_in_physical_units_of_two_thousand() -> Case:
    y = 2000 * torch.randn(32, 1)
    return Case(
        Net(lambda m, x: 2000.0 * m.f(x), f=mlp(6, 1)), (torch.randn(32, 6),), lambda o: F.mse_loss(o / 2000, y / 2000)
    )


@healthy("scaled")
def forces_in_milli_units_inside() -> Case:
    def run(m: Net, x: Tensor) -> Out:
        h = m.g(m.f(x) / 500)
        return Out(F.smooth_l1_loss(h * 300, torch.ones_like(h)), h)

    return Case(Net(run, f=mlp(6, 8), g=nn.Linear(8, 1)), (torch.randn(32, 6),))


@healthy("scaled")
def summed_over_a_hundred_thousand_positions() -> Case:
    m = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1))
    y = torch.randn(2, 1, 224, 224)
    return Case(m, (torch.randn(2, 1, 224, 224),), lambda o: (o - y).abs().sum())


@healthy("scaled")
def cube_of_radius_hundred() -> Case:
    model = Net(
        lambda m, x: m.out(torch.tanh(m.f(x / x.norm(dim=-1, keepdim=True)))), f=nn.Linear(3, 16), out=nn.Linear(16, 1)
    )
    return Case(model, (torch.randn(32, 3) * 1e4,), mse(32, 1))
