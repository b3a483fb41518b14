"""Modes of the user's around a step see what they see without us."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import fxgrad

X = torch.linspace(-1, 1, 12).reshape(3, 4)
TANH = fxgrad.rules.nodes("1")


class Operators(TorchDispatchMode):
    """Counts the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[resolve_name(func) or str(func)] += 1
        return func(*args, **(kwargs or {}))


def seen(mode: type[Operators | Functions], options: dict[str, Any] | None, rule: Any = None) -> Counter[str]:
    """What a mode around the last of some steps saw; ``options``: of the watch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters())
    counting = mode()
    with contextlib.ExitStack() as stack:
        if options is not None:
            given = {**options, "optimizer": optimizer} if "optimizer" in options else options
            stack.enter_context(fxgrad.watch(model, **given))
        if rule is not None:
            stack.enter_context(fxgrad.rewrite(model, [rule]))
        for step in range(4):
            optimizer.zero_grad()
            with counting if step == 3 else contextlib.nullcontext():
                model(X).square().mean().backward()
                optimizer.step()
    return counting.seen


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"forward": True}, {"statistics": "full"}, {"sites": "edge"}, {"optimizer": None},
    {"optimizer": None, "forward": True, "statistics": "full", "sites": "edge"},
])  # fmt: skip
@pytest.mark.parametrize("mode", [Operators, Functions])
def test_a_watch_adds_nothing(mode: type[Operators | Functions], options: dict[str, Any], *, native: bool) -> None:
    assert seen(mode, {**options, "native": native}) == seen(mode, None)


@pytest.mark.parametrize("options", [None, {}])
def test_a_rule_adds_what_it_computes_and_no_more(options: dict[str, Any] | None) -> None:
    more = seen(Operators, options, fxgrad.rules.scale(0.5, TANH))
    more.subtract(seen(Operators, None))
    assert {name: count for name, count in more.items() if count} == {"aten.mul.Tensor": 1}
