"""Does a watched step get slower, or the process larger, in a long run?  ``python -m benchmarks.long_run``.

A run is cut into blocks of steps.  The plain model and the watched one take turns step by step, so that what else the
machine does falls on both; a block's row has the median step of each, their ratio, and the memory of the process.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import nn

import fxgrad


def _stepper(*, watched: bool, level: str) -> Callable[[], None]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(8))
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if watched:
        fxgrad.watch(model, optimizer=optimizer, statistics=level)  # type: ignore[arg-type]  # checked by watch

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(32, 128)).square().mean().backward()
        optimizer.step()

    return step


def _seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main(
    steps: Annotated[int, typer.Option(help="How many.")] = 2000,
    block: Annotated[int, typer.Option(help="Steps of a row.")] = 200,
    level: Annotated[str, typer.Option(help="Statistics level.")] = "norm",
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
) -> None:
    """A row for each block of steps."""
    torch.set_num_threads(threads)
    plain, watched = _stepper(watched=False, level=level), _stepper(watched=True, level=level)
    print("steps         plain ms  watched ms  ratio  memory MB")
    for first in range(0, steps, block):
        pairs = [(_seconds(plain), _seconds(watched)) for _ in range(block)]
        one, two = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{first:5d} - {first + block:5d} {one:8.3f} {two:10.3f} {ratio:7.3f} {memory:9.0f}")


if __name__ == "__main__":
    typer.run(main)
