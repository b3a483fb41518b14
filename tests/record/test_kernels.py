"""Compiled kernels: what they compute, and when they are compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fxgrad.record import kernels as module
from fxgrad.record.kernels import Kernels, compiled, flat
from fxgrad.record.staging import Page
from fxgrad.record.statistics import from_full, whole
from tests.record.by_hand import check, troublesome
from tests.record.test_statistics import staged

CPU = torch.device("cpu")


def kernel(dtype: torch.dtype, *, rows: bool) -> Any:
    try:
        return compiled((CPU, dtype, rows))
    except Exception as error:
        if "compiler" in str(error).lower():
            pytest.skip(f"no C++ compiler here: {error}")
        raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_flat_kernel(dtype: torch.dtype) -> None:
    reduce = kernel(dtype, rows=False)
    for gradient in troublesome(dtype):
        if gradient.numel():
            check(from_full(reduce(flat(gradient)).tolist(), gradient.numel()), gradient)
    large = torch.randn(300_001).to(dtype)
    assert torch.allclose(reduce(large), whole(large), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_of_rows(dtype: torch.dtype) -> None:
    reduce = kernel(dtype, rows=True)
    gradients = troublesome(dtype)
    for got, gradient in zip(staged(gradients, Page(dtype, lambda x, _: reduce(x))), gradients, strict=True):
        check(got, gradient)


def test_compiling_changes_nothing_around_it() -> None:
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        runs.append(1)
        return graph.forward

    user = torch.compile(lambda x: x.sin() + 1, backend=backend)
    user(torch.ones(3))
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        reduce = kernel(torch.float32, rows=False)
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    user(torch.ones(3))
    assert len(runs) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch._dynamo.reset()
    assert reduce(torch.ones(5))[0] == 5  # a reset of the user's does not take it away


class Made:
    """Stands for the compiler."""

    def __init__(self, error: Exception | None = None) -> None:
        self.keys: list[Any] = []
        self.error = error

    def __call__(self, key: Any) -> Any:
        self.keys.append(key)
        if self.error is not None:
            raise self.error
        return lambda x: x.new_full((11,), 5.0, dtype=torch.float64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    compiler = Made()
    monkeypatch.setattr(module, "compiled", compiler)
    return compiler


def test_plain_torch_until_it_has_cost_as_much(made: Made) -> None:
    kernels, gradient = Kernels(), torch.ones(4)
    assert kernels.whole(gradient)[0] == 4
    kernels.prepare()
    assert made.keys == []
    kernels.spent = module.BREAK_EVEN
    kernels.prepare()
    kernels.prepare()
    assert made.keys == [(CPU, torch.float32, False)]
    assert kernels.whole(gradient)[0] == 5  # now by the kernel
    assert kernels.rows(torch.ones(1, 4), torch.float32)[0, 0] == 4
    kernels.prepare()
    assert made.keys[1:] == [(CPU, torch.float32, True)]


@pytest.mark.parametrize(
    "odd", [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64), torch.ones(0)]
)
def test_odd_gradients_are_left_to_plain_torch(made: Made, odd: Tensor) -> None:
    kernels = Kernels()
    kernels.whole(odd)
    kernels.spent = module.BREAK_EVEN
    kernels.prepare()
    assert made.keys == []


def test_nothing_is_compiled_under_fake_tensors(made: Made) -> None:
    kernels = Kernels()
    kernels.whole(torch.ones(4))
    kernels.spent = module.BREAK_EVEN
    with FakeTensorMode():
        kernels.prepare()
    assert made.keys == []


def test_nothing_is_compiled_inside_of_a_backward(made: Made) -> None:
    kernels, x = Kernels(), torch.ones(4, requires_grad=True)
    kernels.whole(torch.ones(4))
    kernels.spent = module.BREAK_EVEN
    y = x * 2
    y.register_hook(lambda _: kernels.prepare())
    y.sum().backward()
    assert made.keys == []


def test_a_compiler_that_fails_is_told_once_and_asked_once(made: Made) -> None:
    made.error = RuntimeError("no C++ here\nand more")
    kernels = Kernels()
    for _ in range(2):
        assert kernels.whole(torch.ones(4))[0] == 4
        kernels.spent = module.BREAK_EVEN
        if not made.keys:
            with pytest.warns(RuntimeWarning, match="plain torch.*no C\\+\\+ here"):
                kernels.prepare()
        kernels.prepare()
    assert len(made.keys) == 1
    assert list(kernels.failed.values()) == ["RuntimeError: no C++ here"]


def test_warnings_that_are_errors_do_not_end_a_training_step(made: Made) -> None:
    made.error = RuntimeError("no")
    kernels = Kernels()
    kernels.whole(torch.ones(4))
    kernels.spent = module.BREAK_EVEN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.prepare()
    assert kernels.failed


def test_a_kernel_that_disagrees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "captured_kernel", lambda *_: lambda size, *_: (torch.zeros(11, dtype=torch.float64),))
    with pytest.raises(RuntimeError, match="does not agree"):
        compiled((CPU, torch.float32, False))


def test_torch_compile_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(RuntimeError, match="switched off"):
        compiled((CPU, torch.float32, False))
