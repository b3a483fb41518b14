"""What is a configuration's step to a plain one: paired, alternating measurement and the interval of the median ratio.

The two sides run in one process in turn, first one, then the other, and next time the other way round, so that what
the machine does meanwhile meets both.  The estimate is the median of the pairwise ratios; its uncertainty is the
percentile bootstrap (Efron 1979) over pairs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Clock = Callable[[Callable[[], None], int], float]  # seconds that so many steps took


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        pairs: as many as these, where ``seconds`` allow.
        least: at least these, whatever it takes.
        seconds: for one row.
        warm_up: pairs that run before and are not counted.
    """

    pairs: int = 1000
    least: int = 10
    seconds: float = 20.0
    warm_up: int = 5


@dataclass
class Pairs:
    """Seconds a step of each side, pair by pair."""

    plain: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)


def cpu_clock(step: Callable[[], None], steps: int) -> float:
    """Wall clock of ``steps`` steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begin


def cuda_clock(step: Callable[[], None], steps: int) -> float:
    """Time between CUDA events around ``steps`` steps, which follow each other without a synchronisation."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def alternate(
    plain: Callable[[], None], other: Callable[[], None], clock: Clock, effort: Effort, steps: int = 1
) -> Pairs:
    """Measure both sides in turn; a pair is ``steps`` steps of each."""
    for _ in range(effort.warm_up):
        clock(plain, steps)
        clock(other, steps)
    gc.collect()
    pairs = Pairs()
    begin = time.perf_counter()
    while len(pairs.plain) < effort.pairs:
        if len(pairs.plain) >= effort.least and time.perf_counter() - begin > effort.seconds:
            break
        sides = [(pairs.plain, plain), (pairs.other, other)]
        for times, step in sides if len(pairs.plain) % 2 else reversed(sides):
            times.append(clock(step, steps) / steps)
    return pairs


def median_ratio(plain: list[float], other: list[float], samples: int = 2000) -> tuple[float, float, float]:
    """Median of the pairwise ratios, and the 95 % interval of it (percentile bootstrap, fixed seed).

    Raises:
        ValueError: the two have different lengths or are empty.
    """
    if len(plain) != len(other) or not plain:
        message = f"pairs are wanted, but there are {len(plain)} plain and {len(other)} other times"
        raise ValueError(message)
    ratios = torch.tensor(other, dtype=torch.float64) / torch.tensor(plain, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (samples, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(ratios.quantile(0.5)), low, high


def summary(pairs: Pairs) -> dict[str, Any]:
    """The numbers of a row: milliseconds and ratio, rounded to what can be told."""
    ratio, low, high = median_ratio(pairs.plain, pairs.other)
    plain, other = (_median(times) * 1e3 for times in (pairs.plain, pairs.other))
    return {
        "pairs": len(pairs.plain), "plain_ms": _digits(plain), "ms": _digits(other),
        "ratio": round(ratio, 4), "interval_95": [round(low, 4), round(high, 4)],
    }  # fmt: skip


def _median(times: list[float]) -> float:
    return float(torch.tensor(times, dtype=torch.float64).quantile(0.5))


def _digits(value: float, digits: int = 4) -> float:
    return round(value, max(digits - 1 - math.floor(math.log10(value)), 0)) if value > 0 else 0.0
