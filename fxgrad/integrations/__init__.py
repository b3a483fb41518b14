"""fxgrad in the tools that people train with: each name is loaded, with its package, when it is first used.

Logs, for ``fxgrad.watch(log_to=...)``: ``CsvLog``, ``TensorBoardLog``, ``WandbLog``, ``MlflowLog``, ``AccelerateLog``.
Training loops of others: ``LightningCallback``, ``TransformersCallback``, ``IgniteHandler``, and ``watch_prepared`` for
Accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxgrad.loading import loaded

if TYPE_CHECKING:
    from fxgrad.integrations.accelerate import AccelerateLog, watch_prepared
    from fxgrad.integrations.csv_log import CsvLog
    from fxgrad.integrations.ignite import IgniteHandler
    from fxgrad.integrations.lightning import LightningCallback
    from fxgrad.integrations.mlflow import MlflowLog
    from fxgrad.integrations.tensorboard import TensorBoardLog
    from fxgrad.integrations.transformers import TransformersCallback
    from fxgrad.integrations.wandb import WandbLog

__all__ = [
    "AccelerateLog",
    "CsvLog",
    "IgniteHandler",
    "LightningCallback",
    "MlflowLog",
    "TensorBoardLog",
    "TransformersCallback",
    "WandbLog",
    "watch_prepared",
]

_HOME = {
    "AccelerateLog": "accelerate",
    "CsvLog": "csv_log",
    "IgniteHandler": "ignite",
    "LightningCallback": "lightning",
    "MlflowLog": "mlflow",
    "TensorBoardLog": "tensorboard",
    "TransformersCallback": "transformers",
    "WandbLog": "wandb",
    "watch_prepared": "accelerate",
}


def __getattr__(name: str) -> Any:
    """Load a name from its home when it is first asked for (PEP 562).

    Raises:
        MissingPackageError: the package that it is for is not installed.
    """
    if name not in _HOME:
        message = f"module 'fxgrad.integrations' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(loaded(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, so that completion shows them before they are loaded."""
    return list(__all__)
