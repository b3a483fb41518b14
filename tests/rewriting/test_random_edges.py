"""Random rules at random edges equal a reference that puts a custom autograd function on each use of a value."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.rules import edges
from tests.rewriting.test_random import PAIRS

ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "sin": torch.sin, "sigmoid": torch.sigmoid, "cos": torch.cos,
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul, "sub": torch.sub}
Step = tuple[str, tuple[int, ...]]  # an op, and the numbers of the values that it takes
Use = tuple[int, int]  # number of a step, and as which argument


def program(rng: random.Random, length: int = 9) -> list[Step]:
    """Steps that take values before them; the last ones add up what nothing else uses."""
    steps: list[Step] = [("sin", (0,))]
    for _ in range(length):
        known = range(1, len(steps) + 1)
        two = len(steps) > 1 and rng.random() < 0.5
        steps.append((rng.choice(list(TWO if two else ONE)), tuple(rng.sample(known, 1 + two))))
    while True:
        used = {value for _, taken in steps for value in taken}
        free = [value for value in range(1, len(steps) + 1) if value not in used]
        if len(free) == 1:
            return steps
        steps.append(("add", (free[0], free[1])))


class Function(torch.autograd.Function):
    """The identity, whose gradient is changed by hand."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, work: list[Callable[[Tensor], Tensor]]) -> Tensor:
        ctx.work = work
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for step in ctx.work:
            gradient = step(gradient)
        return gradient, None


class Program(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.work: Mapping[Use, list[Callable[[Tensor], Tensor]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for number, (word, taken) in enumerate(self.steps):
            given = [values[value] for value in taken]
            if self.work:
                given = [Function.apply(v, self.work.get((number, n), [])) for n, v in enumerate(given)]
            values.append(ONE[word](*given) if word in ONE else TWO[word](*given))
        return values[-1]


def keys_of(steps: list[Step]) -> list[str]:
    """The node key of each step."""
    count: Counter[str] = Counter()
    found = []
    for word, _ in steps:
        found.append(f"/{word}" + (f"#{count[word]}" if count[word] else ""))
        count[word] += 1
    return found


def check(seed: int, capture: str) -> bool:
    """Compare; whether the rules changed anything."""
    rng = random.Random(seed)  # noqa: S311
    steps = program(rng)
    keys = keys_of(steps)
    uses = [(number, n) for number, (_, taken) in enumerate(steps) for n, value in enumerate(taken) if value]
    made, work = [], dict[Use, list[Any]]()
    for _ in range(rng.randint(1, 4)):
        rule, by_hand = rng.choice(PAIRS)
        chosen = rng.sample(uses, min(len(uses), rng.randint(1, 3)))
        words = {(keys[steps[number][1][n] - 1], keys[number], f"args[{n}]") for number, n in chosen}
        made.append(rule(edges(predicate=lambda edge, words=words:
                               (edge.producer, edge.consumer.key, edge.consumer.argument) in words)))  # fmt: skip
        for use in chosen:
            work.setdefault(use, []).append(by_hand)
    torch.manual_seed(seed)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    reference = Program(steps)
    reference.work = work
    (want,) = torch.autograd.grad(reference(x).sum(), x)
    (plain,) = torch.autograd.grad(Program(steps)(x).sum(), x)
    model = Program(steps)
    with fxgrad.rewrite(model, made, capture=capture) as rewrite, fxgrad.watch(model, sites="edge") as watch:  # type: ignore[arg-type]
        for _ in range(3):
            (found,) = torch.autograd.grad(model(x).sum(), x)
            torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
        told = [edge for edge in watch.flow().edges if edge.rewritten is not None]
    assert not rewrite.report().not_rewritten
    assert {record.ran for record in rewrite.report().records} == {3}
    assert len(told) == len(work)
    for edge in told:
        assert edge.rewritten is not None
        assert edge.rewritten.reason is None
        assert edge.rewritten.after == edge.statistics
    return not torch.allclose(plain, want)


@pytest.mark.parametrize("block", range(4))
def test_random_rules_at_random_edges(block: int) -> None:
    seeds = range(6 * block, 6 * block + 6)
    assert sum(check(seed, ("auto", "eager")[seed % 2]) for seed in seeds) > 2


@pytest.mark.sweep
def test_many_random_rules_at_random_edges() -> None:
    for seed in range(1000, 1200):
        check(seed, ("auto", "eager")[seed % 2])
