"""Rules at parameters in the backward pass: as a gradient arrives, or at the end on what the pass contributed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.hooks import RemovableHandle

from fxgrad.errors import RuleError
from fxgrad.record.events import Event, Events
from fxgrad.rewriting.layers import Gradients, Units, compute, separate
from fxgrad.rewriting.state import State
from fxgrad.torch_support.private import current_backward, version_of


@dataclass(slots=True, eq=False)
class _Before:
    """The gradient of a parameter before this pass added to it, and what it added."""

    parameter: Tensor
    grad: Tensor | None
    version: int
    saved: Tensor | None
    added: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Event(Event):
    """One backward pass, and what its gradients are added to."""

    before: dict[int, _Before] = field(default_factory=dict)


class BackwardRules(Events[_Event]):
    """The rules of one rewrite that act in each backward pass."""

    # So as to come behind DistributedDataParallel, which waits at the end itself for the reduced gradients.
    rounds = 1

    def __init__(self, state: State, units: Units) -> None:
        super().__init__()
        self._state = state
        self.at_end = [b for b in state.of_parameters if b[2].where.per == "backward"]  # type: ignore[attr-defined]
        self.on_arrival = [b for b in state.of_parameters if b[2].where.per == "arrival"]  # type: ignore[attr-defined]
        self._units = units
        self._hooks: dict[tuple[int, int], tuple[Tensor, RemovableHandle]] = {}
        self._arrived: tuple[int, list[str]] = (-1, [])  # in which pass, and where rules changed what arrived

    def refresh(self) -> None:
        """Follow the model's parameters."""
        wanted: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        for parameter in self._units.parameters(self.at_end):
            wanted[id(parameter), -1] = (parameter, _Contribution(self, parameter))
        for state, number, _ in self.on_arrival:
            for unit in self._units.of(number):
                for _, parameter in unit.members:
                    wanted[id(parameter), number] = (parameter, _OnArrival(self, (state, number), unit.name, parameter))
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key)[1].remove()
        for key, (parameter, hook) in wanted.items():
            if parameter.requires_grad and key not in self._hooks:
                self._hooks[key] = (parameter, parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self.forget()

    def changed(self, name: str | None = None) -> list[str]:
        """Where rules changed what arrived in this backward pass; with ``name``, one more such place."""
        task = current_backward()
        if self._arrived[0] != task:
            self._arrived = (task, [])
        if name is not None:
            self._arrived[1].append(name)
        return self._arrived[1]

    # ---- one backward pass -------------------------------------------------------------------------------------

    def _new(self, number: int, thread: int) -> _Event:
        return _Event(number, thread)

    def arrive(self, parameter: Tensor, gradient: Tensor) -> None:
        """A gradient comes to a parameter; it is added to ``.grad`` right after this."""
        if self._state.quiet():
            return
        before = self.running().before
        known = before.get(id(parameter))
        if known is None:
            grad = parameter.grad
            saved = None if grad is None else grad.detach().clone()
            known = _Before(parameter, grad, -1 if grad is None else version_of(grad), saved)
            before[id(parameter)] = known
            if saved is not None and _several_ranks():
                message = (
                    f"{self._names()} act(s) on what one backward pass contributes, but gradients are accumulated in a "
                    "distributed run, where DistributedDataParallel reduces the accumulated .grad and not the "
                    "contribution. Use per='step', or call zero_grad() before each backward pass."
                )
                raise RuleError(message)
        if known.saved is not None:
            known.added = gradient if known.added is None else known.added + gradient

    def _names(self) -> str:
        return ", ".join(f"rule {rule.name!r}" for _, _, rule in self.at_end)

    def _ended(self, event: _Event) -> None:
        if event.raised:  # .grad is half of what it was to be; nobody asked for rules on that
            return
        contributed: Gradients = {}
        for key, before in event.before.items():
            grad = before.parameter.grad
            if grad is None or (grad is before.grad and version_of(grad) == before.version):
                continue  # autograd.grad: nothing was added to .grad
            added = grad if before.saved is None else before.added
            if added is not None:
                contributed[key] = (before.parameter, added.detach())
        new = separate(compute(self.at_end, self._units, contributed))
        for key, (parameter, came) in contributed.items() if self._state.windows else ():
            self._state.record(parameter, (came, new.get(key, (parameter, came))[1]), "backward")
        with torch.no_grad():
            for key, (parameter, gradient) in new.items():
                saved = event.before[key].saved
                parameter.grad = gradient if saved is None else saved + gradient


class _Contribution:
    """The hook of a parameter whose rules run at the end of the pass."""

    __slots__ = ("parameter", "rules")
    __torch_unserializable__ = True

    def __init__(self, rules: BackwardRules, parameter: Tensor) -> None:
        self.rules = rules
        self.parameter = parameter

    def __call__(self, gradient: Tensor) -> None:
        """Note what arrives."""
        self.rules.arrive(self.parameter, gradient)


class _OnArrival:
    """The hook of a parameter with a rule that runs as its gradient arrives."""

    __slots__ = ("name", "number", "parameter", "rules", "state")
    __torch_unserializable__ = True

    def __init__(self, rules: BackwardRules, which: tuple[State, int], name: str, parameter: Tensor) -> None:
        self.rules = rules
        self.state, self.number = which
        self.name = name
        self.parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """The gradient after the rule; None where it is left alone."""
        runs = self.state.runs(self.state.rules[self.number])
        try:
            result = self.state.one(self.number, self.name, gradient) if runs else gradient
        except RuleError as error:
            done = ", ".join(dict.fromkeys(self.rules.changed())) or "nothing else"
            message = f"{error}. The backward pass stops here; of what arrived in it this rewrite changed: {done}"
            raise RuleError(message) from (error.__cause__ or error)
        if result is not gradient:
            self.rules.changed(self.name)
        parameter = self.parameter()
        if parameter is not None and self.state.windows and not self.state.quiet():
            self.state.record(parameter, (gradient, result), "arrival", self.number)
        return None if result is gradient else result


def _several_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


__all__ = ["BackwardRules"]
