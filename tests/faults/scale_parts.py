"""Breaks of scale and starved branches in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.faults.parts import Net, big, ce, tiny
from tests.faults.places import fault
from tests.faults.program import Built


@fault("scale_break vanishing", r"/div.*", tiny("a.weight", "c.weight", 1e-4))
def divided_in_place_by_a_million() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        h = h.clone()
        h.div_(1e6)
        return m.c(F.softplus(m.b(h)))

    return Built(Net(run, a=nn.Linear(5, 9), b=nn.Linear(9, 9), c=nn.Linear(9, 2)), (torch.randn(7, 5),), ce(7, 2))


@fault("scale_break exploding", r"/conv1d.* w", big("a.weight", "out.bias", 1e3))
def one_functional_kernel_a_hundred_thousand() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x))
        h = F.conv1d(h, m.w, padding=1)
        h = F.relu(m.b(h * 1.0))
        return m.out(h.mean(-1))

    model = Net(run, a=nn.Conv1d(3, 8, 3), w=torch.randn(8, 8, 3) * 2e4, b=nn.Conv1d(8, 8, 3), out=nn.Linear(8, 2))
    return Built(model, (torch.randn(4, 3, 16),), lambda o: o.mean())


@fault("scale_break exploding", r"/mul.*", lambda g: g.finite and g.norm("a.weight") > 1e3)
def action_scale_of_a_million() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        return torch.tanh(m.b(F.elu(m.a(x)))) * 1e6

    return Built(Net(run, a=nn.Linear(4, 16), b=nn.Linear(16, 2)), (torch.randn(8, 4),), lambda o: o.mean())


@fault("scale_break vanishing", r"/(div|truediv|sub).* b_std", tiny("a.weight", "c.weight", 1e-4))
def features_standardised_by_a_wrong_buffer() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.hardswish(m.a(x))
        h = (h - m.b_mean) / m.b_std
        return m.c(F.mish(m.b(h)))

    model = Net(
        run,
        a=nn.Linear(6, 12),
        b=nn.Linear(12, 12),
        c=nn.Linear(12, 3),
        b_mean=torch.zeros(12),
        b_std=torch.full((12,), 3e6),
    )
    return Built(model, (torch.randn(10, 6),), ce(10, 3))


@fault("starved scale_break", r"/(mul|cat).*", tiny("audio.weight", "text.weight", 1e-5))
def concatenated_with_a_ten_millionth() -> Built:
    def run(m: Net, a: Tensor, b: Tensor) -> Tensor:
        return m.out(torch.cat([m.text(a), m.audio(b) * 1e-7], -1))

    model = Net(run, text=nn.Linear(6, 8), audio=nn.Linear(6, 8), out=nn.Linear(16, 2))
    return Built(model, (torch.randn(8, 6), torch.randn(8, 6)), ce(8, 2))


@fault("starved scale_break", r"/lerp.* student", tiny("student.weight", "base.weight", 1e-6))
def lerp_of_a_billionth() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.relu(m.enter(x))
        return m.out(torch.lerp(m.base(h), m.student(h), 1e-9))

    model = Net(run, enter=nn.Linear(6, 8), base=nn.Linear(8, 8), student=nn.Linear(8, 8), out=nn.Linear(8, 2))
    return Built(model, (torch.randn(8, 6),), ce(8, 2))


@fault("scale_break vanishing", r".*b.*", lambda g: g.norm("a.weight") < 1e-5 * g.norm("c.bias"))
def weight_norm_gain_of_a_ten_millionth() -> Built:
    model = Net(
        lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))),
        a=nn.Linear(6, 12),
        b=parametrizations.weight_norm(nn.Linear(12, 12)),
        c=nn.Linear(12, 3),
    )
    with torch.no_grad():
        model.b.parametrizations.weight.original0.fill_(1e-7)
    return Built(model, (torch.randn(12, 6),), ce(12, 3))
