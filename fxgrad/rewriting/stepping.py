"""The optimizer steps of a model: torch's public step hooks, for whichever optimizers hold its parameters."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxgrad.rewriting.layers import StepRules
from fxgrad.rewriting.state import State

_FRAMES = 12  # between a scaler and our hook: five with torch 2.14, more where a scheduler wraps the step


class Steps:
    """Counts the steps of the optimizers that hold parameters of a model, and runs rules before each.

    Args:
        state: whose ``step`` is counted up.  The steps of several optimizers without a forward call between them are
            one, unless an optimizer steps again.
        rules: run on ``.grad`` before a step.
        owned: ids of the model's parameters.
        before: called before the rules.
    """

    def __init__(
        self, state: State, rules: StepRules, owned: Callable[[], set[int]], before: Callable[[], None]
    ) -> None:
        self._state = state
        self._rules = rules
        self._owned = owned
        self._before = before
        self._warned = False
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # torch keeps these hooks for all optimizers, so they must not keep the model alive.
        here = weakref.WeakMethod(self._pre_step), weakref.WeakMethod(self._post_step)
        self._handles = (
            register_optimizer_step_pre_hook(_weakly(here[0])),
            register_optimizer_step_post_hook(_weakly(here[1])),
        )
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    def forward(self) -> None:
        """The model was called: what comes is a step of its own."""
        self._stepped.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        self._finalizer()

    def _held(self, optimizer: Optimizer) -> set[int]:
        own = self._owned()
        return {id(p) for group in optimizer.param_groups for p in group["params"]} & own

    def _pre_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = self._held(optimizer)
        if not held or not self._state.active:
            return None
        self._before()
        if not self._rules.bound or not self._rules.wants(held):
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._around(args[1], optimizer, held), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._around(kwargs["closure"], optimizer, held)}
        self._apply(optimizer, held)
        return None

    def _around(self, closure: Callable[[], Any], optimizer: Optimizer, held: set[int]) -> Callable[[], Any]:
        """A closure computes the gradients inside of the step, maybe several times."""

        def evaluate() -> Any:
            loss = closure()
            self._apply(optimizer, held)
            return loss

        return evaluate

    def _apply(self, optimizer: Optimizer, held: set[int]) -> None:
        if not self._warned and under_loss_scale() and self._rules.early(held):
            self._warned = True
            warnings.warn(
                "a layer is in several optimizers under a loss scale, and rules act on all of it before the step of "
                "the first, when GradScaler may not have unscaled the gradients of the others; call unscale_ for "
                "all of them, and then apply() on the rewrite, before the first step",
                stacklevel=2,
            )
        _unscale(optimizer)
        self._rules.apply(held)
        self._rules.used(held)

    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if not self._state.active or not self._held(optimizer):
            return
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self._state.step += 1
        self._stepped.add(optimizer)


def under_loss_scale() -> bool:
    """Whether a step is taken by a ``torch.amp.GradScaler``, which calls an optimizer that knows nothing of it."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        caller = None if frame is None else frame.f_locals.get("self")
        if isinstance(caller, GradScaler):
            return caller.is_enabled()
    return False


def _unscale(optimizer: Optimizer) -> None:
    """Divide a loss scale out that a fused optimizer would divide out in its own kernel.

    ``torch.amp.GradScaler`` hands the scale to such an optimizer as ``grad_scale``; for all others it has unscaled the
    gradients before the step.  As in ``GradScaler.unscale_``, the scale is inverted in float64.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, Tensor):
        return
    inverse = scale.double().reciprocal().float()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def _weakly(method: weakref.WeakMethod[Any]) -> Callable[..., Any]:
    def hook(*args: Any) -> Any:
        found = method()
        return None if found is None else found(*args)

    return hook


def _remove(handles: tuple[Any, ...]) -> None:
    for handle in handles:
        handle.remove()
