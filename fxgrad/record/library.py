"""The native reductions as recorders use them: loaded between two steps, compared with plain torch, or not there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxgrad.native.loader import LOOK, loader
from fxgrad.native.starting import BackgroundBuild
from fxgrad.record.histogram import write_histogram
from fxgrad.record.statistics import COLUMNS, OVERFLOW, columns
from fxgrad.schema.histogram import BINS
from fxgrad.torch_support.private import current_backward, functorch_active, under_a_mode, without_torch_function

PATIENCE = 3.0  # seconds that a watch runs before it has the library built
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SIZES = (0, 1, 7, 64, 1000, 1031)
background = BackgroundBuild()


def library() -> Any:
    """The library, or None.  Call between steps: it may be loaded here, which takes some hundredths of a second.

    Not inside of a backward pass, nor where a mode would see the check.
    """
    found = loader.module
    if found is not None or loader.refused:
        return None if loader.off else found
    if current_backward() >= 0 or functorch_active() or under_a_mode():
        return None
    return loader.load(check)


def reason() -> str | None:
    """Why the library isn't used, in a line for the capture report; None where it is.  Reads files."""
    why = loader.reason()
    if why is not None and background.reason is not None and why.startswith("not built"):
        return background.reason
    return why


class Patience:
    """When a watch has the library built by itself: once it has run for some seconds.  One for each watch."""

    def __init__(self) -> None:
        self._next = 0.0
        self._first: float | None = None

    def tick(self) -> None:
        """A step has ended.  Never raises, never waits, never prints."""
        if loader.module is not None or loader.refused:
            background.reap()
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if now < self._next:
            return
        self._next = now + LOOK
        background.reap()
        if library() is None and now - self._first >= PATIENCE and loader.may_build and not loader.refused:
            background.start()


# ---- the check at load ------------------------------------------------------------------------------------------


def check(module: Any) -> str | None:
    """What is wrong with the library's results on values chosen for trouble; None where they are plain torch's."""
    with torch.no_grad(), without_torch_function():
        for dtype in _DTYPES:
            for values in _samples(dtype):
                wrong = _difference(module, values)
                if wrong is not None:
                    return f"{wrong} of {values.numel()} entries of {dtype} by the {module.variant()} loops"
    return None


def _difference(module: Any, values: Tensor) -> str | None:
    """The first result that is not plain torch's."""
    if not module.reducible(values):
        return "nothing is taken"
    row, bins, counted = _zeros(len(COLUMNS)), _zeros(BINS), _zeros(BINS)
    module.histogram_into(values, row, bins)
    write_histogram(values, counted)
    wanted = columns(values.reshape(-1), values.dtype)
    alike = compare_rows(row, wanted)
    if not alike.all():
        return COLUMNS[int(alike.logical_not().nonzero()[0])]
    if not torch.equal(bins, counted):
        return "histogram"
    module.full_into(values, counted[: len(COLUMNS)])
    if not torch.equal(counted[: len(COLUMNS)], row):
        return "full without the histogram"
    tame = torch.nan_to_num(values, nan=0.5, posinf=2.0, neginf=2.0).clamp(-100, 100)
    module.norm_into(tame, counted[0])
    wanted = torch.linalg.vector_norm(tame, dtype=torch.float64)
    return None if math.isclose(counted[0].item(), wanted.item(), rel_tol=1e-5, abs_tol=1e-20) else "norm"


def compare_rows(row: Tensor, wanted: Tensor) -> Tensor:
    """Which columns agree, up to the order of additions; in a sum, what is left may be smaller than its roundings."""
    alike = torch.isclose(row, wanted, rtol=1e-9, atol=0.0)
    alike[0] |= (row[0] - wanted[0]).abs() <= 1e-12 * wanted[1]
    return alike


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device="cpu")


def _samples(dtype: torch.dtype) -> Iterator[Tensor]:
    values = _trouble(dtype)
    yield values
    yield values.view(9, -1).t()
    for size in _SIZES:
        yield values[size : 2 * size]
        yield values[3 * 1024 - size // 2 :][:size]


def _trouble(dtype: torch.dtype) -> Tensor:
    """Values that reductions get wrong, in ``dtype``: nine rows of 1,024."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randn(9, 1024, generator=generator, dtype=torch.float64, device="cpu")
    edges = [math.inf, -math.inf, 0.0, -0.0, math.nan, OVERFLOW, 65505.0, 2.0**-25, 2.0**-126, 2.0**-14, 1e-45]
    rows[1] *= 1e-30
    rows[2] *= 1e-42
    rows[3] *= 1e30
    rows[4] = math.nan
    rows[5, : len(edges)] = torch.tensor(edges, dtype=torch.float64, device="cpu")
    rows[6] *= 2.0**-25
    rows[7] *= OVERFLOW
    rows[8] = 0
    if dtype is torch.float64:
        rows[1, :300] *= 1e-270
        rows[3, :300] *= 1e270
    return rows.view(-1).to(dtype)
