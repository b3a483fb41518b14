"""What watching costs per training step: alternating plain and watched steps of one model in one process.

Run ``python benchmarks/step_cost.py`` for the table and ``benchmarks/results/step_cost.json``.  Each pair is one plain
and one watched step, in turn first; the cost is the median of the pairwise ratios, with quartiles and a bootstrap 95 %
interval, beside an A/A run (plain against plain) which shows what the machine's noise alone gives.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxgrad


def resnet18() -> tuple[nn.Module, Tensor]:
    """ResNet-18, 8 images of 3x64x64."""
    import torchvision  # a benchmark-only dependency

    return torchvision.models.resnet18(), torch.randn(8, 3, 64, 64)


def mlp() -> tuple[nn.Module, Tensor]:
    """33 linear maps of width 64, batch 32: tiny kernels, the worst case."""
    parts: list[nn.Module] = []
    for _ in range(33):
        parts += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*parts), torch.randn(32, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"resnet18": resnet18, "mlp33": mlp}


def measure(model: nn.Module, x: Tensor, pairs: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Pairwise ratios of a watched to a plain step; ``options`` None measures plain against plain."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    watch = fxgrad.watch(model, **options) if options is not None else None

    def other() -> float:
        if watch is None:
            return step()
        watch.resume()
        spent = step()
        watch.pause()
        return spent

    for _ in range(5):
        step()
        other()
    plain: list[float] = []
    watched: list[float] = []
    for index in range(pairs):
        if index % 2:
            plain.append(step())
            watched.append(other())
        else:
            watched.append(other())
            plain.append(step())
    result = summary(plain, watched)
    if watch is not None:
        flow = watch.flow()
        result |= {
            "sites": len(flow.sites), "measured": sum(site.measured for site in flow.sites),
            "blind": len(flow.blind_spots), "front_end": flow.capture.front_end,
        }  # fmt: skip
        watch.remove()
    return result


def summary(plain: list[float], watched: list[float]) -> dict[str, Any]:
    """Median, quartiles and bootstrap interval of the pairwise ratios."""
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    rng = random.Random(0)  # noqa: S311  # a bootstrap, not a secret
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "pairs": len(ratios), "plain_ms": 1e3 * statistics.median(plain), "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]], "interval_95": [medians[25], medians[974]],
    }  # fmt: skip


def main() -> None:
    """Measure all configurations, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "step_cost.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    configurations: dict[str, dict[str, Any] | None] = {
        "plain (A/A)": None,
        "auto, norm": {"statistics": "norm", "capture": "auto"},
        "eager, norm": {"statistics": "norm", "capture": "eager"},
        "auto, full": {"statistics": "full", "capture": "auto"},
    }
    rows = []
    for name in arguments.models:
        for label, options in configurations.items():
            torch.manual_seed(0)
            model, x = MODELS[name]()
            rows.append({"model": name, "configuration": label, **measure(model, x, arguments.pairs, options)})
    machine = {
        "processor": platform.processor() or platform.machine(), "threads": arguments.threads,
        "torch": torch.__version__, "python": platform.python_version(), "device": "cpu", "gpu": "not measured",
    }  # fmt: skip
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = Table("model", "configuration", "plain ms", "ratio", "quartiles", "95 % interval", "sites", "blind")
    for row in rows:
        table.add_row(
            row["model"], row["configuration"], f"{row['plain_ms']:.2f}", f"{row['ratio']:.3f}",
            "{:.3f}-{:.3f}".format(*row["quartiles"]), "{:.3f}-{:.3f}".format(*row["interval_95"]),
            str(row.get("sites", "")), str(row.get("blind", "")),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
