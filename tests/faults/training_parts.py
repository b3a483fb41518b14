"""Underflow, symmetry and losses in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, between, mse, nil
from tests.faults.places import fault
from tests.faults.program import Built


@fault("loss_seed zero", r"outside.*|.*loss.*", nil("a.weight"))
def sample_weights_all_zero() -> Built:
    case = between(F.gelu)
    return Built(case.model, case.args, lambda o: (o.log_softmax(-1)[:, 0] * torch.zeros(16)).mean())


@fault("underflow", r".* outside.*", lambda g: float((g.grads["a.weight"] == 0).float().mean()) > 0.5)
def half_gated_unit_scaled_down() -> Built:
    model = Net(
        lambda m, x: m.c(m.a(x) * torch.sigmoid(m.g(x))), a=nn.Linear(16, 32), g=nn.Linear(16, 32), c=nn.Linear(32, 4)
    ).half()
    y = torch.randint(0, 4, (64,))
    return Built(model, (torch.randn(64, 16).half(),), lambda o: F.cross_entropy(o.float(), y) * 1e-5)


@fault("underflow", r".* outside.*", lambda g: float((g.grads["w"] == 0).float().mean()) > 0.5)
def half_recurrence_averaged_over_pixels() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12, dtype=torch.half)
        for t in range(x.shape[1]):
            h = torch.tanh(F.linear(x[:, t], m.u) + h @ m.w)
        return m.c(h)

    model = Net(run, u=torch.randn(12, 5) * 0.4, w=torch.randn(12, 12) * 0.25, c=nn.Linear(12, 2)).half()
    return Built(model, (torch.randn(6, 8, 5).half(),), lambda o: o.float().square().mean() * 1e-6)


@fault("symmetry", r".*(w1|w2|linear|tanh|matmul).*", lambda g: float(g.grads["w1"].std(0).max()) < 1e-6)
def functional_constant_weights() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, m.w1)), m.w2)

    model = Net(run, w1=torch.full((12, 6), 0.2), w2=torch.full((1, 12), 0.2))
    return Built(model, (torch.randn(16, 6),), mse(16, 1))
