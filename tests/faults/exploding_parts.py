"""Gradients that explode in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, between, big, he, lins, params
from tests.faults.places import fault
from tests.faults.program import Built


def summed(case: Built, step: int) -> Built:
    if step != 35:
        return case
    return Built(case.model, case.args, lambda o: case.loss(o) * 4096)


@fault("exploding", r"/einsum.* /relu.*", big("ws.0", "out.bias", 1e4))
def einsum_of_standard_normal_weights() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for w in m.ws:
            x = torch.relu(torch.einsum("oi,bi->bo", w, x))
        return m.out(x)

    return Built(
        Net(run, ws=params(13, 32, 32, std=1.0), out=nn.Linear(32, 1)), (torch.randn(8, 32),), lambda o: o.mean()
    )


@fault("exploding", r"(/add|fs).*", lambda g: g.finite and g.norm("enter.weight") > 1e5)
def residual_with_alpha_four() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x)
        for f in m.fs:
            h = h.add(f(h), alpha=4)
        return m.out(h)

    model = Net(run, enter=nn.Linear(4, 16), fs=he(lins(14, 16), 1.0), out=nn.Linear(16, 1))
    return Built(model, (torch.randn(8, 4),), lambda o: o.tanh().mean() + o.mean())


@fault("exploding", r".*\d+.*", lambda g: g.finite and g.norm("0.weight") > 1e4)
def wide_gelu_std_point_three() -> Built:
    m = nn.Sequential(*[x for _ in range(9) for x in (nn.Linear(512, 512), nn.GELU())], nn.Linear(512, 4))
    for p in m.parameters():
        nn.init.normal_(p, std=0.3) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(3, 512),), lambda o: o.mean())


@fault("exploding", r"/.*", lambda g: g.finite and g.norm("enter.weight") > 1e5)
def identity_recurrence_of_one_point_eight() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x[:, 0])
        for t in range(30):
            h = (h @ m.w + 0.01 * x[:, t].sum(-1, keepdim=True)).relu()
        return m.out(h)

    model = Net(run, enter=nn.Linear(3, 8), w=1.8 * torch.eye(8), out=nn.Linear(8, 1))
    return Built(model, (torch.randn(6, 30, 3),), lambda o: o.mean())


@fault("exploding", r"up\.\d+.*", big("up.0.weight", "up.22.bias", 1e4))
def transposed_convolutions_too_loud() -> Built:
    ups = [x for _ in range(12) for x in (nn.ConvTranspose2d(8, 8, 3, padding=1), nn.LeakyReLU(0.2))]
    m = Net(lambda s, x: s.up(x).mean((2, 3)), up=nn.Sequential(*ups))
    for p in m.parameters():
        nn.init.normal_(p, std=1.0) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(2, 8, 6, 6),), lambda o: o.mean())


@fault("spike", r".*", lambda g: g.finite, steps=38, each=summed)
def one_step_with_a_summed_loss() -> Built:
    case = between(F.leaky_relu)
    return Built(case.model, case.args, case.loss)


@fault("exploding scale_break", r"/(cumprod|mul|add).*", lambda g: g.finite and g.norm("a.weight") > 1e6)
def running_product_of_threes() -> Built:
    model = Net(lambda m, x: m.c((3 + m.a(x)).cumprod(-1)), a=nn.Linear(6, 24), c=nn.Linear(24, 1))
    return Built(model, (torch.randn(12, 6),), lambda o: o.mean())
