"""What every loop of others does with a watch: put it on when training starts, log by its steps, take it off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from torch import nn
from torch.optim import Optimizer

from fxgrad.api import InPlace, Watch, watch
from fxgrad.engine.logbook import checked_logs
from fxgrad.engine.run_writer import Errors
from fxgrad.errors import NoFlowError
from fxgrad.schema import Finding, Level, Log, SiteKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler

__all__ = ["Driver", "WatchOptions", "optimizers_in"]

_WRAPPERS = 4  # optimizers around optimizers


class WatchOptions(TypedDict, total=False):
    """The options of ``fxgrad.watch`` that are passed on; optimizer and scaler come from the training loop."""

    every: int
    statistics: Level
    sites: SiteKind
    capture: InPlace
    forward: bool
    channels: bool
    limits: Mapping[str, float] | None
    on_finding: Callable[[Finding], Any] | None
    native: bool
    status: bool
    log_to: Log | Sequence[Log]
    run_file: str | Path | None
    keep: int | tuple[int, int] | None
    run_file_errors: Errors


class Driver:
    """One watch, driven by a loop that knows its steps.

    Args:
        log_every: a step is logged when this many have passed since the one before; also the last one.
        options: of the watch.

    Raises:
        OptionError: ``log_every`` or ``log_to`` cannot be.
    """

    def __init__(self, log_every: int, options: WatchOptions) -> None:
        checked_logs(options.get("log_to", ()), log_every)
        self.watch: Watch | None = None
        self._every = log_every
        self._options = options
        self._step = self._logged = -1

    def start(self, model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> Watch:
        """Training of ``model`` starts, or goes on with another part of it.

        Raises:
            WatchError: it cannot be watched; training has not begun then.
        """
        if self.watch is not None:
            self.watch.remove()
        self.watch = watch(model, log_every=None, optimizer=optimizers, scaler=scaler, **self._options)
        return self.watch

    @property
    def seen(self) -> bool:
        """Whether a backward pass has come to the watch."""
        try:
            return self.watch is not None and bool(self.watch.flow())
        except NoFlowError:
            return False

    def step(self, number: int) -> None:
        """Step ``number`` is complete, its optimizer step included.  May be called again with the same number."""
        if self.watch is None or number == self._step:
            return
        self._step = number
        due = self._logged < 0 or number - self._logged >= self._every
        if due and self.watch.log(number):
            self._logged = number

    def end(self) -> None:
        """Training is over, or broke off: log the last step and take the watch off.  It stays readable."""
        if self.watch is not None and self.watch.active:
            self.watch.log(max(self._step, 0))
            self.watch.remove()
        self._step = self._logged = -1


def optimizers_in(given: Any) -> list[Optimizer]:
    """The optimizers of torch in what a framework has: one, several, or a wrapper (``.optimizer``) around one."""
    found = []
    for one in given if isinstance(given, (list, tuple)) else [given]:
        inner = one
        for _ in range(_WRAPPERS):
            inner = getattr(inner, "optimizer", inner)
        if isinstance(inner, Optimizer):
            found.append(inner)
    return found
