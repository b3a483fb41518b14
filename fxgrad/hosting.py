"""What stands in place of a model's forward: one host per model, for the watches and rewrites that are its guests."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from fxgrad.errors import WatchError
from fxgrad.rewriting.apply import MARK as RULES
from fxgrad.rewriting.apply import NodeRules
from fxgrad.torch_private import compiled_original

_ABSENT = object()
_HOST = "_fxgrad_host"
_installing = threading.RLock()


class Guest(Protocol):
    """A watch or a rewrite on a model."""

    observes: bool

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward under this guest."""
        ...

    def returned(self, result: Any) -> None:
        """The forward, whoever ran it, has returned ``result``."""
        ...


class Host:
    """One per model.  The newest watch runs a call, or else the newest rewrite; the rules act under both.

    Attributes:
        forward: the model's own, as it was.
        rules: of all rewrites on the model, at sites.
        one_shots: how many one-shot calls are running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forward = model.forward
        self.rules = NodeRules(model)
        self.guests: list[Guest] = []
        self.one_shots = 0
        self._model = model
        self._replacement = torch.compiler.disable(self._run, recursive=True)  # type: ignore[no-untyped-call]
        ours = {
            "forward": self._replacement, "__deepcopy__": self._deepcopy, "__reduce_ex__": self._reduce,
            _HOST: self, RULES: self.rules,
        }  # fmt: skip
        own = model.__dict__
        self._saved = {name: own.get(name, _ABSENT) for name in ours}
        self._ours = ours
        own.update(ours)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        guests = self.guests
        if not guests:  # the forward was replaced on top of us, so that we could not go
            return self.forward(*args, **kwargs)
        guest = next((g for g in reversed(guests) if g.observes), guests[-1])
        result = guest.call(args, kwargs)
        for one in guests:
            one.returned(result)
        return result

    def leave(self, guest: Guest, what: str) -> None:
        """A guest goes; the last one gives the model back as it was."""
        with _installing:
            self.guests = [other for other in self.guests if other is not guest]
            if self.guests:
                return
            if self._model.__dict__.get("forward") is self._replacement:
                self._give_back()
                return
        warnings.warn(
            f"the forward of {type(self._model).__name__} was replaced while fxgrad {what} it; fxgrad stays under it "
            "as a pass-through. Remove the later replacement first to give the model back as it was.",
            stacklevel=3,
        )

    # ---- copies ----------------------------------------------------------------------------------------------

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


def host_of(model: nn.Module) -> Host | None:
    """The host of this very model, if it has guests."""
    found: Host | None = model.__dict__.get(_HOST)
    return found if found is not None and found.guests else None


def lodge(model: nn.Module, guest: Guest) -> Host:
    """Take a guest in, with a host made for it where there is none; the guest runs calls from now on."""
    with _installing:
        host = model.__dict__.get(_HOST)
        if host is None:
            host = Host(model)
        host.guests = [*host.guests, guest]
        return host


def own_forward(model: nn.Module) -> Any:
    """The model's own forward, below any host."""
    host: Host | None = model.__dict__.get(_HOST)
    return model.forward if host is None else host.forward


def refuse_unhostable(model: Any, what: str) -> None:
    """Raise for what has no Python forward of its own.

    Args:
        model: what was given.
        what: ``"watch"`` or ``"rewrite"``, for the message.

    Raises:
        WatchError: not a module, or a compiled or scripted module.
    """
    if not isinstance(model, nn.Module):
        message = f"fxgrad.{what} wants a torch.nn.Module, but got {type(model).__name__}"
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
        message = (
            f"{name} is a scripted module, whose forward is not Python and cannot be observed; {what} the original"
        )
        raise WatchError(message)
