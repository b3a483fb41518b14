"""Measures everything, or what is asked for, and writes ``benchmarks/results/*.json`` and ``docs/benchmarks.md``.

    python -m benchmarks.run                        # CPU, everything, 25 to 30 minutes
    python -m benchmarks.run --quick                # small models, few pairs, a minute; writes nothing
    python -m benchmarks.run --device cuda          # everything on the GPU, below 8 minutes
    python -m benchmarks.run --only time --models mlp33 --configurations norm full
    python -m benchmarks.run --page                 # only the page, from what is in the results
    python -m benchmarks.run --only cost memory parts crashes               # what is counted, on a machine that works
    python -m benchmarks.run --only time capture imports --threads 1 --minutes 12    # the clock, on a quiet one

A run replaces the rows that it measured and keeps the others.
"""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler would write to the terminal

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import budget, page, results
from benchmarks.crashes import crashes
from benchmarks.cuda import graph_capture
from benchmarks.goals import GOALS
from benchmarks.models import CASES, Case
from benchmarks.ours import OURS
from benchmarks.pairs import Effort
from benchmarks.peers import PEERS
from benchmarks.rows import PARTS, Wanted, row
from benchmarks.runners import Configuration, without_places
from benchmarks.startup import capture, imports
from benchmarks.summary import TOLD
from benchmarks.where_time_goes import split

_SECTIONS = ("crashes", "capture", "imports", "parts")
_LARGE = ("aa", "norm", "full")  # what large models run on the CPU
_PEER_MODELS = ("resnet18", "vit_tiny_4", "mlp33")
_CUDA_PEERS = ("tensor_hooks", "detect_anomaly", "retain_grad")
_QUICK_MODELS = ("mlp33", "resnet18")
_BEGUN = time.perf_counter()
_ROW_SECONDS = 900  # a row in a process of its own that takes longer is stuck


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *_SECTIONS, "cuda"], help="parts to measure")
    parser.add_argument("--models", nargs="+", choices=[*CASES["cpu"]])
    parser.add_argument("--configurations", nargs="+", choices=[c.name for c in (*OURS, *PEERS)])
    parser.add_argument("--pairs", type=int, help="at most so many pairs")
    parser.add_argument("--least", type=int, help="at least so many pairs, whatever they take")
    parser.add_argument("--seconds", type=float, help="for the clock of one row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, on the CPU")
    parser.add_argument("--quick", action="store_true", help="small models and few pairs, nothing is written")
    parser.add_argument("--minutes", type=float, help="for the clock of all rows; no row begins after that")
    parser.add_argument("--deadline", type=float, help="seconds after which no row is begun (CUDA: 440)")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--into", type=Path, help="write the rows to this file and nothing else")
    return parser.parse_args()


def _effort(case: Case, configuration: Configuration, asked: argparse.Namespace) -> Effort:
    """How long a row is measured: longest where a goal depends on it."""
    key = (asked.device, case.name, configuration.name)
    judged = any(goal.kind == "ratio" and key in goal.rows for goal in GOALS) or configuration.kind == "A/A"
    if asked.minutes and asked.into is None:
        return budget.effort(case, configuration, judged=judged, minutes=asked.minutes)
    if asked.quick:
        least, pairs, seconds = 5, 20, 2.0
    elif asked.device == "cuda":
        least, pairs, seconds = 20, 200, 12.0 if judged else 5.0
    elif configuration.kind == "peer":
        least, pairs, seconds = 5, 200, 5.0
    elif judged and not case.large:
        least, pairs = 200 if case.name == "mlp33" else 50, 1000
        seconds = 15.0 if case.name == "mlp33" or configuration.kind == "A/A" else 45.0
        seconds = 60.0 if case.name == "vit_tiny_4" and configuration.kind == "ours" else seconds
        seconds = 25.0 if configuration.name == "off" else seconds
    else:
        least, pairs, seconds = 10, 500, 8.0
    if configuration.steps > 1:
        least = min(least, 5)
    return Effort(asked.pairs or pairs, asked.least or min(least, asked.pairs or least), asked.seconds or seconds)


def _chosen(asked: argparse.Namespace) -> list[tuple[Case, Configuration]]:
    """The rows, those that goals depend on first."""
    rows = []
    for case in CASES[asked.device].values():
        if case.name not in (asked.models or (_QUICK_MODELS if asked.quick else CASES[asked.device])):
            continue
        for configuration in (*OURS, *PEERS):
            if asked.configurations:
                wanted = configuration.name in asked.configurations
            elif asked.device == "cuda":
                wanted = _on_cuda(case, configuration)
            else:
                wanted = _on_cpu(case, configuration, quick=asked.quick)
                wanted &= not asked.minutes or budget.fits(case, configuration)
            if wanted:
                rows.append((case, configuration))
    keys = {key for goal in GOALS for key in goal.rows}
    return sorted(rows, key=lambda pair: _rank(*pair, keys))


def _rank(case: Case, configuration: Configuration, keys: set[tuple[str, str, str]]) -> int:
    """What comes first, since time may run out: goals, what the README tells, A/A and ours, the other tools."""
    if any((device, case.name, configuration.name) in keys for device in ("cpu", "cuda")):
        return 0
    if (case.name, configuration.name) in TOLD.values():
        return 1
    return 3 if configuration.kind == "peer" else 2


