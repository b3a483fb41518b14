"""fxgrad in loops of Hugging Face Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from fxgrad.api import Watch, watch
from fxgrad.frames import Of
from fxgrad.integrations.driving import WatchOptions, optimizers_in
from fxgrad.integrations.needs import needing
from fxgrad.integrations.scalars import scalars
from fxgrad.schema import LogEntry, NormWord

if TYPE_CHECKING:
    from typing_extensions import Unpack

with needing("watch_prepared", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

__all__ = ["AccelerateLog", "watch_prepared"]


def watch_prepared(
    accelerator: Accelerator, model: nn.Module, optimizer: Any = None, *, log_every: int = 50,
    **options: Unpack[WatchOptions],
) -> Watch:  # fmt: skip
    """``fxgrad.watch`` of what ``accelerator.prepare`` returned: the model itself, the optimizer itself, its scaler.

    Args:
        accelerator: which prepared them.
        model: as it came from ``prepare``, or the model itself.
        optimizer: likewise; or several.
        log_every: as of ``fxgrad.watch``; steps are training forwards.
        options: of ``fxgrad.watch``, ``log_to`` among them.

    Raises:
        WatchError: the model cannot be watched.
        OptionError: an option cannot be.
    """
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True)
    optimizers, scaler = optimizers_in(optimizer), accelerator.scaler
    return watch(inner, log_every=log_every, optimizer=optimizers, scaler=scaler, **options)


class AccelerateLog:
    """A log in the trackers of an ``Accelerator`` (``log_with=``), by ``accelerator.log``: curves and counts.

    Args:
        accelerator: behind its ``init_trackers``.
        of: ``"values"`` or ``"parameters"``.
        norm: which norm the curves are of.
    """

    def __init__(self, accelerator: Accelerator, *, of: Of = "values", norm: NormWord = "l2_norm") -> None:
        self._accelerator = accelerator
        self._of, self._norm = of, norm

    def write(self, entry: LogEntry) -> None:
        """Log an entry to every tracker."""
        self._accelerator.log(scalars(entry, self._of, self._norm), step=entry.step)

    def close(self) -> None:
        """Nothing is open: ``accelerator.end_training()`` is yours."""
