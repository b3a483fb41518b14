"""fxgrad in the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from fxgrad.api import Watch
from fxgrad.integrations.driving import Driver, WatchOptions, optimizers_in
from fxgrad.integrations.needs import needing

if TYPE_CHECKING:
    from typing_extensions import Unpack

with needing("TransformersCallback", "transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["TransformersCallback"]


class TransformersCallback(TrainerCallback):
    """A callback for ``transformers.Trainer``: watches the model from the start of training to its end.

    The optimizer and loss scaler are those of the trainer, steps are its global steps, and what it logs of the loss is
    noted.

    Args:
        log_every: a step is read and logged when this many have passed since the one before; also the last one.
        options: of ``fxgrad.watch``, ``log_to`` among them.

    Attributes:
        watch: the watch; None before training starts.  Stays readable afterwards.

    Raises:
        OptionError: an option cannot be.
    """

    def __init__(self, *, log_every: int = 50, **options: Unpack[WatchOptions]) -> None:
        self._driver = Driver(log_every, options)

    @property
    def watch(self) -> Watch | None:
        """The watch; None before training starts."""
        return self._driver.watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the watch on.

        Raises:
            WatchError: the model cannot be watched.
        """
        del args, state, control
        model: nn.Module = kwargs["model"]
        optimizer = kwargs.get("optimizer")
        self._driver.start(model, optimizers_in(optimizer), getattr(optimizer, "scaler", None))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An optimizer step is done."""
        del args, control, kwargs
        self._driver.step(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer logs, among others the mean of the loss since it did so last."""
        del args, state, control
        loss = kwargs.get("logs", {}).get("loss")
        if self.watch is not None and isinstance(loss, (int, float)):
            self.watch.note(loss=loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the last step, and give the model back as it was."""
        del args, state, control, kwargs
        self._driver.end()
