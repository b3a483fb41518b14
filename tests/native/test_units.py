"""Active units counted in C++ are those that plain torch counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.capture.activations import Gate

pytestmark = [pytest.mark.usefixtures("recorder")]
WORDS = (
    "relu",
    "relu6",
    "sigmoid",
    "tanh",
    "selu",
    "softplus",
    "logsigmoid",
    "gelu",
    "silu",
    "hardswish",
    "softshrink",
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    """With all that lies at a limit of some activation, on either side of it."""
    one = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    edges = [0.0, -0.0, 6.0, 1.0, -1.0, 1e-6, -1e-6, 1 - 1e-6, 1e-7, -1e-7, -2e-6, math.nan, math.inf, -math.inf]
    one.view(-1)[: len(edges)] = torch.tensor(edges, dtype=dtype)
    return one


def layouts(dtype: torch.dtype) -> list[Tensor]:
    flat, image = values(dtype, 5, 7), values(dtype, 3, 4, 5, 6)
    return [
        flat, flat.t(), flat[0].clone(), values(dtype, 2, 3, 7), values(dtype, 2, 3, 7).transpose(1, 2), image,
        image.contiguous(memory_format=torch.channels_last), image.permute(3, 1, 0, 2), image[:0], image.unsqueeze(1),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("axis", [None, -1, -3, 1])
def test_counts_are_those_of_plain_torch(native: Any, word: str, dtype: torch.dtype, axis: int | None) -> None:
    call: Any = None
    gate = Gate(word, call, axis)
    assert gate.simple is not None
    ours = native.Gate(*gate.simple)
    for value in layouts(dtype):
        dimension = gate.dimension(value)
        off = gate.inactive(value, None, nn.Identity())
        assert off is not None
        want = (~off).sum([n for n in range(value.ndim) if n != dimension]) if value.ndim > 1 else (~off).int()
        assert torch.equal(native.count_active(value, ours), want.int()), (value.shape, value.stride())


def test_what_cannot_be_walked_is_left_to_python(native: Any) -> None:
    gate = native.Gate(0, 0.0, math.nan, 0.0, None)
    for value in (
        torch.randn(()),
        torch.randn(4, 6)[:, ::2],
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).to_sparse(),
    ):
        assert native.count_active(value, gate) is None


def test_a_watched_run_counts_no_unit_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Hardtanh())
    counted: list[str] = []
    usual = Gate.inactive

    def inactive(gate: Gate, *given: Any) -> Any:
        counted.append(gate.word)
        return usual(gate, *given)

    monkeypatch.setattr(Gate, "inactive", inactive)
    with fxgrad.watch(model, forward=True) as watch:
        for _ in range(3):
            counted.clear()
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        flow = watch.flow()
    assert flow.capture.recorder == "native"
    assert counted == ["hardtanh"]  # whose limits are attributes, which may be others by now
    assert [site.key for site in flow.sites if site.activity is not None] == ["1", "3", "4"]
