"""Writes the tables of ``docs/benchmarks.md``, between its markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.goals import GOALS, judge, peak_ratio
from benchmarks.models import CASES
from benchmarks.ours import OURS
from benchmarks.peers import PEERS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_CONFIGURATIONS = {configuration.name: configuration for configuration in (*OURS, *PEERS)}


def write(result: dict[str, Any]) -> None:
    """Put the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(result).items():
        mark = f"<!-- {name} -->"
        pattern = re.compile(re.escape(mark) + ".*?" + re.escape("<!-- end -->"), re.DOTALL)
        text = pattern.sub(lambda _, mark=mark, table=table: f"{mark}\n\n{table}\n<!-- end -->", text)
    PAGE.write_text(text, encoding="utf-8")
    summary.write_readme(result)


def tables(result: dict[str, Any]) -> dict[str, str]:
    """The tables by the name of their marker."""
    return {
        "machine": _machines(result),
        "pays": summary.lines(result),
        "earlier": summary.earlier(result),
        "goals": _goals(result),
        "clock cpu": _clock(result, "cpu"),
        "clock cuda": _clock(result, "cuda"),
        "cost model": _costs(result),
        "parts": _parts(result),
        "other": _other(result),
    }


def _table(head: str, lines: Sequence[Sequence[str]]) -> str:
    columns = head.split("|")
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join("| " + " | ".join(cell.strip() for cell in row) + " |\n" for row in rows)


def _machines(result: dict[str, Any]) -> str:
    lines = []
    for machine in result["machines"]:
        versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items())
        gpu = f", {machine['gpu']} (CUDA {machine['cuda']})" if "gpu" in machine else ""
        lines.append(f"- {machine.get('processor')}, {machine.get('cores')} cores{gpu}. {versions}.\n")
    timed = [row for row in result["rows"] if "load" in row]
    if timed:
        loads = [row["load"] for row in timed]
        threads = " or ".join(map(str, sorted({row["threads"] for row in timed})))
        lines.append(
            f"- Rows were measured with {threads} thread(s), at a load average of {min(loads):g} to {max(loads):g}: "
            "beyond the number of cores, other programs ran, and intervals are as wide as that makes them.\n"
        )
    return "".join(lines) or "Nothing is measured yet.\n"


def _goals(result: dict[str, Any]) -> str:
    lines = []
    for goal in GOALS:
        verdict = judge(goal, result)
        found = verdict.found if verdict.state != "not measured" or not verdict.found else f"({verdict.found[:90]})"
        limit = f"{100 * (goal.limit - 1):+.0f} %" if goal.kind == "memory" else f"{goal.limit:g}"
        lines.append([goal.words, limit, found.replace("|", "/"), f"**{verdict.state}**", goal.peer])
    return _table("measure | goal | found (95 % interval) | verdict | best peer seen", lines)


