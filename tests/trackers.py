"""Weights & Biases and MLflow write into a folder of the test, and talk to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["keep_in"]


def keep_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what they read from the environment."""
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        (folder / ".trackers" / name).mkdir(parents=True)
        monkeypatch.setenv(f"WANDB_{name}", str(folder / ".trackers" / name))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / ".trackers"))
