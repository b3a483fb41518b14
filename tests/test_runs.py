"""Two equal steps compare as equal, and every single difference is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runs import RunResult, assert_same_run, difference, plain_run, run_differences, structure_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.spare = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": self.drop(self.norm(self.fc(x))), "step": 1}


def step(change: Callable[[nn.Module], None] = lambda model: None, seed: int = 0, **more: Any) -> RunResult:
    torch.manual_seed(3)
    model = Small()
    x = torch.randn(4, 3, requires_grad=True)
    change(model)
    return plain_run(model, (x,), None, more.pop("loss", lambda output: output["out"].square().mean()), seed, **more)


def with_error(output: Any) -> Tensor:
    message = "no loss today"
    raise ValueError(message)


def wrapped(**kinds: Any) -> Callable[[nn.Module], None]:
    """A change of the model: its forward is replaced by one that ``kinds['around']`` is applied to."""

    def change(model: nn.Module) -> None:
        plain = model.forward
        model.forward = lambda x: kinds["around"](model, plain(x))  # type: ignore[method-assign]

    return change


def draw(model: nn.Module, output: Any) -> Any:
    torch.rand(1)
    return output


def twice(model: Any, output: Any) -> Any:
    model.norm(torch.ones(2, 4))
    return output


def touch_spare(model: Any, output: Any) -> Any:
    return {**output, "out": output["out"] + 0 * model.spare(torch.ones(2)).sum()}


def tiny(model: nn.Module, output: Any) -> Any:
    return {**output, "out": output["out"] * (1 + 1e-7)}


CHANGES: dict[str, Callable[[], RunResult]] = {
    "another seed": lambda: step(seed=1),
    "a random number drawn": lambda: step(wrapped(around=draw)),
    "batch statistics counted twice": lambda: step(wrapped(around=twice)),
    "a zero gradient where there was none": lambda: step(wrapped(around=touch_spare)),
    "the last bit of an output": lambda: step(wrapped(around=tiny)),
    "another non-tensor": lambda: step(wrapped(around=lambda model, output: {**output, "step": 2})),
    "another output type": lambda: step(wrapped(around=lambda model, output: {"out": [output["out"]], "step": 1})),
    "a detached output": lambda: step(wrapped(around=lambda m, o: {**o, "more": o["out"].detach()})),
    "a module left in eval": lambda: step(wrapped(around=lambda model, o: (model.drop.eval(), o)[1])),
    "a frozen parameter": lambda: step(lambda model: model.spare.requires_grad_(False) and None),
    "an error": lambda: step(loss=with_error),
    "a new state_dict key": lambda: step(lambda model: model.register_buffer("more", torch.ones(1))),
    "no backward": lambda: step(loss=None),
}


def test_equal_runs_are_equal() -> None:
    assert_same_run(step(), step())


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_seen(name: str) -> None:
    assert run_differences(CHANGES[name](), step())
    with pytest.raises(AssertionError, match="the runs differ"):
        assert_same_run(CHANGES[name](), step())


def test_bits_count_and_nan_equals_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) == ""
    assert difference(nan, torch.tensor([0.0, 1.0])) != ""
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) != ""
    assert difference(torch.ones(2), torch.ones(2, dtype=torch.float64)) != ""
    assert difference(torch.ones(2), torch.ones(1, 2)) != ""
    assert difference(None, torch.ones(1)) != ""
    assert difference(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) + 1j) != ""
    assert difference(torch.tensor([True]), torch.tensor([False])) != ""


def test_a_step_does_not_touch_the_inputs_it_was_given() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    plain_run(Small(), (x,), None, lambda output: output["out"].sum())
    assert x.grad is None


def test_runs_through_another_callable() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    got = plain_run(model, (x,), None, torch.sum, call=copy.copy(model).forward)
    assert_same_run(got, plain_run(model, (x,), None, torch.sum))


def test_structure_in_words() -> None:
    assert structure_of({"a": (torch.ones(1), 3), "b": [None]}) == "dict('a': tuple(T, 3), 'b': list(None))"
