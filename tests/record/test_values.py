"""The memory of forward statistics: what is taken, what is kept, and what is used again."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fxgrad.record.reading import read_event
from fxgrad.record.recorder import EventRecord
from fxgrad.record.staging import ROWS, WIDTH
from fxgrad.record.values import ForwardValues, ValueRecorder
from fxgrad.schema import Statistics

NOTHING = EventRecord(None, 0, {}, [], {}, None)


def take(recorder: ValueRecorder, tensors: list[Tensor]) -> ForwardValues:
    values = recorder.begin()
    with torch.no_grad():
        for site, tensor in enumerate(tensors):
            values.take(site, tensor)
        values.finish()
    return values


def read(values: ForwardValues) -> list[Statistics | None]:
    return read_event(NOTHING, values).values


def norms(values: ForwardValues) -> list[float | None]:
    return [None if found is None else found.l2_norm for found in read(values)]


def test_small_and_large_ones_of_all_dtypes() -> None:
    torch.manual_seed(0)
    shapes = [(), (3,), (2, 5), (17, 1024), (5, 0), (40, 41, 42)]
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    tensors = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in shapes]
    recorder = ValueRecorder("norm")
    for _ in range(2):  # in new memory, then in the same
        got = norms(take(recorder, tensors))
        assert got == pytest.approx([t.abs().double().norm().item() for t in tensors], rel=1e-5)


def test_more_than_a_page() -> None:
    tensors = [torch.full((WIDTH,), float(n)) for n in range(2 * ROWS + 3)]
    recorder = ValueRecorder("full")
    for _ in range(2):
        sums = [found and found.sum for found in read(take(recorder, tensors))]
        assert sums == [WIDTH * float(n) for n in range(2 * ROWS + 3)]


def test_what_was_taken_stays_when_the_memory_is_used_again() -> None:
    recorder = ValueRecorder("norm")
    first = take(recorder, [torch.ones(4), torch.ones(200, 200)])
    second = take(recorder, [torch.zeros(4), torch.zeros(200, 200)])
    assert norms(first) == pytest.approx([2.0, 200.0])
    assert norms(second) == [0.0, 0.0]


def test_a_call_inside_of_a_call_has_memory_of_its_own() -> None:
    recorder = ValueRecorder("norm")
    outer, inner = recorder.begin(), recorder.begin()
    with torch.no_grad():
        outer.take(0, torch.ones(4))
        inner.take(0, torch.zeros(4))
        inner.finish()
        outer.take(1, torch.ones(9))
        outer.finish()
    assert norms(outer) == [2.0, 3.0]
    assert norms(inner) == [0.0]


def test_threads() -> None:
    recorder = ValueRecorder("full")
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        for _ in range(20):
            found[number] = norms(take(recorder, [torch.full((n + 1,), float(number)) for n in range(30)]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert found[number] == pytest.approx([number * (n + 1) ** 0.5 for n in range(30)])


def test_no_value_is_kept_and_none_is_changed() -> None:
    recorder = ValueRecorder("full")
    tensors = [torch.randn(4, requires_grad=True) * 2, torch.randn(300, 300, requires_grad=True).t() * 2]
    versions = [tensor._version for tensor in tensors]
    values = take(recorder, tensors)
    assert [tensor._version for tensor in tensors] == versions
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert all(reference() is None for reference in references)
    assert None not in read(values)


def test_what_cannot_be_reduced_is_left_out() -> None:
    values = take(ValueRecorder("full"), [torch.ones(3), torch.ones(3, device="meta"), torch.ones(2)])
    assert [found and found.sum for found in read(values)] == [3.0, None, 2.0]


def test_after_the_end_nothing_is_taken() -> None:
    values = take(ValueRecorder("full"), [torch.ones(3)])
    values.take(1, torch.ones(3))
    values.finish()
    assert len(read(values)) == 1


def test_state_is_read_apart_from_the_sites() -> None:
    values = ValueRecorder("histogram").begin()
    with torch.no_grad():
        values.take_state([torch.ones(3), torch.full((2,), 4.0)])
        values.take(0, torch.zeros(5))
        values.finish()
    measured = read_event(NOTHING, values)
    assert [found and found.sum for found in measured.state] == [3.0, 8.0]
    assert [found and found.zero_count for found in measured.values] == [5]
    assert all(found is not None and found.level == "histogram" for found in (*measured.state, *measured.values))
