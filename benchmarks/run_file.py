"""What does a run file cost: bytes for an event, time to read, and its share of a training step?

    python -m benchmarks.run_file                    # 100,000 events of 500 values: some minutes
    python -m benchmarks.run_file --events 5000 --pairs 40

The step is ResNet-18 on the CPU, watched with and without a run file, in pairs that take turns.  ``time`` is the median
of the differences within pairs; ``cpu`` counts all threads of the process, and tells what it is where no core is free.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import fxgrad
from benchmarks.models import CASES, Built
from fxgrad.run_file import RunFile
from fxgrad.run_file.numbers import split
from fxgrad.schema import CaptureReport, Consumer, Edge, EventInfo, GradientFlow, Node, Site, Statistics

VALUES = 500


def flow_of(values: int) -> GradientFlow:
    """A chain of calls at level ``norm``."""
    nodes = tuple(
        Node(f"blocks.{n}/relu", f"relu_{n}", "call_function", "torch.nn.functional.relu", f"blocks.{n}", "Block", 0,
             f"/home/user/models/net.py:{n}")
        for n in range(values)
    )  # fmt: skip
    sites = tuple(Site(node, "", (8, 64, 32, 32), "float32", "cpu", Statistics("norm", 524288, 1.0)) for node in nodes)
    edges = tuple(Edge(one.key, "", Consumer(other.key, "args[0]")) for one, other in itertools.pairwise(nodes))
    report = CaptureReport("eager", "", "Net", training=True, torch_version=torch.__version__, recorder="native")
    return GradientFlow(nodes, sites, edges, (), (), report, EventInfo(0, 0, "", "norm"))


def written(path: Path, events: int) -> float:
    """Write a run whose norms wander, as float32 gives them; milliseconds for an event."""
    numbers = random.Random(0)  # noqa: S311  # nothing secret
    norms = [numbers.random() for _ in range(VALUES)]
    flow = flow_of(VALUES)
    tail = list(split(flow).numbers[2 * VALUES :])
    with RunFile.create(path) as file:
        file.append(flow)
        structure, spent = file.structure, 0.0
        for event in range(1, events):
            norms = [norm * numbers.lognormvariate(0, 0.05) for norm in norms]
            norms = list(struct.unpack(f"{VALUES}f", struct.pack(f"{VALUES}f", *norms)))
            row = array(
                "d", [one for norm in norms for one in (524288.0, norm)] + [float(event), float(event), *tail[2:]]
            )
            began = time.perf_counter()
            file.repeat(structure, row, (event, event), {"loss": norms[0]})
            spent += time.perf_counter() - began
    return 1e3 * spent / events


def took(act: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began)


def read(path: Path, events: int) -> dict[str, float]:
    """Milliseconds of each kind of read, the worst of some."""
    numbers = random.Random(1)  # noqa: S311
    run = fxgrad.open_run(path)
    first = took(lambda: run.flow(events // 2))
    return {
        "open, and the first flow": first,
        "any flow": max(took(lambda: run.flow(numbers.randrange(events))) for _ in range(20)),
        "the series of a value": max(took(partial(run.series, f"blocks.{n}/relu")) for n in (0, 250, 499)),
        "the series of a value, rms": took(lambda: run.series("blocks.7/relu", "rms")),
        "what was noted": took(lambda: run.notes),
    }


def step(built: Built) -> tuple[float, float]:
    """Milliseconds of a step: on the clock, and of all threads."""
    began, cpu = time.perf_counter(), time.process_time()
    built.loss(built.model(*built.args, **built.kwargs)).backward()
    for parameter in built.model.parameters():
        parameter.grad = None
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu)


def cost(path: Path, pairs: int) -> str:
    """A line: what the file adds to a step."""
    case = CASES["cpu"]["resnet18"]
    plain, with_file = case.make("cpu"), case.make("cpu")
    watches = fxgrad.watch(plain.model), fxgrad.watch(with_file.model, run_file=path)
    for _ in range(8):
        step(plain), step(with_file)
    found = []
    for number in range(pairs):
        order = (plain, with_file) if number % 2 else (with_file, plain)
        by = {id(one): step(one) for one in order}
        found.append((*by[id(plain)], *by[id(with_file)]))
    for watch in watches:
        watch.remove()
    before, cpu = (statistics.median(row[n] for row in found) for n in (0, 1))
    more, cpu_more = (statistics.median(row[n + 2] - row[n] for row in found) for n in (0, 1))
    return (
        f"{case.words}: a step of {before:.1f} ms takes {more:+.2f} ms more ({100 * more / before:+.1f} %); "
        f"cpu {cpu:.1f} ms, {cpu_more:+.2f} ms ({100 * cpu_more / cpu:+.1f} %); {pairs} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(cost(Path(folder) / "cost.fxgrad", asked.pairs), flush=True)
        path = Path(folder) / "run.fxgrad"
        each = written(path, asked.events)
        size = path.stat().st_size
        print(f"{asked.events} events of {VALUES} values at norm: {size / 1e6:.0f} MB, {each:.2f} ms to write one")
        for what, milliseconds in read(path, asked.events).items():
            print(f"{what}: {milliseconds:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
