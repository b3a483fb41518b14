"""Peak memory of training steps.

CPU: every allocation of torch's CPU allocator, inside of operators too, as torch's profiler reports it.  These are
bytes asked for, the same at every run, unlike the resident set, which rounds to pages and keeps what was freed.  Memory
that is not torch's (Python objects, NumPy) is not in it.  CUDA: torch's own high-water mark.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models import Built
from benchmarks.runners import Runner

_STEPS = 4
_MARK = "benchmark: steady"


@dataclass(frozen=True)
class Peak:
    """Bytes in use at the worst moment: model, optimizer and input included.

    Attributes:
        first: of the first steps too, in which a tool looks at the model.
        steady: of the last two steps.
    """

    first: int
    steady: int


def peak(make: Callable[[Built], Runner], built: Built, device: str) -> Peak:
    """Peak memory of the steps of ``make(built)``, the first one included."""
    return _cuda_peak(make, built) if device == "cuda" else _cpu_peak(make, built)


def _cpu_peak(make: Callable[[Built], Runner], built: Built) -> Peak:
    model = built.model
    tensors = [*model.parameters(), *model.buffers(), *built.args, *built.kwargs.values()]
    base = sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        runner = make(built)
        for _ in range(_STEPS - 2):
            runner.step()
        with record_function(_MARK):
            runner.step()
            runner.step()
    runner.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        running.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return _read(events, base)


def _read(events: list[dict[str, Any]], base: int) -> Peak:
    """The peaks, from the allocations and the mark of a trace."""
    begin = min(event["ts"] for event in events if event.get("name") == _MARK and "ts" in event)
    changes = sorted(
        (event["ts"], number, event["args"]["Bytes"])
        for number, event in enumerate(events)
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    live = first = steady = base
    for time, _, change in changes:
        live += change
        first = max(first, live)
        if time >= begin:
            steady = max(steady, live)
    return Peak(first, steady)


def _cuda_peak(make: Callable[[Built], Runner], built: Built) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    runner = make(built)
    for _ in range(_STEPS - 2):
        runner.step()
    torch.cuda.synchronize()
    first = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.step()
    runner.step()
    torch.cuda.synchronize()
    steady = torch.cuda.max_memory_allocated()
    runner.close()
    return Peak(max(first, steady), steady)
