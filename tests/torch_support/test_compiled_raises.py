"""Compiled code that raises inside of a watched call leaves modes, hooks and dynamo as they were."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.modules.module as registry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxgrad
from fxgrad.torch_support import compiled


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bad = nn.Linear(4, 4), False

        def part(h: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            if self.bad:
                message = "the user's"
                raise ValueError(message)
            return h.relu() * 2

        self.part = torch.compile(part, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.a(x)).sum()


def state() -> tuple[Any, ...]:
    frames = torch._dynamo.eval_frame
    return (
        torch.overrides._get_current_function_mode_stack(), len(registry._global_forward_hooks),
        len(registry._global_forward_pre_hooks), frames.set_eval_frame, frames.OptimizedModule.__call__,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("outer", [Mode, contextlib.nullcontext])
def test_all_is_as_it_was(outer: Any, native: bool) -> None:
    torch._dynamo.reset()
    model = Net()
    with outer():
        before = state()
        with fxgrad.watch(model, native=native):
            for number in range(5):
                model.bad = number in (0, 2)
                with pytest.raises(ValueError, match="the user's") if model.bad else contextlib.nullcontext():
                    model(torch.ones(2, 4)).backward()
                assert state()[0] == before[0]
        assert state() == before
    torch._dynamo.reset()


def test_a_compiled_call_that_dynamo_never_ends() -> None:
    thread = compiled._THREAD
    with Mode():
        before = state()
        with compiled.Looking(Mode(), lambda *_: None, lambda *_: None):
            up = state()
            assert up != before
            thread.begins("a call")  # as the entry does that stands in front of dynamo; its end is left out
            assert thread.away is not None and state()[:3] == before[:3]
        assert state() == before
    assert thread.away is None  # the next compiled call is looked away from again
