"""A program, what is right to say of it, and whether plain torch agrees that it is so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """What a user would call: ``loss(model(*args, **kwargs)).backward()``."""

    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    trains: bool = True


@dataclass(frozen=True)
class Plain:
    """One plain step: the loss and each trainable parameter's gradient."""

    loss: float
    grads: dict[str, Tensor | None]

    def norm(self, name: str) -> float:
        """L2 norm in float64; 0 where there is no gradient."""
        grad = self.grads[name]
        return 0.0 if grad is None else float(grad.double().norm())

    def ratio(self, first: str, last: str) -> float:
        """Norm of one parameter's gradient over that of another."""
        return self.norm(first) / max(self.norm(last), 1e-300)

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are."""
        return math.isfinite(self.loss) and all(
            bool(torch.isfinite(g).all()) for g in self.grads.values() if g is not None
        )


def scalar(case: Case, out: Any) -> Tensor:
    """The loss of an output."""
    if case.loss is not None:
        return case.loss(out)
    return out if isinstance(out, Tensor) else out.loss


def plain_step(case: Case) -> Plain:
    """One forward and backward in plain torch."""
    case.model.zero_grad(set_to_none=True)
    loss = scalar(case, case.model(*case.args, **case.kwargs))
    loss.backward()
    grads = {
        n: None if p.grad is None else p.grad.detach().to_dense().clone()
        for n, p in case.model.named_parameters()
        if p.requires_grad
    }
    case.model.zero_grad(set_to_none=True)
    return Plain(float(loss.detach()), grads)


def trains(case: Case, steps: int = 12, lr: float = 2e-3) -> bool:
    """Whether some steps of Adam on this batch lower the loss."""
    opt = torch.optim.Adam([p for p in case.model.parameters() if p.requires_grad], lr=lr, eps=1e-30)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step % 3)
        opt.zero_grad()
        loss = scalar(case, case.model(*case.args, **case.kwargs))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return all(map(math.isfinite, losses)) and min(losses[-3:]) < max(losses[:3])


Real = Callable[[Plain], bool]


@dataclass(frozen=True)
class Program:
    """A seeded program.

    Attributes:
        name: of the function that makes it.
        group: ``"fault"``, ``"trap"`` or ``"healthy"``.
        kind: the kind of fault, for the table.
        make: seed is set before it is called.
        rules: acceptable rules of the first finding.
        places: regular expressions, one of which has to match the blamed node's key, site or parameter fully.
        real: plain torch's word on it.
        steps: for a series: what to change before step n; None for the one-shot form.
        seeds: how many seeds to try.
    """

    name: str
    group: str
    kind: str
    make: Callable[[], Case]
    rules: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    real: Real | None = None
    steps: int | None = None
    each: Callable[[Case, int], Case] | None = None
    seeds: int = 3


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Take one in."""
    assert program.name not in PROGRAMS, program.name
    PROGRAMS[program.name] = program


def fault(kind: str, rules: str, places: str, real: Real, group: str = "fault", **more: Any) -> Callable[..., Any]:
    """Register a fault; ``rules`` and ``places`` are separated by spaces."""

    def take(make: Callable[[], Case]) -> Callable[[], Case]:
        add(Program(make.__name__, group, kind, make, tuple(rules.split()), tuple(places.split()), real, **more))
        return make

    return take


def healthy(kind: str = "init", **more: Any) -> Callable[..., Any]:
    """Register a control."""

    def take(make: Callable[[], Case]) -> Callable[[], Case]:
        add(Program(make.__name__, "healthy", kind, make, **more))
        return make

    return take
