"""What must hold, and whether it does: a goal holds only where the interval's upper bound meets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEAST_PAIRS = 20  # below, a bootstrap interval is narrower than it should be, and nothing is judged
HISTORY = 128  # events that a watch keeps, a few bytes a site each


@dataclass(frozen=True)
class Goal:
    """A line of the table of goals.

    Attributes:
        words: what is measured.
        limit: highest value that meets it.
        peer: the best peer seen before, in words.
        kind: ``"ratio"``, ``"memory"``, ``"step_reads"``, ``"flow_reads"``, or the name of another section.
        rows: device, model, configuration of each row that has to meet it.
    """

    words: str
    limit: float
    peer: str = ""
    kind: str = "ratio"
    rows: tuple[tuple[str, str, str], ...] = ()


def _cpu(model: str, *configurations: str) -> tuple[tuple[str, str, str], ...]:
    return tuple(("cpu", model, configuration) for configuration in configurations)


_GPU = ("resnet50", "gpt2")
_CPU = ("resnet18", "vit_tiny_4", "mlp33")
_LARGER = _CPU[:2]

GOALS = (
    Goal("ResNet-18 8x3x64x64 CPU, `norm`", 1.025, "1.02-1.12, keeps every gradient", rows=_cpu("resnet18", "norm")),
    Goal("ResNet-18 8x3x64x64 CPU, `full`", 1.045, rows=_cpu("resnet18", "full")),
    Goal("ResNet-18 8x3x64x64 CPU, `norm`, edge sites", 1.04, rows=_cpu("resnet18", "norm_edge")),
    Goal("ResNet-18 8x3x64x64 CPU, `norm`, forward statistics", 1.055, rows=_cpu("resnet18", "norm_forward")),
    Goal("ViT-Tiny 4x3x224x224 CPU, `norm`", 1.015, "1.1-1.3, a third of the sites", rows=_cpu("vit_tiny_4", "norm")),
    Goal("ViT-Tiny 4x3x224x224 CPU, `full`", 1.04, rows=_cpu("vit_tiny_4", "full")),
    Goal("ViT-Tiny 1x3x224x224 CPU, `norm`", 1.04, "1.21", rows=_cpu("vit_tiny_1", "norm")),
    Goal("GPT-2 small 2x256 CPU, `norm`", 1.01, rows=_cpu("gpt2", "norm")),
    Goal("33-layer MLP CPU, `norm`", 1.12, "1.8-3.1", rows=_cpu("mlp33", "norm")),
    Goal("33-layer MLP CPU, `full`", 1.18, rows=_cpu("mlp33", "full")),
    Goal("33-layer MLP CPU, `norm`, Python recorder", 1.70, rows=_cpu("mlp33", "norm_python")),
    Goal("compiled against compiled plain, ViT-Tiny 4x3x224x224 CPU", 1.05, "none works",
         rows=_cpu("vit_tiny_4", "compiled")),
    Goal("step that is off", 1.01, "1.0", rows=tuple(("cpu", model, "off") for model in _CPU)),
    Goal("peak memory, `norm`", 1.01, "+61 % (nansense), +184 % (torchlens)", "memory",
         tuple(("cpu", model, "norm") for model in _LARGER)),
    Goal("peak memory, `full`", 1.02, "", "memory", tuple(("cpu", model, "full") for model in _LARGER)),
    Goal("peak memory of the MLP, `norm` and `full`", 1.05, "", "memory", _cpu("mlp33", "norm", "full")),
    Goal("ResNet-50 and GPT-2 GPU, eager, `norm`", 1.03, "none published below 1.15",
         rows=tuple(("cuda", model, "norm") for model in _GPU)),
    Goal("ResNet-50 and GPT-2 GPU, compiled", 1.02, "", rows=tuple(("cuda", model, "compiled") for model in _GPU)),
    Goal("host syncs in a step", 0, "", "step_reads", tuple(("cpu", model, "norm") for model in _CPU)),
    Goal("host syncs per read", 1, "2 copies (torchtitan's proposal)", "flow_reads",
         tuple(("cpu", model, "norm") for model in _CPU)),
    Goal("capture + instrument of ResNet-50 to `symbolic_trace` alone", 1.5, "", "capture"),
    Goal("`import fxgrad` over `import torch`, ms", 50, "", "imports"),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Whether a goal holds, and what was found, in words."""

    state: str
    found: str


def judge(goal: Goal, result: dict[str, Any]) -> Verdict:
    """Judge ``goal`` by what was measured; the worst of its rows decides."""
    if goal.kind in ("capture", "imports"):
        return _one(goal, result.get(goal.kind))
    rows = {(row["device"], row["model"], row["configuration"]): row for row in result.get("rows", ())}
    found = [_value(goal.kind, rows.get(key)) for key in goal.rows]
    if any(value is None for value in found):
        return Verdict("not measured", _why(rows.get(goal.rows[[v is None for v in found].index(True)])))
    values = [value for value in found if value is not None]
    words = "; ".join(
        (f"{key[1]} " if len(goal.rows) > 1 else "") + text for key, (*_, text) in zip(goal.rows, values, strict=True)
    )
    if goal.kind == "ratio" and any(rows[key]["pairs"] < LEAST_PAIRS for key in goal.rows):
        return Verdict("too few pairs", words)
    return Verdict(_state(goal.limit, max(low for low, _, _ in values), max(high for _, high, _ in values)), words)


def _state(limit: float, low: float, high: float) -> str:
    if high <= limit:
        return "holds"
    return "missed" if low > limit else "not shown"


def _value(kind: str, row: dict[str, Any] | None) -> tuple[float, float, str] | None:
    """Lower and upper bound, and the words."""
    if row is None or "skipped" in row or "failed" in row:
        return None
    if kind == "ratio":
        if "ratio" not in row:
            return None
        low, high = row["interval_95"]
        return low, high, f"{row['ratio']:.3f} ({low:.3f}-{high:.3f}, {row['pairs']} pairs)"
    if kind == "memory":
        if "memory" not in row or "cost" not in row:
            return None
        ratio = peak_ratio(row)
        return ratio, ratio, f"{100 * (ratio - 1):+.2f} %"
    value = row.get("cost", {}).get(kind)
    return None if value is None else (value, value, str(value))


def peak_ratio(row: dict[str, Any]) -> float:
    """Peak memory to that of the plain step, with a full history of kept events."""
    memory = row["memory"]
    cost = row.get("cost", {})
    kept = HISTORY * (max(cost.get("left_bytes", 0), 0) + cost.get("kept_in_cpp", 0))
    ratio: float = (memory["other"]["first"] + kept) / memory["plain"]["first"]
    return ratio


def _one(goal: Goal, section: dict[str, Any] | None) -> Verdict:
    if section is None:
        return Verdict("not measured", "")
    low, high = section["interval"]
    return Verdict(_state(goal.limit, low, high), f"{section['value']:.2f} ({low:.2f}-{high:.2f})")


def _why(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return str(row.get("skipped") or row.get("failed") or "")