def _on_cpu(case: Case, configuration: Configuration, *, quick: bool) -> bool:
    if configuration.kind == "peer":
        return case.name in _PEER_MODELS and not (quick and configuration.apart)
    if configuration.compiled:
        return case.name == "vit_tiny_4" and not quick
    return not case.large or configuration.name in _LARGE


def _on_cuda(case: Case, configuration: Configuration) -> bool:
    """What eight minutes allow: all of ours on the models of the goals, the rest on the small ones."""
    if configuration.kind == "peer":
        return configuration.name in _CUDA_PEERS and case.name in ("resnet50", "gpt2")
    if configuration.compiled:
        return case.name in ("resnet50", "gpt2") and configuration.name == "compiled"
    if configuration.name in ("graph_norm", "graph_full", "full_every_10"):
        return False
    return case.large or configuration.name in ("norm", "full", "aa")


def _apart(case: Case, configuration: Configuration, asked: argparse.Namespace, wanted: Wanted) -> dict[str, Any]:
    """The row, measured in a process of its own."""
    effort = wanted.effort
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "row.json"
        command = [
            sys.executable, "-m", "benchmarks.run", "--into", str(into), "--device", asked.device,
            "--models", case.name, "--configurations", configuration.name, "--threads", str(asked.threads),
            "--pairs", str(effort.pairs), "--least", str(effort.least), "--seconds", str(effort.seconds),
            "--only", *wanted.parts,
        ]  # fmt: skip
        try:
            done = subprocess.run(  # noqa: S603  # this very program
                command, capture_output=True, text=True, check=False, timeout=_ROW_SECONDS
            )
            why = without_places((done.stderr.strip().splitlines() or ["no output"])[-1])
        except subprocess.TimeoutExpired:
            why = f"took longer than {_ROW_SECONDS} s"
        if into.exists():
            made: dict[str, Any] = json.loads(into.read_text(encoding="utf-8"))["rows"][0]
            return made
    return {
        "device": asked.device, "model": case.name, "configuration": configuration.name, "kind": configuration.kind,
        "failed": f"the process ended: {why}",
    }  # fmt: skip


def _say(made: dict[str, Any], spent: float) -> None:
    words = made.get("skipped") or made.get("failed")
    if words is None and "ratio" in made:
        words = "{:.3f} ({:.3f}-{:.3f}), {} pairs".format(made["ratio"], *made["interval_95"], made["pairs"])
    mark = "SKIPPED " if "skipped" in made else "FAILED " if "failed" in made else ""
    print(f"{made['model']:11} {made['configuration']:17} {spent:6.1f} s  {mark}{words or ''}", flush=True)


def _measure_rows(asked: argparse.Namespace, result: dict[str, Any], path: Path | None) -> None:
    parts = tuple(part for part in PARTS if part in (asked.only or PARTS))
    deadline = asked.deadline or (440 if asked.device == "cuda" else 60 * asked.minutes if asked.minutes else math.inf)
    for case, configuration in _chosen(asked) if parts else ():
        started = time.perf_counter()
        if started - _BEGUN > deadline:
            print(f"{case.name:11} {configuration.name:17} NOT MEASURED: out of time", flush=True)
            continue
        wanted = Wanted(asked.device, parts, _effort(case, configuration, asked))
        if configuration.apart and asked.into is None:
            made = _apart(case, configuration, asked, wanted)
        else:
            made = row(case, configuration, wanted)
        if "ratio" in made:
            made |= {"of": results.package(), "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
        results.put(result, made)
        _say(made, time.perf_counter() - started)
        if path is not None:
            results.save(path, result)


def _measure_sections(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    """What is no row."""
    if asked.into is not None:
        return
    if asked.device == "cuda":
        if "cuda" in (asked.only or ["cuda"]):
            names = asked.models or ("resnet50", "mlp33")
            result["graph_capture"] = {name: graph_capture(CASES["cuda"][name]) for name in names}
            print("graph capture", result["graph_capture"], flush=True)
        return
    named = asked.models or asked.configurations
    for name in asked.only or (() if named else _SECTIONS):
        if name == "crashes" and not asked.quick:
            result[name] = crashes()
        elif name == "capture":
            result[name] = capture(5 if asked.quick else 20 if asked.minutes else 30)
        elif name == "imports":
            result[name] = imports(2 if asked.quick else 4 if asked.minutes else 9)
        elif name == "parts":
            models = asked.models or (["mlp33"] if asked.quick else ["mlp33", "resnet18", "vit_tiny_4", "vit_tiny_1"])
            seconds = 1.0 if asked.quick else 4.0
            result[name] = [split(CASES["cpu"][model], Effort(seconds=asked.seconds or seconds)) for model in models]
        else:
            continue
        print(name, result.get(name), flush=True)


def main() -> int:
    """Measure; 1 if one of our own configurations failed."""
    asked = _arguments()
    if asked.page:
        page.write(results.merged())
        return 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    begin = time.perf_counter()
    path = None if asked.quick else asked.into or results.file_of(asked.device)
    result = results.load(path) if path is not None else {"rows": []}
    result["machine"] = result.get("machine", {}) | results.machine(asked.device)
    first = asked.device == "cuda" or asked.minutes is not None
    if first:
        _measure_sections(asked, result)
    _measure_rows(asked, result, path)
    if not first:
        _measure_sections(asked, result)
    if path is not None:
        results.save(path, result)
    if asked.into is None:
        print(f"{time.perf_counter() - begin:.0f} s")
        if not asked.quick:
            page.write(results.merged())
    failed = [made for made in result["rows"] if "failed" in made and made["kind"] == "ours"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
