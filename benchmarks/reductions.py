"""How many values a second does one core reduce?  ``python -m benchmarks.reductions``.

Plain torch is what the Python recorder calls without the library: ``vector_norm``, the columns of ``full``, and those
and the exponents.  Sizes: a small gradient, one that stays in the cache, one that doesn't.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from fxgrad.record.histogram import write_histogram
from fxgrad.record.library import library, reason
from fxgrad.record.statistics import whole, write_norm

SIZES = (1024, 2**14, 2**18, 2**24)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LEVELS = ("norm", "full", "histogram")


def rate(reduce: Callable[[], object], size: int) -> float:
    """Values a second, the best of seven."""
    reduce()
    times = max(1, int(4e6 / size))
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(times):
            reduce()
        best = min(best, (time.perf_counter() - begin) / times)
    return size / best


def pairs(values: torch.Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By level: plain torch, and the library."""
    native = library()
    slot = torch.zeros((), dtype=torch.float64 if values.dtype is torch.float64 else torch.float32)
    row, bins = torch.zeros(11, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    return {
        "norm": (lambda: write_norm(values, slot), lambda: native.norm_into(values, slot)),
        "full": (lambda: row.copy_(whole(values)), lambda: native.full_into(values, row)),
        "histogram": (
            lambda: (row.copy_(whole(values)), write_histogram(values, bins)),
            lambda: native.histogram_into(values, row, bins),
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    native = library()
    if native is None:
        sys.exit(f"no library: {reason()}")
    print(f"billions of values a second, one thread, {native.variant()} loops: plain torch / library")
    for dtype in DTYPES:
        for size in SIZES:
            values = (torch.randn(size) * 1e-3).to(dtype)
            found = {level: tuple(rate(reduce, size) / 1e9 for reduce in pair) for level, pair in pairs(values).items()}
            cells = [f"{level} {found[level][0]:6.3f} / {found[level][1]:6.3f}" for level in LEVELS]
            print(f"{str(dtype).removeprefix('torch.'):9}{size:10,}   " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
