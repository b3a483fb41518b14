"""Healthy programs of a second examiner: mechanisms off the beaten track."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.faults_heldout.exam2_healthy2 import mlp
from tests.faults_heldout.exam2_nets import Net, ce, fit, he, mse
from tests.faults_heldout.program import Case, healthy


@healthy("mechanism")
def fourier_operator_with_complex_weights() -> Case:
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
    return Case(model, (torch.randn(4, 24, 1),), mse(4, 24, 1))


@healthy("mechanism")
def flow_by_runge_kutta() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            return m.b(torch.tanh(m.a(z)))

        for _ in range(10):
            k1 = f(x)
            k2 = f(x + 0.05 * k1)
            k3 = f(x + 0.05 * k2)
            x = x + 0.1 / 6 * (k1 + 4 * k2 + k3)
        return m.out(x)

    return Case(Net(run, a=nn.Linear(4, 20), b=nn.Linear(20, 4), out=nn.Linear(4, 2)), (torch.randn(16, 4),), ce(16, 2))


@healthy("mechanism")
def gaussian_process_likelihood() -> Case:
    def run(m: Net, x: Tensor, y: Tensor) -> Tensor:
        z = m.f(x)
        k = m.log_amp.exp() * torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1)) + (
            m.log_noise.exp() + 1e-4
        ) * torch.eye(20)
        chol = torch.linalg.cholesky(k)
        a = torch.cholesky_solve(y[:, None], chol)
        return 0.5 * (y @ a[:, 0]) + chol.diagonal().log().sum()

    return Case(
        Net(run, f=mlp(3, 2, 16, nn.Tanh), log_amp=torch.zeros(()), log_noise=torch.tensor(-2.0)),
        (torch.randn(20, 3), torch.randn(20)),
    )


@healthy("mechanism")
def called_with_changed_parameters() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        ws = {n: p * (1 + 0.1 * torch.tanh(m.delta)) for n, p in m.f.named_parameters()}
        return functional_call(m.f, ws, (x,))

    return Case(Net(run, f=mlp(5, 3), delta=torch.zeros(())), (torch.randn(16, 5),), ce(16, 3))


@healthy("mechanism")
def written_into_slices_in_place() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12)
        h[:, :6] = m.a(x)
        h[:, 6:] = torch.relu(m.b(x))
        h[:, 0] += h[:, 6]
        h *= 0.5
        return m.out(h)

    return Case(Net(run, a=nn.Linear(5, 6), b=nn.Linear(5, 6), out=nn.Linear(12, 3)), (torch.randn(16, 5),), ce(16, 3))


@healthy("mechanism")
def linear_bottleneck_of_one_and_bilinear() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.up(m.down(x))
        return m.out(F.gelu(m.bi(h, x)))

    return Case(
        Net(run, down=nn.Linear(8, 1), up=nn.Linear(1, 8), bi=nn.Bilinear(8, 8, 12), out=nn.Linear(12, 2)),
        (torch.randn(16, 8),),
        ce(16, 2),
    )


@healthy("mechanism")
def minimal_gated_unit_eighty_steps() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            z = torch.cat((x[:, t], h), -1)
            f = m.f(z).sigmoid()
            h = torch.lerp(h, m.h(torch.cat((x[:, t], f * h), -1)).tanh(), f)
        return m.out(h)

    model = Net(run, f=nn.Linear(20, 16), h=nn.Linear(20, 16), out=nn.Linear(16, 2))
    nn.init.constant_(model.f.bias, -2.0)
    return Case(model, (torch.randn(4, 80, 4),), ce(4, 2))


@healthy("mechanism")
def nested_containers_with_one_shared_block() -> Case:
    shared = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.SiLU())
    inner = nn.Sequential(
        nn.Sequential(shared, nn.Sequential(shared)), nn.ModuleDict({"x": nn.Linear(12, 12)})["x"], shared
    )
    return Case(
        nn.Sequential(nn.Linear(4, 12), nn.Sequential(inner), nn.Linear(12, 2)), (torch.randn(16, 4),), ce(16, 2)
    )


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


@healthy("mechanism")
def binary_weights_straight_through() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.hardtanh(F.batch_norm(F.linear(x, Half.apply(m.w)), None, None, training=True))
        return m.out(h)

    return Case(Net(run, w=torch.randn(24, 10) * 0.3, out=nn.Linear(24, 3)), (torch.randn(32, 10),), ce(32, 3))


@healthy("mechanism")
def trained_binary_gates_and_small_tanh_input() -> Case:
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long()
    model = Net(
        lambda m, z: m.out(torch.sigmoid(3 * m.g(z)) * torch.tanh(m.f(z))),
        g=nn.Linear(6, 16),
        f=nn.Linear(6, 16),
        out=nn.Linear(16, 2),
    )
    return fit(Case(model, (x,), lambda o: F.cross_entropy(o, y)), 300, 1e-2)


@healthy("deep")
def plain_he_conv_thirty_in_eval() -> Case:
    m = he(
        nn.Sequential(*[x for _ in range(30) for x in (nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(inplace=True))]), 2.0
    )
    return Case(
        nn.Sequential(nn.Conv2d(3, 12, 1), m, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)).eval(),
        (torch.randn(4, 3, 12, 12),),
        ce(4, 4),
    )
