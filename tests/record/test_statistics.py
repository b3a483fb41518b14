"""The twelve scalars and the norm in plain torch, on the tensors that reductions get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxgrad.record import statistics
from fxgrad.record.reading import _statistics
from fxgrad.record.slots import Reading
from fxgrad.record.staging import Page
from fxgrad.record.statistics import (
    accumulator,
    columns,
    dottable,
    from_full,
    from_norm,
    scaled,
    whole,
    write_norm,
    write_square,
)
from fxgrad.schema import Statistics
from tests.record.by_hand import check, troublesome

HALF_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]
DTYPES = [*HALF_AND_SINGLE, torch.float64, torch.complex64, torch.complex128]


def full(gradient: Tensor) -> Statistics:
    return from_full(whole(gradient).tolist(), gradient.numel(), scaled=scaled(gradient.dtype))


def norm(gradient: Tensor) -> Statistics:
    slot = torch.zeros((), dtype=accumulator(gradient.dtype))
    write_norm(gradient, slot)
    return from_norm(slot.item(), gradient.numel())


def staged(gradients: list[Tensor], page: Page) -> list[Statistics]:
    page.begin()
    readings: list[Reading] = []
    for gradient in gradients:
        changed = gradient.clone()
        readings.append(page.put_known(changed) or page.put(changed))
        changed.fill_(7)  # what happens to a gradient after its hook does not matter
    page.flush()
    return [_statistics(reading[0].result.tolist(), reading) for reading in readings]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_gradient(dtype: torch.dtype) -> None:
    for gradient in troublesome(dtype):
        check(full(gradient), gradient)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
def test_staged_gradients(dtype: torch.dtype) -> None:
    page = Page(dtype, columns)
    gradients = troublesome(dtype)
    for order in (gradients, gradients, gradients[::-1], gradients[:5], gradients):  # places are reused and replaced
        for got, gradient in zip(staged(order, page), order, strict=True):
            check(got, gradient)


def test_more_than_a_page_holds() -> None:
    page = Page(torch.float32, columns)
    torch.manual_seed(1)
    many = [torch.randn(n) for n in [16384] * 20 + [100, 3000, 16000, 1] * 30]
    for order in (many, many, many[::-1], many[3:], many):
        got = staged(order, page)
        assert [s.l2_norm for s in got] == pytest.approx([g.double().norm().item() for g in order], rel=1e-12)
        assert [s.max_abs for s in got] == [g.abs().max().item() for g in order]
        assert {s.zero_count for s in got} == {0}
    assert page._buffer.nbytes == 2**20


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(HALF_AND_SINGLE))
def test_any_values(values: list[float], dtype: torch.dtype) -> None:
    gradient = torch.tensor(values, dtype=torch.float32).to(dtype)
    check(full(gradient), gradient)
    check(staged([gradient], Page(dtype, columns))[0], gradient)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(), max_size=40))
def test_any_doubles(values: list[float]) -> None:
    gradient = torch.tensor(values, dtype=torch.float64)
    check(full(gradient), gradient) if math.isfinite(sum(map(abs, values))) else None


def test_chunks_of_a_large_gradient_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(3000)
    gradient[5], gradient[2000], gradient[2999] = math.nan, 1e30, 1e-42
    monkeypatch.setattr(statistics, "_CHUNK", 1000)
    check(full(gradient), gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm(dtype: torch.dtype) -> None:
    gradient = torch.randn(7, 11).to(dtype) if not dtype.is_complex else torch.randn(7, 11, dtype=dtype)
    assert norm(gradient).l2_norm == pytest.approx(full(gradient).l2_norm, rel=1e-6)
    gradient[0, 0] = math.nan
    assert full(gradient).nonfinite
    assert math.isnan(norm(gradient).l2_norm)


def test_the_norm_of_a_large_gradient() -> None:
    gradient = torch.randn(400_000)
    want = gradient.double().norm().item()
    assert norm(gradient).l2_norm == pytest.approx(want, rel=1e-5)
    if dottable(gradient):
        slot = torch.zeros(())
        write_square(gradient, slot)
        assert math.sqrt(slot.item()) == pytest.approx(want, rel=1e-5)
    assert not dottable(gradient.view(1000, 400).t())
    assert not dottable(gradient[:1000])
    assert not dottable(gradient.double())


@pytest.mark.parametrize("value", [1e-30, 1e-38, 1e30, 3e38])
def test_squares_that_leave_float32(value: float) -> None:
    gradient = torch.full((100,), value)
    assert full(gradient).l2_norm == pytest.approx(value * 10, rel=1e-6)
    assert norm(gradient).outside_range


def test_squares_that_leave_float64() -> None:
    for value in (1e-200, 1e200):
        assert full(torch.full((4,), value, dtype=torch.float64)).l2_norm == pytest.approx(2 * value)


def test_half_precision_is_widened_before_squaring() -> None:
    gradient = torch.full((10,), 300.0, dtype=torch.float16)  # 300 squared is beyond float16
    assert norm(gradient).l2_norm == pytest.approx(300 * math.sqrt(10))


def test_all_zero_and_undecided() -> None:
    assert full(torch.zeros(3)).all_zero is True
    assert norm(torch.zeros(3)).all_zero is None
    assert norm(torch.ones(3)).all_zero is False


def test_min_of_the_nonzero_entries() -> None:
    assert full(torch.tensor([0.0, -0.5, 3.0])).min_abs_nonzero == 0.5
    assert full(torch.zeros(2)).min_abs_nonzero is None


def test_rows_are_reduced_one_by_one() -> None:
    rows = torch.randn(5, 1024)
    apart = torch.stack([columns(row, torch.float32) for row in rows], 1)
    assert torch.equal(columns(rows, torch.float32)[3:], apart[3:])
    assert torch.allclose(columns(rows, torch.float32), apart, rtol=1e-12)
