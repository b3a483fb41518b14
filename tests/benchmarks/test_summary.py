"""The lines that tell what a user pays."""

from __future__ import annotations

from typing import Any

from benchmarks import summary
from benchmarks.budget import effort, fits
from benchmarks.models import CASES
from benchmarks.ours import OURS


def row(model: str, configuration: str, ratio: float, of: str, when: str) -> dict[str, Any]:
    return {
        "device": "cpu", "model": model, "configuration": configuration, "ratio": ratio, "of": of, "when": when,
    }  # fmt: skip


ROWS = [
    row("resnet18", "norm", 1.0234, "new", "2026-02-01 10:00"),
    row("resnet18", "full", 1.5, "old", "2026-01-01 10:00"),
    row("resnet18", "tensor_hooks", 1.25, "new", "2026-02-01 09:00"),
]


def test_what_is_not_measured_is_said() -> None:
    text = summary.lines({"rows": []})
    assert len(text.splitlines()) == 10
    assert "`norm`: not measured" in text and "a GPU: not measured." in text
    assert "1.02 at `norm`, 1.50 at `full`" in summary.lines({"rows": ROWS})


def test_rows_of_earlier_versions_are_named() -> None:
    assert summary.earlier({"rows": ROWS}) == "Of earlier versions of fxgrad: resnet18 full.\n"
    assert "All rows are" in summary.earlier({"rows": ROWS[::2]})


def test_the_readme_gets_the_ratios(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(summary, "README", tmp_path / "README.md")
    before = (
        "| fxgrad, `watch` | 69 | a, b | 9.999 |\n| TorchLens | all | c | 5.2 |\n| torchviz | 0 | d | not measured |\n"
    )
    summary.README.write_text(before + "| wandb.watch | 0 | e | 16.510 (a perceptron) |\n", encoding="utf-8")
    summary.write_readme({"rows": [*ROWS, row("mlp33", "wandb_watch", 12.0, "new", "")]})
    assert summary.README.read_text(encoding="utf-8").splitlines() == [
        "| fxgrad, `watch` | 69 | a, b | 1.023 |",
        "| TorchLens | all | c | not measured |",
        "| torchviz | 0 | d | not measured |",
        "| wandb.watch | 0 | e | 12.000 (a perceptron) |",
    ]


def test_a_run_of_some_minutes_asks_for_no_more() -> None:
    cases = CASES["cpu"].values()
    rows = [(case, one) for case in cases for one in OURS if not one.compiled and fits(case, one)]
    seconds = sum(
        effort(case, one, judged=one.name in ("norm", "full", "aa", "off"), minutes=12).seconds for case, one in rows
    )
    assert seconds < 9 * 60
    assert effort(*rows[0], judged=True, minutes=1).seconds < effort(*rows[0], judged=True, minutes=12).seconds / 5
