"""fxgrad in PyTorch Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxgrad.api import Watch
from fxgrad.errors import OptionError
from fxgrad.integrations.driving import Driver, WatchOptions, optimizers_in
from fxgrad.integrations.needs import needing
from fxgrad.integrations.outermost import parameters_of, part_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

with needing("LightningCallback", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """A callback for ``lightning.pytorch.Trainer``: watches what ``fit`` trains, from its start to its end.

    Optimizers and loss scaler are those of the trainer, steps are ``trainer.global_step``, and the loss is noted.

    Args:
        module: path of the part to watch, such as ``"net"``.  None: the ``LightningModule`` where ``training_step``
            calls it (``self(x)``); else, from the second batch on, the part of it with the most trained entries.
        log_every: a step is read and logged when this many have passed since the one before; also the last one.
        options: of ``fxgrad.watch``, ``log_to`` among them.

    Attributes:
        watch: the watch; None before training starts.  Stays readable behind ``fit``.

    Raises:
        OptionError: an option cannot be.
    """

    def __init__(self, *, module: str | None = None, log_every: int = 50, **options: Unpack[WatchOptions]) -> None:
        self._path = module
        self._driver = Driver(log_every, options)
        self._model: nn.Module | None = None  # as long as it has to be found out whether it is called

    @property
    def watch(self) -> Watch | None:
        """The watch; None before training starts."""
        return self._driver.watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the watch on.

        Raises:
            OptionError: there is no such part.
            WatchError: the part cannot be watched.
        """
        self._start(trainer, pl_module if self._path is None else _part(pl_module, self._path))
        self._model = pl_module if self._path is None else None

    def _start(self, trainer: Trainer, model: nn.Module) -> None:
        self._driver.start(
            model, optimizers_in(trainer.optimizers), getattr(trainer.precision_plugin, "scaler", None)
        )  # fmt: skip

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done: the optimizer has stepped, where it was its turn."""
        del pl_module, batch, batch_idx
        if self._model is not None:
            self._decide(trainer, self._model)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.watch is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.watch.note(loss=loss)
        if trainer.global_step:
            self._driver.step(trainer.global_step)

    def _decide(self, trainer: Trainer, model: nn.Module) -> None:
        """After a batch: where the module was not called, go on to a part of it."""
        part = None if self._driver.seen else part_of(model, parameters_of(optimizers_in(trainer.optimizers)))
        self._model = part
        if part is not None:
            self._start(trainer, part)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last step, and give the model back as it was."""
        del trainer, pl_module
        self._driver.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Training broke off."""
        del trainer, pl_module, exception
        self._driver.end()


def _part(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in module.named_children())
        message = f"LightningCallback(module={path!r}): {type(module).__name__} has no such part. It has {names}"
        raise OptionError(message) from error
