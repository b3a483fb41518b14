"""The file of results: rows by device, model and configuration; a later run replaces what it measured again."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fxgrad

FOLDER = Path(__file__).parent / "results"
_LIBRARIES = (
    "torchvision", "timm", "transformers", "torchlens", "torchexplorer", "nansense", "torchspace", "wandb",
)  # fmt: skip


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions; nothing that names this very machine."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    hardware: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    if device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["cuda"] = torch.version.cuda
    return hardware | {"versions": found}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named.group(1).strip() if named else platform.machine()


@functools.cache
def package() -> str:
    """A short hash of fxgrad's sources: rows with the same one are of the same version."""
    found = hashlib.sha256()
    for path in sorted(Path(fxgrad.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            found.update(path.read_bytes())
    return found.hexdigest()[:10]


def file_of(device: str) -> Path:
    """The file of this kind of machine."""
    hardware = machine(device)
    words = hardware["gpu"] if device == "cuda" else f"{hardware['processor']} {hardware['cores']} cores"
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".json")


def load(path: Path) -> dict[str, Any]:
    """What is in the file; nothing where there is none."""
    if not path.exists():
        return {"rows": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def save(path: Path, result: dict[str, Any]) -> None:
    """Write the file, in one order whatever was measured last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: result[name] for name in sorted(result, key=lambda name: (name == "rows", name))}
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def put(result: dict[str, Any], row: dict[str, Any]) -> None:
    """Put ``row`` in place of what was known of it; parts that were not measured this time stay."""
    for known in result["rows"]:
        if all(known[name] == row[name] for name in ("device", "model", "configuration")):
            gone = {"skipped", "failed", *(f"{part}_failed" for part in ("time", "cost", "memory"))}
            kept = {name: value for name, value in known.items() if name not in gone}
            known.clear()
            known.update(kept | row if "skipped" not in row and "failed" not in row else row)
            return
    result["rows"].append(row)


def merged() -> dict[str, Any]:
    """All files of results as one: rows one after another, the newest of the other sections."""
    everything: dict[str, Any] = {"rows": [], "machines": []}
    for path in sorted(FOLDER.glob("*.json")):
        found = load(path)
        everything["machines"].append(found.get("machine", {}))
        everything["rows"] += found["rows"]
        everything |= {name: found[name] for name in found if name not in ("rows", "machine")}
    return everything
