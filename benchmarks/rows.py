"""One row: one configuration on one model, everything that is measured of it."""

from __future__ import annotations

import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from benchmarks.cost_model import cost, gradient_bytes
from benchmarks.cuda import extras
from benchmarks.memory import Peak, peak
from benchmarks.models import Built, Case
from benchmarks.ours import Watched
from benchmarks.pairs import Effort, Pairs, alternate, cpu_clock, cuda_clock, summary
from benchmarks.runners import Configuration, Runner, SkippedError, without_places

PARTS = ("time", "cost", "memory")
_CUDA_STEPS = 5  # between two CUDA events, so that the queue runs full as it does in a training loop


_SIZES = 56  # bytes of the sizes of one value in C++


@dataclass(frozen=True)
class Wanted:
    """What to measure of a row.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        parts: of ``PARTS``.
        effort: for the clock.
    """

    device: str
    parts: tuple[str, ...]
    effort: Effort


def row(case: Case, configuration: Configuration, wanted: Wanted) -> dict[str, Any]:
    """Everything that is wanted of the row; a reason under ``skipped`` or ``failed`` where it cannot run."""
    result: dict[str, Any] = {
        "device": wanted.device, "model": case.name, "configuration": configuration.name, "kind": configuration.kind,
    }  # fmt: skip
    measures: dict[str, Callable[[Case, Configuration, Wanted], dict[str, Any]]] = {
        "time": _time, "cost": _cost, "memory": _memory,
    }  # fmt: skip
    for part in wanted.parts:
        try:
            result |= measures[part](case, configuration, wanted)
        except SkippedError as error:
            return result | {"skipped": str(error)}
        except Exception as error:  # noqa: BLE001  # whatever a tool raises, the table says so and goes on
            if configuration.kind != "peer":
                traceback.print_exc()
            result[f"{part}_failed"] = without_places(f"{type(error).__name__}: {error}")
            if part == "time":
                return result | {"failed": result.pop("time_failed")}
        gc.collect()
    return result


def _built(case: Case, device: str) -> Built:
    try:
        return case.make(device)
    except ImportError as error:
        message = f"the model is not installed: {error}"
        raise SkippedError(message) from error


def _time(case: Case, configuration: Configuration, wanted: Wanted) -> dict[str, Any]:
    """The clock: in two rounds, in which the model and its copy change sides, where building costs little."""
    clock, steps = cpu_clock, configuration.steps
    if wanted.device == "cuda":
        clock, steps = cuda_clock, max(steps, _CUDA_STEPS)
    rounds = 1 if case.large or configuration.compiled or wanted.effort.pairs < 2 * wanted.effort.least else 2
    effort = wanted.effort
    if rounds == 2:  # noqa: PLR2004
        effort = Effort(effort.pairs // 2, max(effort.least // 2, 1), effort.seconds / 2, effort.warm_up)
    pairs, result = Pairs(), {}
    for number in range(rounds):
        if configuration.compiled:
            torch.compiler.reset()
        built = _built(case, wanted.device)
        copy = built.twin()  # where its memory lies can make a step a quarter slower; next time it is the other side
        sides = (copy, built) if number else (built, copy)
        plain, other = configuration.plain(sides[0]), configuration.make(sides[1])
        try:
            taken = alternate(plain.step, other.step, clock, effort, steps)
            pairs.plain += taken.plain
            pairs.other += taken.other
            result = {"seen": asdict(other.seen()), "read_ms": _read_ms(other)}
            if wanted.device == "cuda" and configuration.steps == 1:
                result["cuda"] = extras(plain, other)
        finally:
            other.close()
        del built, copy, sides, plain, other
        gc.collect()
    return summary(pairs) | result | {"load": round(os.getloadavg()[0], 2), "threads": torch.get_num_threads()}


def _read_ms(runner: Runner) -> float | None:
    """Milliseconds of one look at what a step told, apart from the step."""
    if type(runner).read is Runner.read:
        return None
    times = []
    for _ in range(3):
        runner.step()
        begin = time.perf_counter()
        runner.read()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 3)


def _cost(case: Case, configuration: Configuration, wanted: Wanted) -> dict[str, Any]:
    """The cost model; on the CPU, whatever the device."""
    if configuration.compiled or configuration.kind == "A/A" or configuration.steps > 1 or wanted.device != "cpu":
        return {}
    built = _built(case, "cpu")
    found = cost(configuration.make, built, configuration.plain)
    extra = found.extra
    result = {
        "kernels": extra.kernels, "bytes_read": extra.bytes_read, "allocations": extra.allocations,
        "outliving": extra.outliving, "left": extra.left, "left_bytes": extra.left_bytes,
        "step_reads": max(found.step_reads, extra.syncs), "flow_reads": found.flow_reads,
        "plain_kernels": found.plain.kernels, "plain_bytes_read": found.plain.bytes_read,
    }  # fmt: skip
    return {
        "cost": result | {"floor_bytes": _floor(case, configuration), "kept_in_cpp": _kept_in_cpp(case, configuration)}
    }


def _kept_in_cpp(case: Case, configuration: Configuration) -> int:
    """Bytes that the native library keeps of a step, which torch's allocations don't show: statistics and sizes."""
    runner = configuration.make(_built(case, "cpu"))
    try:
        for _ in range(3):
            runner.step()
        history = runner.watch.engine.recorder.history if isinstance(runner, Watched) else ()
        latest = history[-1] if history else None
        parts = [] if latest is None else [latest, *([] if latest.parameters is None else [latest.parameters])]
        kept = sum(_bytes_of(written) for part in parts for written in part.native)
        record = None if latest is None else latest.forward_record
        sizes = record.sizes if record is not None and record.slots is not None else ()
        sizes = () if any(one.forward_record.sizes is sizes for one in list(history)[:-1]) else sizes  # kept once
        return kept + _SIZES * len(sizes) + (_bytes_of(record.written) if record and record.written is not None else 0)
    finally:
        runner.close()


def _bytes_of(written: Any) -> int:
    return 2 * len(written.state) + sum(one.nbytes for one in (written.squares, written.columns, written.bins))


def _floor(case: Case, configuration: Configuration) -> int | None:
    runner = configuration.make(_built(case, "cpu"))
    try:
        if not isinstance(runner, Watched):
            return None
        runner.step()
        return gradient_bytes(runner.watch.flow()) if runner.watch.history else 0
    finally:
        runner.close()


@lru_cache(maxsize=1)
def _plain_peak(case: Case, device: str) -> Peak:
    return peak(Runner, _built(case, device), device)


def _memory(case: Case, configuration: Configuration, wanted: Wanted) -> dict[str, Any]:
    """Peak memory, of the plain step and of the other."""
    if configuration.kind == "A/A" or configuration.compiled or configuration.steps > 1:
        return {}
    plain = _plain_peak(case, wanted.device)
    other = peak(configuration.make, _built(case, wanted.device), wanted.device)
    return {"memory": {"plain": asdict(plain), "other": asdict(other)}}
