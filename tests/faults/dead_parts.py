"""Dead units in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, between, ce, fresh, nil
from tests.faults.places import fault
from tests.faults.program import Built


@fault("dead zero", r"/relu_?.*", nil("w"))
def functional_bias_of_minus_forty() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.c(torch.relu_(F.linear(x, m.w, m.bias)))

    model = Net(run, w=torch.randn(10, 6), bias=torch.full((10,), -40.0), c=nn.Linear(10, 3))
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("dead zero saturated", r"/_?threshold.*", nil("a.weight"))
def threshold_of_fifty() -> Built:
    return between(lambda h: F.threshold(h, 50.0, 0.0))


@fault("dead zero saturated", r"/hardshrink.*", nil("a.weight"))
def hard_shrinkage_of_everything() -> Built:
    return between(lambda h: F.hardshrink(h, 100.0))


@fault("dead zero", r"/(relu|square|pow).*", nil("a.weight"))
def squared_relu_never_on() -> Built:
    return between(lambda h: F.relu(h).square(), bias=-25.0)


@fault("dead zero", r"/maximum.*", nil("a.weight"))
def maximum_with_zero_never_on() -> Built:
    return between(lambda h: torch.maximum(h, torch.zeros(())), bias=-25.0)


@fault("dead zero saturated", r"/hardswish.*", nil("a.weight"))
def hard_swish_far_left() -> Built:
    return between(F.hardswish, bias=-25.0)


@fault("dead zero", r"(router|/relu).*", nil("experts.0.weight"))
def relu_router_never_routes() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        gate = F.relu(m.router(x))
        y = torch.stack([e(x) for e in m.experts], 1)
        return m.c((gate.unsqueeze(-1) * y).sum(1))

    model = Net(
        run, router=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 8) for _ in range(3)), c=nn.Linear(8, 3)
    )
    nn.init.constant_(model.router.bias, -20.0)
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("dead zero", r"/(where|gt).*", nil("a.weight"))
def relu_by_where_never_on() -> Built:
    return between(lambda h: torch.where(h > 0, h, torch.zeros_like(h)), bias=-25.0)


@fault("dead zero", r"/(relu|neg|sub|abs).*", nil("a.weight"))
def relu_of_what_is_always_negative() -> Built:
    return between(lambda h: torch.relu(-h.abs() - 1))


@fault("dead zero saturated", r"/clamp.*", nil("a.weight"))
def clamped_in_place_from_thirty() -> Built:
    return between(lambda h: h.clone().clamp_(min=30.0))


@fault("dead zero saturated", r"act", nil("a.weight"))
def relu_six_module_all_above() -> Built:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 10), act=nn.ReLU6(), c=nn.Linear(10, 3))
    nn.init.constant_(model.a.bias, 30.0)
    return Built(model, (torch.randn(32, 6),), ce(32, 3))


@fault("dead zero", r"features\.1", nil("features.0.weight"))
def module_relu_after_negative_batch_of_one() -> Built:
    model = Net(
        lambda m, x: m.c(m.features(x).mean((2, 3))),
        features=nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True)),
        c=nn.Linear(6, 3),
    )
    nn.init.constant_(model.features[0].bias, -30.0)
    return Built(model, (torch.randn(1, 2, 9, 9),), ce(1, 3))


@fault("dead zero", r"/(relu|neg|sub|abs).*", nil("a.weight"))
def always_negative_and_wide() -> Built:
    return between(lambda h: torch.relu(-h.abs() - 1), width=64)


@fault("dead zero saturated", r"act", nil("a.weight"))
def hard_sigmoid_outside_and_wide() -> Built:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 64), act=nn.Hardsigmoid(), c=nn.Linear(64, 3))
    nn.init.constant_(model.a.bias, 50.0)
    return Built(model, (torch.randn(64, 6),), ce(64, 3))


@fault("dead zero saturated", r"/clamp.*", nil("a.weight"))
def clamped_from_thirty_and_wide() -> Built:
    return between(lambda h: h.clamp(min=30.0), width=64)


@fault("dead zero saturated", r"/hardtanh.*|/clamp.*", nil("a.weight"))
def clamped_below_minus_thirty() -> Built:
    return between(lambda h: torch.clamp(h, max=-30.0), width=8)


@fault("dead zero", r"/relu.*", nil("a.weight"))
def relu_of_minus_softplus() -> Built:
    return between(lambda h: F.relu(-F.softplus(h)), width=4)


@fault("dead zero saturated", r"/softshrink.*", nil("a.weight"))
def soft_shrinkage_of_everything() -> Built:
    return between(lambda h: F.softshrink(h, 80.0))


@fault("dead zero", r"/relu|act|/clamp.*", lambda g: g.norm("a.weight") == 0, steps=8, each=fresh)
def dead_without_a_cause_over_steps() -> Built:
    model = Net(lambda m, x: m.c(torch.relu(-m.a(x).abs() - 0.1)), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Built(model, (torch.randn(64, 6),), ce(64, 3))
