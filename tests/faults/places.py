"""Programs that were written without a look at the checks.

Each brings its own proof in plain torch, and says by regular expressions what may be blamed, as a whole word.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.faults.program import HISTORY, ONE_SHOT, Built, Register

UNSEEN = Register("unseen")
QUIET = {"frozen", "starved", "unused", "symmetry", "loss_seed"}  # what may be right to say as information
Each = Callable[[Built, int], Built]


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


Real = Callable[[Plain], bool]


def plain_step(built: Built) -> Plain:
    """One forward and backward in plain torch."""
    built.model.zero_grad(set_to_none=True)
    loss = built.loss_at(0)
    loss.backward()
    grads = {
        n: None if p.grad is None else p.grad.detach().to_dense().clone()
        for n, p in built.model.named_parameters()
        if p.requires_grad
    }
    built.model.zero_grad(set_to_none=True)
    return Plain(float(loss.detach()), grads)


def finite(plain: Plain) -> bool:
    """What plain torch has to say of a healthy program."""
    return plain.finite


def trains(built: Built, steps: int = 12) -> bool:
    """Whether some steps of Adam on this batch lower the loss."""
    optimizer = torch.optim.Adam([p for p in built.model.parameters() if p.requires_grad], lr=2e-3, eps=1e-30)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step % 3)
        optimizer.zero_grad()
        loss = built.loss_at(0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return all(map(math.isfinite, losses)) and min(losses[-3:]) < max(losses[:3])


def fault(rules: str, places: str, real: Real, *, name: str = "", **more: Any) -> Callable[..., Any]:
    """Registers a fault; ``rules`` and ``places`` are separated by spaces, ``more`` is for ``_added``."""

    def take(make: Callable[[], Built]) -> Callable[[], Built]:
        expect = tuple(rules.split())
        answer = {"places": tuple(places.split()), "info_ok": bool(QUIET & set(expect))}
        _added(name, make, expect, real=real, **answer, **more)
        return make

    return take


def healthy(*, name: str = "", **more: Any) -> Callable[..., Any]:
    """Registers a control."""

    def take(make: Callable[[], Built]) -> Callable[[], Built]:
        _added(name, make, (), real=finite, **more)
        return make

    return take


def _added(
    name: str, make: Callable[[], Built], expect: tuple[str, ...], *, steps: int = 0, each: Each | None = None,
    **answer: Any,
) -> None:  # fmt: skip
    """``steps``: of a program that is watched over several, where ``each`` changes something before a step."""
    form = HISTORY if steps else ONE_SHOT
    made = functools.partial(_stepping, make, steps, each) if steps else make
    UNSEEN.add(name or make.__name__, made, expect, forms=form, half="unseen", seed_offsets=(0, 77), **answer)


def _stepping(make: Callable[[], Built], steps: int, each: Each | None) -> Built:
    def loop(built: Built, optimizer: Any) -> None:
        for step in range(built.steps):
            now = each(built, step) if each else built
            optimizer.zero_grad()
            now.loss_at(0).backward()
            optimizer.step()

    return dataclasses.replace(
        make(),
        steps=steps,
        loop=loop,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        known=False,
    )