def _rows(result: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """The rows of a device in the order of models and configurations."""
    models, configurations = list(CASES[device]), list(_CONFIGURATIONS)
    rows = [row for row in result["rows"] if row["device"] == device and row["configuration"] in _CONFIGURATIONS]
    return sorted(rows, key=lambda row: (models.index(row["model"]), configurations.index(row["configuration"])))


def _clock(result: dict[str, Any], device: str) -> str:
    rows = _rows(result, device)
    if not rows:
        return "Not measured.\n"
    ours = [row for row in rows if row["configuration"] == "norm" and "seen" in row]
    all_sites = {row["model"]: row["seen"]["activations"] for row in ours}
    head = "model | configuration | plain ms | ratio | 95 % interval | pairs | activations seen | parameters | blind"
    lines = []
    for row in rows:
        name = _CONFIGURATIONS[row["configuration"]].words
        reason = row.get("skipped") or row.get("failed")
        if reason or "ratio" not in row:
            word = "skipped" if "skipped" in row else "failed" if "failed" in row else "not measured"
            lines.append([row["model"], name, "", f"{word}: {str(reason or '')[:110].replace('|', '/')}", *[""] * 5])
            continue
        lines.append([row["model"], name, *_numbers(row), *_seen(row, all_sites.get(row["model"]))])
    if device == "cpu":
        return _table(head, lines)
    more = [[*line, _peak(row), *_on_cuda(row)] for line, row in zip(lines, rows, strict=True)]
    return _table(head + " | peak memory | kernels, plain and with | copies to the host | step without a sync", more)


def _on_cuda(row: dict[str, Any]) -> list[str]:
    found = row.get("cuda")
    if found is None:
        return ["", "", ""]
    plain, other = found["plain"], found["other"]
    syncs = other["step_without_sync"]
    if syncs != "yes" and plain["step_without_sync"] != "yes":
        syncs = "the plain step has one too"
    return [
        f"{plain['kernels']}, {other['kernels']}", str(other["copies_to_host"] - plain["copies_to_host"]),
        syncs.replace("|", "/"),
    ]  # fmt: skip


def _numbers(row: dict[str, Any]) -> list[str]:
    low, high = row["interval_95"]
    return [f"{row['plain_ms']:g}", f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}", str(row["pairs"])]


def _seen(row: dict[str, Any], all_sites: int | None) -> list[str]:
    seen = row["seen"]
    if row["kind"] == "A/A":
        return ["", "", ""]
    of = f" of {all_sites}" if all_sites and row["configuration"] != "off" else ""
    words = f"{seen['activations']}{of}: {seen['told']}"
    if seen["derived"]:
        words += f", {seen['derived']} of them derived"
    if seen["edges"]:
        words += f", {seen['edges']} edges"
    if seen["front_end"]:
        words += f" ({seen['front_end']})"
    blind = "not told" if seen["blind"] is None else str(sum(seen["blind"].values()))
    return [words, str(seen["parameters"]), blind if row["configuration"] != "off" else ""]


def _peak(row: dict[str, Any]) -> str:
    return f"{100 * (peak_ratio(row) - 1):+.1f} %" if "memory" in row else ""


def _costs(result: dict[str, Any]) -> str:
    head = (
        "model | configuration | extra kernels | extra bytes read | to the floor | extra allocations | outlive the "
        "hook | left after the step, bytes | host syncs in a step | per read | peak memory"
    )
    lines = []
    for row in _rows(result, "cpu"):
        cost = row.get("cost")
        if cost is None and "memory" not in row:
            continue
        name = _CONFIGURATIONS[row["configuration"]].words
        lines.append([row["model"], name, *(_cost(cost) if cost else ["not counted", *[""] * 7]), _peak(row)])
    return _table(head, lines) if lines else "Not measured.\n"


def _cost(cost: dict[str, Any]) -> list[str]:
    floor = cost["floor_bytes"]
    flow_reads = "in the step" if cost["flow_reads"] is None else str(cost["flow_reads"])
    return [
        f"{cost['kernels']} (plain: {cost['plain_kernels']})", f"{cost['bytes_read']:,}",
        f"{cost['bytes_read'] / floor:.3f}" if floor else "", str(cost["allocations"]), str(cost["outliving"]),
        f"{cost['left_bytes']:,}", str(cost["step_reads"]), flow_reads,
    ]  # fmt: skip


def _parts(result: dict[str, Any]) -> str:
    found = result.get("parts")
    if not found:
        return "Not measured.\n"
    names = ("plain_ms", "graph", "registration", "dispatch", "record", "whole", "floor")
    lines = [
        [part["model"], part["level"], str(part["threads"]), *(f"{part[name]:.2f}" for name in names),
         f"{part['floor_ratio']:.3f}"]
        for part in found
    ]  # fmt: skip
    head = "model | level | threads | plain, ms | graph | registration | dispatch | record | whole | floor | best ratio"
    return _table(head, lines)


def _other(result: dict[str, Any]) -> str:
    lines = []
    if found := result.get("crashes"):
        lines.append(
            f"- `register_full_backward_hook` on every module crashes on {found['crash']} of {found['models']} "
            "torchvision classifiers in train mode (an in-place change of what such a hook wrapped).\n"
        )
    if found := result.get("capture"):
        lines.append(
            f"- ResNet-50: `torch.fx.symbolic_trace` {found['symbolic_trace_ms']} ms, `fxgrad.instrument` "
            f"{found['instrument_ms']} ms. Forward passes of a 1x3x64x64 input: plain {found['first_steps_ms'][0]} ms, "
            f"then watched {', '.join(map(str, found['first_steps_ms'][1:]))} ms.\n"
        )
    if found := result.get("imports"):
        lines.append(
            f"- `import fxgrad` {found['value']} ms behind `import torch`; until `fxgrad.watch` is there "
            f"{found['ready']} ms, or {found['with_optimizer']} ms where an optimizer was made before.\n"
        )
    if found := result.get("graph_capture"):
        lines += [f"- CUDA graph of a watched step, {model}: {answer}.\n" for model, answer in found.items()]
    else:
        lines.append("- CUDA graph capture of a watched step: not measured.\n")
    return "".join(lines)
