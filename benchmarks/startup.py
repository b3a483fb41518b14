"""What is paid once: importing fxgrad, and capturing and instrumenting a model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import fxgrad
from benchmarks.pairs import median_ratio

_PROGRAM = """
import time
import torch
{before}
begin = time.perf_counter()
import fxgrad
middle = time.perf_counter()
fxgrad.watch
print(1e3 * (middle - begin), 1e3 * (time.perf_counter() - begin))
"""
_OPTIMIZER = "torch.optim.SGD([torch.zeros(1, requires_grad=True)])"


def imports(runs: int) -> dict[str, Any]:
    """Milliseconds that ``import fxgrad`` takes behind ``import torch``, in new processes.

    ``fxgrad`` loads its parts late, so the time until ``fxgrad.watch`` is there is given as well.  Most of that is
    torch._dynamo, which torch itself loads when an optimizer is made; the time without it stands beside.
    """
    alone, ready = zip(*(_load("") for _ in range(runs)), strict=True)
    _, late = zip(*(_load(_OPTIMIZER) for _ in range(max(runs // 2, 2))), strict=True)
    middle, low, high = median_ratio([1.0] * runs, list(alone))
    return {
        "value": round(middle, 2), "interval": [round(low, 2), round(high, 2)], "runs": runs,
        "ready": round(_median(ready), 1), "with_optimizer": round(_median(late), 1),
    }  # fmt: skip


def _load(before: str) -> tuple[float, float]:
    done = subprocess.run(  # noqa: S603  # this Python with a program of our own
        [sys.executable, "-c", _PROGRAM.format(before=before)], capture_output=True, text=True, check=True
    )
    first, second = map(float, done.stdout.split())
    return first, second


def capture(runs: int) -> dict[str, Any]:
    """Time of ``fxgrad.instrument`` on ResNet-50 to that of ``torch.fx.symbolic_trace``, in turn.

    The comparison with the model's own run is no part of it: that is the first step.  Nor is the code of the graph,
    which is generated when it is first run or printed.
    """
    import torchvision

    model = torchvision.models.resnet50()
    times: dict[str, list[float]] = {"trace": [], "instrument": []}
    for number in range(runs + 2):
        for name in ("trace", "instrument") if number % 2 else ("instrument", "trace"):
            begin = time.perf_counter()
            made = fx.symbolic_trace(model) if name == "trace" else fxgrad.instrument(model, capture="symbolic")
            spent = time.perf_counter() - begin
            if name == "instrument":
                made.remove()
            if number > 1:
                times[name].append(spent)
    ratio, low, high = median_ratio(times["trace"], times["instrument"])
    return {
        "value": round(ratio, 3), "interval": [round(low, 3), round(high, 3)], "runs": runs,
        "symbolic_trace_ms": round(1e3 * _median(times["trace"]), 1),
        "instrument_ms": round(1e3 * _median(times["instrument"]), 1),
        "first_steps_ms": _first_steps(model),
    }  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(list(values)).quantile(0.5))


def _first_steps(model: torch.nn.Module) -> list[float]:
    """Milliseconds of the first four watched forward passes beside a plain one (the first number)."""
    x = torch.randn(1, 3, 64, 64)
    model(x)
    times = []
    watch = None
    for number in range(5):
        if number == 1:
            watch = fxgrad.watch(model)
        begin = time.perf_counter()
        model(x)
        times.append(round(1e3 * (time.perf_counter() - begin), 1))
    if watch is not None:
        watch.remove()
    return times
