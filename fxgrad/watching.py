"""Put an engine in place of a model's forward, and take it away again."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from fxgrad.engine import Engine
from fxgrad.errors import WatchError
from fxgrad.schema import GradientFlow, Level
from fxgrad.torch_private import compiled_original

_ABSENT = object()
_MARK = "_fxgrad_watch"
_installing = threading.RLock()


class Watch:
    """A model under observation.  Made by ``fxgrad.watch``; also a context manager."""

    def __init__(self, model: nn.Module, *, every: int, level: Level, capture: str, one_shot: bool = False) -> None:
        """``one_shot``: for a single call, which may lie above an outer watch on the same model."""
        if not one_shot:
            refuse_unwatchable(model)
        self._model = model
        self._every = every
        self._forwards = 0
        self._paused = False
        self._saved: dict[str, Any] = {}
        self.engine = Engine(model, model.forward, level, capture)
        self.engine.chooser.one_shot = one_shot
        self._install()

    # ---- in place of the forward ---------------------------------------------------------------------------

    def _install(self) -> None:
        with _installing:
            self._forward = torch.compiler.disable(self._observe, recursive=True)  # type: ignore[no-untyped-call]
            ours = {
                "forward": self._forward, "__deepcopy__": self._deepcopy, "__reduce_ex__": self._reduce, _MARK: self,
            }  # fmt: skip
            own = self._model.__dict__
            self._saved = {name: own.get(name, _ABSENT) for name in ours}
            self._ours = ours
            own.update(ours)

    def _observe(self, *args: Any, **kwargs: Any) -> Any:
        if self._paused or not self.engine.recorder.on:
            return self.engine.forward(*args, **kwargs)
        if self._model.training and torch.is_grad_enabled():
            self._forwards += 1
            if (self._forwards - 1) % self._every:
                return self.engine.forward(*args, **kwargs)
        return self.engine(*args, **kwargs)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """The model as it is without us, for the time that a copy of it is made."""
        with _installing:
            own = self._model.__dict__
            ours = {name: own[name] for name in self._ours if name in own}
            self._give_back()
            try:
                yield
            finally:
                own.update(ours)

    def _give_back(self) -> None:
        own = self._model.__dict__
        for name, value in self._saved.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        with self._plain():
            return copy.deepcopy(self._model, memo)

    def _reduce(self, protocol: Any) -> Any:
        with self._plain():
            reduced = self._model.__reduce_ex__(protocol)
            if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is self._model.__dict__:  # noqa: PLR2004
                reduced = (*reduced[:2], dict(reduced[2]), *reduced[3:])
            return reduced

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
            self.engine.recorder.settle()
            self.engine.parameters.remove()

    def resume(self) -> None:
        """Observe again after ``pause``."""
        self._paused = False

    def remove(self) -> None:
        """Give the model back as it was.  What was recorded stays readable.  May be called twice."""
        if not self.engine.recorder.on:
            return
        self.engine.close()
        if self._model.__dict__.get("forward") is self._forward:
            self._give_back()
            return
        warnings.warn(
            f"the forward of {type(self._model).__name__} was replaced while fxgrad watched it; fxgrad stays under it "
            "as a pass-through. Remove the later replacement first to give the model back as it was.",
            stacklevel=2,
        )

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
    found: Watch | None = model.__dict__.get(_MARK)
    return found


def refuse_unwatchable(model: Any) -> None:
    """Raise for what cannot be watched in place.

    Raises:
        WatchError: not a module, a compiled or scripted module, or one that is watched already.
    """
    if not isinstance(model, nn.Module):
        message = f"fxgrad.watch wants a torch.nn.Module, but got {type(model).__name__}"
        raise WatchError(message)
    name = type(model).__name__
    if compiled_original(model) is not None:
        message = (
            f"this model is already compiled ({name}); hooks put on it now would never run. "
            "Compile the original with torch.compile(model, backend='fxgrad') and read fxgrad.flow_of(model), or "
            "compile the result of fxgrad.instrument(model, engine='function')."
        )
        raise WatchError(message)
    if isinstance(model, torch.jit.ScriptModule):
        message = f"{name} is a scripted module, whose forward is not Python and cannot be observed; watch the original"
        raise WatchError(message)
    if watch_of(model) is not None:
        message = f"this {name} is watched already; call remove() on the first watch, or use its flow()"
        raise WatchError(message)
