"""fxgrad in PyTorch-Ignite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.api import Watch
from fxgrad.engine.training import checked_optimizers, checked_scaler
from fxgrad.integrations.driving import Driver, WatchOptions
from fxgrad.integrations.needs import needing

if TYPE_CHECKING:
    from typing_extensions import Unpack

with needing("IgniteHandler", "ignite"):
    from ignite.engine import Engine, Events

__all__ = ["IgniteHandler"]


class IgniteHandler:
    """A handler for the trainer of Ignite: watches a model from the start of a run to its end.

    Steps are iterations of the trainer.  Where its process function returns a number, that is noted as the loss.

    Args:
        model: what the process function calls.
        optimizer: what it steps; or several.
        scaler: of its loss.
        log_every: a step is read and logged when this many have passed since the one before; also the last one.
        options: of ``fxgrad.watch``, ``log_to`` among them.

    Attributes:
        watch: the watch; None before the run starts.  Stays readable afterwards.

    Raises:
        OptionError: an option cannot be.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, *,
        scaler: GradScaler | None = None, log_every: int = 50, **options: Unpack[WatchOptions],
    ) -> None:  # fmt: skip
        self._model = model
        self._optimizers, self._scaler = checked_optimizers(optimizer), checked_scaler(scaler)
        self._driver = Driver(log_every, options)

    @property
    def watch(self) -> Watch | None:
        """The watch; None before the run starts."""
        return self._driver.watch

    def attach(self, trainer: Engine) -> None:
        """Add the handlers.

        There is none for exceptions, for where there is one, Ignite raises them no more; ``watch.remove()`` gives the
        model back then.
        """
        trainer.add_event_handler(Events.STARTED, self._started)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._iterated)
        for event in (Events.COMPLETED, Events.TERMINATE):
            trainer.add_event_handler(event, self._driver.end)

    def _started(self) -> None:
        self._driver.start(self._model, self._optimizers, self._scaler)

    def _iterated(self, trainer: Engine) -> None:
        output = trainer.state.output
        one = output.numel() == 1 if isinstance(output, Tensor) else isinstance(output, (int, float))
        if one and self.watch is not None:
            self.watch.note(loss=output)
        self._driver.step(trainer.state.iteration)
