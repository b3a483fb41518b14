"""A model under observation: the handle that ``fxgrad.watch`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.engine import Engine, Options
from fxgrad.errors import WatchError
from fxgrad.hosting import host_of, lodge, own_forward, refuse_unhostable
from fxgrad.schema import GradientFlow
from fxgrad.training import Training, checked_optimizers, checked_scaler


@dataclass(frozen=True, slots=True)
class Around:
    """What a watch is told of the training around the model.

    Attributes:
        optimizers: whose steps are measured.
        scaler: of the loss.
    """

    optimizers: tuple[Optimizer, ...] = ()
    scaler: GradScaler | None = None

    @staticmethod
    def of(optimizer: Any, scaler: Any) -> Around:
        """The options of ``fxgrad.watch``.

        Raises:
            OptionError: one has a value that it cannot have.
        """
        return Around(checked_optimizers(optimizer), checked_scaler(scaler))


class Watch:
    """A model under observation.  Made by ``fxgrad.watch``; also a context manager."""

    observes = True

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        every: int = 1,
        one_shot: bool = False,
        around: Around | None = None,
    ) -> None:
        """``one_shot``: for a single call, which may lie above an outer watch on the same model."""
        if not one_shot:
            refuse_unwatchable(model)
        self._model = model
        self._every = every
        self._forwards = 0
        self._paused = False
        self.one_shot = one_shot
        self.engine = Engine(model, own_forward(model), options)
        self.engine.chooser.one_shot = one_shot
        self._host = lodge(model, self)
        self._host.one_shots += one_shot
        if around is not None and (around.optimizers or around.scaler is not None):
            self.engine.training = Training(self.engine.recorder, around.optimizers, around.scaler)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, observed where this call is to be."""
        return self.engine.run(args, kwargs, observe=self._wants())

    def _wants(self) -> bool:
        if self._paused or not self.engine.recorder.on:
            return False
        if self._model.training and torch.is_grad_enabled():
            self._forwards += 1
            if (self._forwards - 1) % self._every:
                self.engine.rest()
                return False
        return True

    def returned(self, result: Any) -> None:
        """Nothing to do behind the forward."""

    # ---- for the user --------------------------------------------------------------------------------------

    def flow(self) -> GradientFlow:
        """The flow of the latest backward event; copies the statistics to the host, once.

        Raises:
            NoFlowError: no backward pass has run through an observed forward call yet.
        """
        return self.engine.flow()

    @property
    def history(self) -> tuple[GradientFlow, ...]:
        """The flows of the latest backward events (at most 128), oldest first; one per forward call of an event."""
        return tuple(self.engine.history())

    @property
    def active(self) -> bool:
        """False once the watch is removed."""
        return self.engine.recorder.on

    def pause(self) -> None:
        """Stop observing until ``resume``: calls run the model's own forward, and parameters carry no hooks of ours."""
        if self.active:
            self._paused = True
            self._tell(paused=True)
            self.engine.recorder.settle()
            self.engine.parameters.remove()

    def resume(self) -> None:
        """Observe again after ``pause``."""
        self._paused = False
        self._tell(paused=False)

    def _tell(self, *, paused: bool) -> None:
        if self.engine.training is not None:
            self.engine.training.paused = paused

    def remove(self) -> None:
        """Give the model back as it was.  What was recorded stays readable.  May be called twice."""
        if not self.engine.recorder.on:
            return
        self.engine.close()
        if self.engine.training is not None:
            self.engine.training.remove()
        self._host.one_shots -= self.one_shot
        self._host.leave(self, "watched")

    def __enter__(self) -> Watch:  # noqa: PYI034  # Self is no part of typing before Python 3.11
        """The watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the watch."""
        self.remove()


def watch_of(model: nn.Module) -> Watch | None:
    """The watch that is on this very model, if any."""
    host = host_of(model)
    guests = host.guests if host is not None else []
    return next((guest for guest in guests if isinstance(guest, Watch) and not guest.one_shot), None)


def refuse_unwatchable(model: Any) -> None:
    """Raise for what cannot be watched in place.

    Raises:
        WatchError: not a module, a compiled or scripted module, or one that is watched already.
    """
    refuse_unhostable(model, "watch")
    if watch_of(model) is not None:
        message = f"this {type(model).__name__} is watched already; call remove() on the first watch, or use its flow()"
        raise WatchError(message)
