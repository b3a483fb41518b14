"""Gradients under rules, found the naive way: ``torch.autograd.grad`` segment by segment, rewritten by hand between.

Shares nothing with fxgrad: the twin of a model is cut at every site, so that each piece is differentiated alone, and
what comes out of one piece is rewritten before it goes into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import At, Loss, Twin, run_twin

Work = list[Callable[[Tensor], Tensor]]


class CutAt(At):
    """Cuts the graph at every value that requires a gradient.

    Attributes:
        cuts: for each site that is cut: the value that came, and the leaf that goes on in its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, tuple[Tensor, Tensor]] = {}

    def _change(self, site: str, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self.cuts[site] = (value, leaf)
        return leaf


class Sums:
    """What every leaf has got so far."""

    def __init__(self, ends: list[Tensor]) -> None:
        self.ends = ends
        self.total: dict[int, Tensor] = {}

    def send(self, value: Tensor, gradient: Tensor) -> None:
        """Differentiate the piece that ends in ``value``."""
        if value.grad_fn is None:  # an argument that was cut off as it was
            found: Any = [gradient if end is value else None for end in self.ends]
        else:
            found = torch.autograd.grad(value, self.ends, gradient, retain_graph=True, allow_unused=True)
        for end, part in zip(self.ends, found, strict=True):
            if part is not None:
                old = self.total.get(id(end))
                self.total[id(end)] = part if old is None else old + part

    def of(self, end: Tensor) -> Tensor | None:
        return self.total.get(id(end))


def rewritten_gradients(
    twin: Twin, model: nn.Module, args: tuple[Any, ...], loss: Loss, work: Mapping[str, Work]
) -> tuple[dict[str, Tensor | None], list[Tensor | None]]:
    """The gradients of parameters and of inputs, where ``work`` is done at sites.

    A site that returns the very tensor of an earlier one comes before that one in the backward pass.
    """
    at = CutAt()
    inputs: list[Tensor] = []

    def keep(model: nn.Module, at: At, *given: Any) -> Any:
        inputs.extend(given)
        return twin(model, at, *given)

    copied, output = run_twin(keep, model, at, args, {}, seed=0)
    parameters = dict(copied.named_parameters())
    leaves = [leaf for _, leaf in at.cuts.values()]
    sums = Sums([end for end in (*leaves, *parameters.values(), *inputs) if end.requires_grad])
    scalar = loss(output)
    if scalar.requires_grad:
        sums.send(scalar, torch.ones_like(scalar))
    for site, (value, leaf) in reversed(at.cuts.items()):
        gradient = sums.of(leaf)
        if gradient is not None:
            for step in _work_at(site, at, work):
                gradient = step(gradient)
            sums.send(value, gradient)
    return {name: sums.of(p) for name, p in parameters.items()}, [sums.of(x) for x in inputs]


def _work_at(site: str, at: At, work: Mapping[str, Work]) -> Work:
    """All that is done to the gradient of one tensor, that of its last site first."""
    same = []
    for other in at.origin:
        origin = other
        while origin in at.origin:
            origin = at.origin[origin]
        if origin == site:
            same.insert(0, other)
    return [step for name in (*same, site) for step in work.get(name, ())]
