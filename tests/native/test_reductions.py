"""What the loops compute, against plain Python in double precision and against plain torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from fxgrad.record.histogram import write_histogram
from fxgrad.record.library import check as self_check
from fxgrad.record.library import compare_rows
from fxgrad.record.statistics import columns, from_full, scaled
from tests.record.by_hand import check, troublesome

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def row_of(native: Any, values: Tensor) -> Tensor:
    row, again = torch.full((2, 11), math.nan, dtype=torch.float64)
    bins, counted = torch.full((2, 64), math.nan, dtype=torch.float64)
    native.full_into(values, row)
    native.histogram_into(values, again, bins)
    assert torch.equal(row, again)
    write_histogram(values, counted)
    assert torch.equal(bins, counted)
    return row


def checked(native: Any, values: Tensor) -> None:
    row = row_of(native, values)
    assert compare_rows(row, columns(values.reshape(-1), values.dtype)).all()
    check(from_full(row.tolist(), values.numel(), scaled=scaled(values.dtype)), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_trouble(native: Any, dtype: torch.dtype) -> None:
    taken = [values for values in troublesome(dtype) if native.reducible(values)]
    assert len(taken) > 5
    for values in taken:
        checked(native, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "edges", "nothing finite"])
def test_all_lengths(native: Any, dtype: torch.dtype, kind: str) -> None:
    edges = [
        0.0,
        -0.0,
        1e-42,
        -1e-45,
        2.0**-126,
        2.0**-25,
        65504.0,
        65505.0,
        1e30,
        -3e38,
        math.nan,
        math.inf,
        -math.inf,
    ]
    for length in range(71):
        values = torch.randn(length, dtype=torch.float64)
        if kind == "edges":
            values = torch.tensor(edges, dtype=torch.float64).repeat(6)[length % 5 :][:length]
        if kind == "nothing finite":
            values = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64).repeat(24)[:length]
        values = torch.cat([torch.ones(1, dtype=torch.float64), values]).to(dtype)[1:]  # not aligned
        assert values.numel() == length
        checked(native, values)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(width=32), max_size=90), st.sampled_from(DTYPES[:3]))
def test_any_values(native: Any, values: list[float], dtype: torch.dtype) -> None:
    checked(native, torch.tensor(values, dtype=torch.float32).to(dtype))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(), max_size=40))
def test_any_doubles(native: Any, values: list[float]) -> None:
    if math.isfinite(sum(abs(value) for value in values if math.isfinite(value))):
        gradient = torch.tensor(values, dtype=torch.float64)
        check(from_full(row_of(native, gradient).tolist(), len(values), scaled=True), gradient)


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e-160, 1e200, 1e300])
def test_blocks_of_doubles_of_all_sizes(native: Any, size: float) -> None:
    small = torch.randn(5000, dtype=torch.float64)
    for values in (small * size, torch.cat([small * size, small]), torch.cat([small, small * size, small * 1e-200])):
        checked(native, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_ones_and_threads(native: Any, dtype: torch.dtype) -> None:
    values = torch.randn(1_500_001).to(dtype)
    values[7], values[-1], values[600_000] = 1e-6, math.nan, 0
    row, slot = row_of(native, values), torch.zeros((), dtype=torch.float64)
    assert torch.allclose(row, columns(values, dtype), rtol=1e-9)
    finite = values.nan_to_num(0)
    native.norm_into(finite, slot)
    assert slot.item() == pytest.approx(finite.double().norm().item(), rel=1e-6)
    torch.set_num_threads(2)
    try:
        assert torch.equal(row_of(native, values), row)  # the parts are the same, whoever adds them up
        again = torch.zeros((), dtype=torch.float64)
        native.norm_into(finite, again)
        assert again == slot
    finally:
        torch.set_num_threads(1)


def test_dense_in_any_order(native: Any) -> None:
    x = torch.randn(2, 3, 4, 5)
    for values in (x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last), x[:1], x.mT):
        assert native.reducible(values)
        checked(native, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm(native: Any, dtype: torch.dtype) -> None:
    narrow = torch.float64 if dtype is torch.float64 else torch.float32
    for length in [*range(71), 1000, 5001]:
        values = (torch.randn(length, dtype=torch.float64) * 100).to(dtype)
        slot, wide = torch.full((), -1, dtype=narrow), torch.full((1,), -1, dtype=torch.float64)
        native.norm_into(values, slot)
        native.norm_into(gradient=values, out=wide[0])
        assert wide.item() == pytest.approx(values.double().norm().item(), rel=1e-6)
        assert slot.item() == pytest.approx(wide.item(), rel=1e-7)
    slot = torch.zeros((), dtype=narrow)
    native.norm_into(torch.tensor([1.0, math.nan]).to(dtype), slot)
    assert math.isnan(slot.item())
    native.norm_into(torch.tensor([1.0, -math.inf]).to(dtype), slot)
    assert slot.item() == math.inf


def test_squares_that_leave_float32(native: Any) -> None:
    slot = torch.zeros(())
    for value, want in ((1e-30, 0.0), (1e30, math.inf)):
        native.norm_into(torch.full((100,), value), slot)
        assert slot.item() == want


def refused() -> dict[str, Any]:
    x = torch.randn(4, 6)
    with FakeTensorMode():
        fake = torch.empty(3)
    return {
        "gaps": x[:, ::2],
        "expanded": torch.ones(1).expand(4),
        "complex": torch.ones(3, dtype=torch.complex64),
        "negated": torch.complex(x, x).conj().imag,
        "integers": torch.ones(3, dtype=torch.int64),
        "float8": torch.ones(4).to(torch.float8_e5m2),
        "meta": torch.empty(3, device="meta"),
        "sparse": x.to_sparse(),
        "fake": fake,
        "two": TwoTensor(torch.ones(3), torch.ones(3)),
        "number": 3.0,
        "nothing": None,
        "zero": torch._efficientzerotensor(3),
    }


@pytest.mark.parametrize("word", list(refused()))
def test_what_is_refused(native: Any, word: str) -> None:
    values = refused()[word]
    assert not native.reducible(values)
    with pytest.raises(TypeError, match="not a plain dense tensor"):
        native.full_into(values, torch.zeros(11, dtype=torch.float64))


def test_functorch_is_refused(native: Any) -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(native.reducible(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [False, False]


def test_what_is_taken(native: Any) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    for values in (nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True) * 2, torch.tensor(1.0), inference):
        assert native.reducible(values)


def test_a_gradient_that_is_differentiated_is_refused(native: Any) -> None:
    values, row = torch.ones(3, requires_grad=True), torch.zeros(11, dtype=torch.float64)
    with pytest.raises(TypeError, match="differentiated"):
        native.full_into(values, row)
    with torch.no_grad():
        native.full_into(values, row)
    assert row[0] == 3


def test_slots_that_do_not_fit(native: Any) -> None:
    x, double = torch.ones(3), torch.ones(3, dtype=torch.float64)
    for slot in (torch.zeros(10, dtype=torch.float64), torch.zeros(11), torch.zeros(22, dtype=torch.float64)[::2]):
        with pytest.raises(TypeError, match="slot"):
            native.full_into(x, slot)
    with pytest.raises(TypeError, match="slot of a double"):
        native.norm_into(double, torch.zeros(()))
    with pytest.raises(TypeError, match="scaled"):
        native.full_of_singles_into(double, torch.zeros(11, dtype=torch.float64))


def test_several_threads_at_once(native: Any) -> None:
    values = [torch.randn(100_000) for _ in range(4)]
    rows = torch.zeros(4, 11, dtype=torch.float64)

    def reduce(number: int) -> None:
        for _ in range(20):
            native.full_into(values[number], rows[number])

    threads = [threading.Thread(target=reduce, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for gradient, row in zip(values, rows, strict=True):
        assert torch.allclose(row, columns(gradient, gradient.dtype), rtol=1e-9)


CAPABILITIES = {"default": "default", "avx2": "avx2", "avx512": "avx512"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_loops_of_each_kind_of_cpu(native: Any, cache: Path, capability: str) -> None:
    rank = list(CAPABILITIES)
    if rank.index(capability) > rank.index(native.variant()):
        pytest.skip(f"this CPU has no {capability}")
    code = (
        "import torch; from fxgrad.record.library import library, reason; found = library(); "
        "print(found and found.variant(), reason())"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "TORCH_EXTENSIONS_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == (f"{capability} None\n", "")  # the check at load has passed
    # And the tests of this file, where this process's own loops are others.
    if capability != native.variant():
        file = [__file__, "-q", "-p", "no:cacheprovider", "-k", "trouble or lengths or doubles or norm or large"]
        environment["FXGRAD_TEST_NATIVE"] = str(cache)
        command = [sys.executable, "-m", "pytest", *file]
        again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stdout[-3000:]


def test_the_self_check_sees_a_single_wrong_count(native: Any) -> None:
    assert self_check(native) is None

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def histogram_into(self, values: Tensor, row: Tensor, bins: Tensor) -> None:
            native.histogram_into(values, row, bins)
            row[8] += values.numel() == 7

    assert self_check(Wrong()) == f"flush_count of 7 entries of torch.float32 by the {native.variant()} loops"


def test_many_tensors_at_once(native: Any) -> None:
    torch.manual_seed(0)
    tensors: list[Any] = [
        nn.Parameter(torch.randn(3, 5)), torch.randn(7).half(), torch.randn(4, dtype=torch.float64), torch.arange(3),
        torch.randn(2, 6)[:, ::2], torch.tensor([math.nan, 0.0, 2.0]), TwoTensor(torch.ones(2), torch.ones(2)),
    ]  # fmt: skip
    rows = torch.full((8, 11), math.nan, dtype=torch.float64)
    taken = native.full_of_all(tensors, rows)
    assert list(taken) == [1, 1, 0, 0, 0, 1, 0]
    for one, tensor, row in zip(taken, tensors, rows, strict=False):
        if one:
            assert torch.equal(row, row_of(native, tensor.detach()))
        else:
            assert row.isnan().all()
    assert rows[7].isnan().all()
    with pytest.raises(ValueError, match="11 float64"):
        native.full_of_all(tensors, rows[:6])
    with pytest.raises(ValueError, match="11 float64"):
        native.full_of_all(tensors, rows.float())
