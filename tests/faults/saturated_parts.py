"""Saturated units in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, between, ce, fresh, nil
from tests.faults.places import fault
from tests.faults.program import Built


@fault("saturated scale_break vanishing zero", r"/(softsign|mul).*", nil("a.weight", 1.0))
def softsign_of_ten_thousands() -> Built:
    return between(lambda h: F.softsign(h * 1e5))


@fault("saturated scale_break vanishing zero", r"/(erf|mul).*", nil("a.weight", 0.5))
def erf_of_hundreds() -> Built:
    return between(lambda h: torch.erf(h * 20 + 200))


@fault("saturated dead zero", r"act", nil("a.weight"))
def hard_sigmoid_outside() -> Built:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 10), act=nn.Hardsigmoid(), c=nn.Linear(10, 3))
    nn.init.constant_(model.a.bias, 50.0)
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("saturated", r"/(softmax|div).*", lambda g: g.finite)
def attention_at_temperature_a_thousandth() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        w = F.softmax(torch.einsum("bqd,bkd->bqk", q, k) / 1e-3, dim=-1)
        return m.c(torch.einsum("bqk,bkd->bqd", w, v).mean(1))

    return Built(
        Net(run, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), c=nn.Linear(8, 3)),
        (torch.randn(6, 9, 8),),
        ce(6, 3),
    )


@fault("saturated", r".*(sigmoid|lerp).*|cell.*|gate", lambda g: g.finite and g.norm("cand.weight") < 1e-6)
def update_gate_always_carries() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x[:, 0])
        for t in range(6):
            z = torch.sigmoid(m.gate(x[:, t]))
            h = z * h + (1 - z) * torch.tanh(m.cand(x[:, t]))
        return m.c(h)

    model = Net(run, enter=nn.Linear(5, 10), gate=nn.Linear(5, 10), cand=nn.Linear(5, 10), c=nn.Linear(10, 3))
    nn.init.constant_(model.gate.bias, 25.0)
    return Built(model, (torch.randn(6, 6, 5),), ce(6, 3))


@fault("saturated vanishing zero", r".*tanh.*|act", lambda g: g.norm("a.weight") < 0.1, steps=8, each=fresh)
def tanh_saturates_over_steps() -> Built:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 16), act=nn.Tanh(), c=nn.Linear(16, 3))
    with torch.no_grad():
        model.a.weight.mul_(200)
    return Built(model, (torch.randn(16, 6),), ce(16, 3))
