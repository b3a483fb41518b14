"""Gradients that are exactly zero in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, Out, between, ce, nil
from tests.faults.places import fault
from tests.faults.program import Built


@fault("zero", r"/trunc.*", nil("a.weight"))
def truncated_towards_zero() -> Built:
    return between(torch.trunc)


@fault("zero", r"/(sub|clone).* a", nil("a.weight"))
def subtracted_from_itself() -> Built:
    return between(lambda h: h - h)


@fault("zero", r"/(sub|mean).* a", nil("a.weight", 1e-9))
def centred_over_a_batch_of_one() -> Built:
    return between(lambda h: h - h.mean(0, keepdim=True), n=1)


@fault("zero", r"/div.*", nil("a.weight"))
def divided_with_floor_rounding() -> Built:
    return between(lambda h: torch.div(h, 0.1, rounding_mode="floor"))


@fault("zero", r".*(up|down|lora|mul|add).*", lambda g: g.finite and g.norm("up.weight") == g.norm("down.weight") == 0)
def adapter_with_both_factors_zero() -> Built:
    model = Net(
        lambda m, x: m.c(F.gelu(m.a(x) + m.up(m.down(x)))),
        a=nn.Linear(6, 10),
        down=nn.Linear(6, 2, bias=False),
        up=nn.Linear(2, 10, bias=False),
        c=nn.Linear(10, 3),
    )
    nn.init.zeros_(model.up.weight)
    nn.init.zeros_(model.down.weight)
    model.a.requires_grad_(False)
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("zero loss_seed dead", r"/mul.*|outside.*|.*loss.*", nil("a.weight"))
def loss_inside_times_zero() -> Built:
    def run(m: Net, x: Tensor, y: Tensor) -> Out:
        logits = m.c(F.gelu(m.a(x)))
        return Out(F.cross_entropy(logits, y) * 0.0, logits)

    return Built(Net(run, a=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(8, 6), torch.randint(0, 3, (8,))))


@fault("zero", r"/(getitem|narrow|sum).* a", nil("a.weight"))
def slice_that_is_empty() -> Built:
    model = Net(lambda m, x: m.c(m.a(x)[:, 10:].sum(-1, keepdim=True)), a=nn.Linear(6, 10), c=nn.Linear(1, 3))
    return Built(model, (torch.randn(12, 6),), ce(12, 3))


@fault("zero vanishing scale_break", r"gn", lambda g: g.norm("a.weight") < 1e-4 * g.norm("c.bias"))
def group_norm_of_single_values() -> Built:
    model = Net(lambda m, x: m.c(F.relu(m.gn(m.a(x)))), a=nn.Linear(6, 10), gn=nn.GroupNorm(10, 10), c=nn.Linear(10, 3))
    nn.init.ones_(model.gn.bias)
    return Built(model, (torch.randn(12, 6),), ce(12, 3))


@fault("zero saturated", r"/(sub|add|mean|sum|stack|sigmoid|softmax).* a", nil("a.weight", 1e-7))
def difference_of_the_same_thing_twice() -> Built:
    return between(lambda h: torch.tanh(h) - torch.tanh(h) + 0.5)


@fault("zero", r"/(pow|mul).* a", nil("a.weight"))
def to_the_power_of_zero() -> Built:
    return between(lambda h: h.abs().add(1).pow(0))


@fault(
    "zero detached",
    r"/(eq|ne|lt|le|gt|ge|to|float|type).*|/mul.*",
    lambda g: g.grads["a.weight"] is None or g.norm("a.weight") == 0,
)
def gate_by_comparison_only() -> Built:
    return between(lambda h: h.gt(0).to(torch.float32) * 2 - 1)
