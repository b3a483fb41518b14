"""The lines that open ``docs/benchmarks.md``, and the column of the README's table: numbers of the rows, in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.goals import peak_ratio
from benchmarks.ours import OURS
from benchmarks.peers import PEERS

README = Path(__file__).parents[1] / "README.md"
_UNKNOWN = "not measured"

# By the first cells of a line in the README: the row whose ratio stands in its last cell.
TOLD = {
    "| fxgrad, `watch` |": ("resnet18", "norm"),
    "| module hooks and": ("resnet18", "tensor_hooks"),
    "| `retain_grad` and": ("resnet18", "retain_grad"),
    "| `torch.autograd.detect_anomaly` |": ("resnet18", "detect_anomaly"),
    "| torchexplorer |": ("resnet18", "torchexplorer"),
    "| TorchLens |": ("resnet18", "torchlens"),
    "| wandb.watch |": ("mlp33", "wandb_watch"),
}


class _Rows:
    def __init__(self, result: dict[str, Any]) -> None:
        self._rows = {(row["model"], row["configuration"]): row for row in result["rows"] if row["device"] == "cpu"}

    def ratio(self, model: str, configuration: str, digits: int = 2) -> str:
        """Of one row; A/A is what the machine alone does."""
        found = self._rows.get((model, configuration), {}).get("ratio")
        return _UNKNOWN if found is None else f"{found:.{digits}f}"

    def memory(self, model: str, configuration: str) -> str:
        """Peak memory, in percent more."""
        row = self._rows.get((model, configuration), {})
        return f"{100 * (peak_ratio(row) - 1):.1f} %" if "memory" in row else _UNKNOWN


def lines(result: dict[str, Any]) -> str:
    """What a user pays, in ten lines."""
    rows = _Rows(result)
    of, more, capture = rows.ratio, rows.memory, result.get("capture")
    traced = _UNKNOWN if capture is None else f"{capture['value']:.1f} times as long as `torch.fx.symbolic_trace`"
    gpu = "measured below" if any(row["device"] == "cuda" for row in result["rows"]) else _UNKNOWN
    resnet = {name: of("resnet18", name) for name in ("norm", "full", "norm_edge", "norm_forward", "off")}
    small = {name: of("mlp33", name) for name in ("norm", "full", "norm_python")}
    peak = {name: [more(model, name) for model in ("resnet18", "mlp33")] for name in ("norm", "full")}
    told = [
        f"a ResNet-18, all values and parameters: {resnet['norm']} at `norm`, {resnet['full']} at `full`",
        f"the same with edge sites: {resnet['norm_edge']}; with forward statistics: {resnet['norm_forward']}",
        f"a ViT-Tiny at `norm`: {of('vit_tiny_4', 'norm')} with 4 images, {of('vit_tiny_1', 'norm')} with one image",
        f"a GPT-2 small, 2 x 256 tokens, at `norm`: {of('gpt2', 'norm')}",
        f"33 tiny linear modules, the worst case: {small['norm']} at `norm`, {small['full']} at `full`",
        f"the same without the library, under the Python recorder: {small['norm_python']}",
        f"a step that is not observed (`every=`, `pause`): {resnet['off']}; no step waits for the device",
        f"peak memory at `norm` and `full`: {' and '.join(a for a, _ in peak.values())} more for the ResNet-18",
        f"and {' and '.join(b for _, b in peak.values())} for the tiny modules",
        f"making a graph module with `instrument`: {traced}; a GPU: {gpu}",
    ]
    return "- " + ";\n- ".join(told) + ".\n"


def earlier(result: dict[str, Any]) -> str:
    """Which rows are of another version of fxgrad than the latest one."""
    known = {configuration.name for configuration in (*OURS, *PEERS)}
    rows = [row for row in result["rows"] if "ratio" in row and row["configuration"] in known]
    latest = max(rows, key=lambda row: row.get("when", ""), default={}).get("of")
    old = [f"{row['model']} {row['configuration']}" for row in rows if row.get("of") != latest or latest is None]
    if not old:
        return "All rows are of one version of fxgrad.\n"
    return f"Of earlier versions of fxgrad: {', '.join(old)}.\n"


def write_readme(result: dict[str, Any]) -> None:
    """Put the ratios into the README's table."""
    rows = _Rows(result)
    text = README.read_text(encoding="utf-8")
    for begin, (model, configuration) in TOLD.items():
        ratio = rows.ratio(model, configuration, 3)
        pattern = re.compile(rf"^({re.escape(begin)}.*\| )[^|( ]+( \([^|]*\))?( \|)$", re.MULTILINE)
        text = pattern.sub(lambda found, ratio=ratio: f"{found[1]}{ratio}{found[2] or ''}{found[3]}", text)
    README.write_text(text, encoding="utf-8")
