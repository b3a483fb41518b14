"""Every stock model: watched equals plain, and what was measured.  Writes ``docs/coverage.md``.

Run ``python -m benchmarks.coverage`` from the checkout (about 15 minutes on 2 cores); it exits with 1 if a model fails.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.sweeps.check import Row, check
from tests.sweeps.collections import TIMM, Built, timm_case, torchvision_case, torchvision_names, transformers_cases

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"


def cases() -> dict[str, list[tuple[str, Callable[[], Built]]]]:
    """Builders by collection."""
    return {
        "torchvision": [(name, lambda n=name: torchvision_case(n)) for name in torchvision_names()],  # type: ignore[misc]
        "timm": [(name, lambda n=name: timm_case(n)) for name in TIMM],  # type: ignore[misc]
        "Hugging Face transformers": list(transformers_cases().items()),
    }


def line(row: Row) -> str:
    """One table row; long reasons are cut."""
    blind = ", ".join(f"{count} {reason}" for reason, count in sorted(row.blind.items()))
    site_packages = row.reason.partition("site-packages/")
    reason = (row.reason if not site_packages[1] else _without_folders(row.reason)).replace("|", "/")
    return f"| {row.name} | {row.recorder} | {row.measured} of {row.sites} | {blind} | {reason[:160]} |"


def _without_folders(text: str) -> str:
    words = []
    for word in text.split():
        _, marker, rest = word.partition("site-packages/")
        words.append(("(" if word.startswith("(") else "") + rest if marker else word)
    return " ".join(words)


def main() -> int:
    """Check all models and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names to check, without writing the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # with more, some gradients of the plain model differ from run to run
    warnings.simplefilter("ignore")
    parts, failures = [], []
    for title, listed in cases().items():
        rows = []
        for name, build in listed:
            if arguments.only and name not in arguments.only:
                continue
            try:
                rows.append(check(name, build()))
                print(line(rows[-1]), flush=True)
            except Exception as error:  # noqa: BLE001  # a sweep goes on and fails at the end
                failures.append(f"{title} {name}: {type(error).__name__}: {str(error)[:300]}")
                print("FAILED", failures[-1], flush=True)
            gc.collect()
        parts.append(section(title, rows))
    if not arguments.only:
        PAGE.write_text(header(failures) + "\n".join(parts), encoding="utf-8")
    print(f"{len(failures)} failed", *failures, sep="\n")
    return 1 if failures else 0


def header(failures: list[str]) -> str:
    """The page's first lines."""
    import timm
    import torchvision
    import transformers

    versions = (
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}, "
        f"transformers {transformers.__version__}"
    )
    failed = "\n".join(f"- {failure}" for failure in failures)
    return (
        "# Coverage\n\nMade by `python -m benchmarks.coverage`. Each model ran two training steps, watched with\n"
        '`capture="auto"`, beside two plain ones from the same seed: outputs, parameter gradients, which of them are\n'
        "None, buffers and the random stream were equal bit for bit. *Recorder* is what observed the second step;\n"
        "*measured* counts sites with a gradient; every other site has its reason under *blind spots*.\n\n"
        f"{versions}, CPU, train mode, random weights, small inputs. Failed: {len(failures)}.\n{failed}\n"
    )


def section(title: str, rows: list[Row]) -> str:
    """A collection's table."""
    head = f"\n## {title}\n\n{len(rows)} models.\n\n"
    table = "| model | recorder | measured | blind spots | why that one |\n|---|---|---|---|---|\n"
    return head + table + "\n".join(map(line, rows)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
