"""How many kernels each ready rule launches for a gradient, and that the documentation says the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxgrad
from fxgrad import rules
from fxgrad.rules import nodes

AT = nodes("relu")


class Cost(NamedTuple):
    """Kernels for one gradient: over its entries, reductions of it, and of one entry."""

    elementwise: int
    reductions: int = 0
    single: int = 0


#: Every ready rule without a condition is one elementwise kernel, or none.
CHEAP: dict[str, tuple[rules.Rule, Cost]] = {
    "scale": (rules.scale(0.5, AT), Cost(1)),
    "clip_by_value": (rules.clip_by_value(1.0, AT), Cost(1)),
    "replace_nonfinite": (rules.replace_nonfinite(AT), Cost(1)),
    "zero_out": (rules.zero_out(AT), Cost(1)),
    "freeze": (rules.freeze("relu"), Cost(1)),
    "sign": (rules.sign(AT), Cost(1)),
    "guided_relu": (rules.guided_relu(), Cost(1)),
    "straight_through": (rules.straight_through(AT), Cost(0)),
    "custom": (rules.custom(lambda g: g * 2, AT), Cost(1)),
    "custom_layer": (rules.custom_layer(lambda d: {"": d[""] * 2}, AT), Cost(1)),
}
#: And these are not, for the reason that stands here.
EXCEPTIONS: dict[str, tuple[rules.Rule, Cost, str]] = {
    "clip_by_norm": (rules.clip_by_norm(1e-9, AT), Cost(1, 1, 5), "the norm is a reduction; a condition on it"),
    "unit_norm": (rules.unit_norm(AT), Cost(1, 1, 5), "the norm is a reduction; a condition on it"),
    "replace_zeros": (rules.replace_zeros(1.0, AT), Cost(2, 0, 1), "a condition on each entry: the mask, and its use"),
    "where": (rules.where(lambda g: g > 0, None, 0.0, AT), Cost(2, 0, 1), "a condition on each entry, of the user"),
    "add_noise": (rules.add_noise(1.0, AT), Cost(2), "the noise is drawn, then added"),
    "fill_zero": (rules.fill_zero(where=AT), Cost(2, 1, 4), "two conditions: on the layer, and on each entry"),
}
_MADE = {"new_full", "scalar_tensor"}  # numbers, filled in on the device
_SYNCS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item"}


class Kernels(TorchDispatchMode):
    """Sorts what is computed by how many entries go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.names.add(name)
        if isinstance(result, Tensor) and name != "detach":  # which is a view
            many = result.numel() > 1
            reduces = name not in _MADE and any(isinstance(one, Tensor) and one.numel() > 1 for one in args)
            self.kinds["elementwise" if many else "reductions" if reduces else "single"] += 1
        return result


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x * 2)


def kernels(rule: rules.Rule | None) -> tuple[Counter[str], set[str]]:
    """What the backward pass of a chain computes."""
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(4, 5, requires_grad=True)
    with fxgrad.rewrite(model, rules.custom(lambda _: None, AT) if rule is None else rule):
        for _ in range(3):  # so that what is made once is there
            out = model(x)
            with Kernels() as seen:
                out.backward(torch.randn(4, 5))
    return seen.kinds, seen.names


def added(rule: rules.Rule) -> Cost:
    plain, _ = kernels(None)
    found, names = kernels(rule)
    assert not names & _SYNCS
    assert not plain - found
    extra = found - plain
    return Cost(extra["elementwise"], extra["reductions"], extra["single"])


def ready() -> set[str]:
    """The names of all functions that return a rule."""
    found = {
        name for name in rules.__all__ if getattr(getattr(rules, name), "__annotations__", {}).get("return") == "Rule"
    }
    assert len(found) > 12
    return found


def test_every_ready_rule_is_listed() -> None:
    assert ready() == CHEAP.keys() | EXCEPTIONS.keys()
    assert not CHEAP.keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize("name", CHEAP)
def test_a_rule_without_a_condition_is_one_kernel_or_none(name: str) -> None:
    rule, cost = CHEAP[name]
    assert added(rule) == cost
    assert cost.elementwise <= 1


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_the_exceptions_cost_what_is_said(name: str) -> None:
    rule, cost, reason = EXCEPTIONS[name]
    assert added(rule) == cost
    assert reason


@pytest.mark.parametrize("name", CHEAP)
def test_a_condition_adds_one_where_and_no_read(name: str) -> None:
    made: Callable[..., rules.Rule] = type(CHEAP[name][0])
    rule = CHEAP[name][0]
    given = made(
        rule.name, rule.each, rule.where, rules.given(lambda g: torch.tensor(True)), rule.together, rule.through
    )
    cost = added(given)
    assert cost.elementwise == CHEAP[name][1].elementwise + 1
    assert cost.reductions == 0


def test_the_documentation_says_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewriting.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)\(.*\)` \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE))
    assert rows.keys() >= ready()
    costs = {name: cost for name, (_, cost) in CHEAP.items()} | {
        name: cost for name, (_, cost, _) in EXCEPTIONS.items()
    }
    for name, cost in costs.items():
        words = str(cost.elementwise)
        words += ", a reduction" if cost.reductions else ""
        words += f", {cost.single} of one entry" if cost.single else ""
        wanted = {"custom": "yours", "custom_layer": "yours", "where": "1 and yours"}.get(name, words)
        assert wanted in rows[name], name
