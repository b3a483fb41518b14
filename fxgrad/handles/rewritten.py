"""A model whose gradients are rewritten: the handle that ``fxgrad.rewrite`` returns."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import fx, nn

from fxgrad.capture.modules import ModuleMap
from fxgrad.engine.forward_patch import patching, refuse_unpatchable
from fxgrad.engine.step import Engine, Options
from fxgrad.errors import OptionError, RuleError
from fxgrad.record.events import Begin
from fxgrad.rewriting.backward import BackwardRules
from fxgrad.rewriting.layers import StepRules, Units
from fxgrad.rewriting.rules import Rule
from fxgrad.rewriting.state import State
from fxgrad.rewriting.stepping import Steps
from fxgrad.schema import RewriteReport
from fxgrad.torch_support.private import functorch_active, without_torch_function

_PUBLIC = ("active", "apply", "remove", "report", "step")


class Rewrite:
    """Rules at work on a model.  Made by ``fxgrad.rewrite``; also a context manager."""

    observes = False

    def __init__(
        self, model: nn.Module, rules: Rule | Sequence[Rule], *, capture: str, audit: Literal["count", "full"]
    ) -> None:
        _refuse(model)
        self._model = model
        self._state = State(rules, audit)
        self._map = ModuleMap(model)
        units = Units(self._state, model, self._map.refresh)
        self._units = units
        self._on_step = StepRules(self._state, units)
        self._in_backward = BackwardRules(self._state, units)
        self._steps = Steps(self._state, self._on_step, self._owned, self._in_backward.close_events)
        self._warned = False
        patched = patching(model)
        self._engine = Engine(model, patched.plain, Options(capture=capture))
        self._engine.recorder.on = False
        self._patched = patched.add(self)
        self._state.quiet = self._in_one_shot
        self._patched.rules.add(self._state)
        self._follow()

    # ---- in place of the forward ---------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, with hooks where rules act."""
        return self._engine.run(args, kwargs, observe=False)

    def returned(self, result: Any) -> None:
        """The forward has returned: follow the model's parameters, and see where the backward pass will begin."""
        in_graph = self._state.of_nodes or self._state.of_edges
        if in_graph and not self._warned and torch.is_grad_enabled() and functorch_active():
            self._warned = True
            warnings.warn(
                "a torch.func transform is running, so fxgrad's rules at nodes and edges do not act in this call",
                stacklevel=2,
            )
        self._in_backward.close_events()
        if torch.is_grad_enabled():
            self._steps.forward()
        self._follow()
        if self._in_backward.at_end and torch.is_grad_enabled() and not functorch_active():
            with without_torch_function():
                Begin(self._in_backward).put(result)

    def _follow(self) -> None:
        self._units.refresh()
        self._on_step.refresh()
        self._in_backward.refresh()

    def _in_one_shot(self) -> bool:
        return self._patched.one_shots > 0

    def _owned(self) -> set[int]:
        return {id(parameter) for _, parameter in self._map.parameters}

    # ---- for the user --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that optimizers with parameters of the model have taken since the rewrite began; can be set.

        Those of several optimizers without a call of the model between them are one step.  It is what
        ``fxgrad.rules.steps`` and schedules look at.  A loop without a torch optimizer sets it itself.
        """
        return self._state.step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            message = f"step must be a whole number of at least 0, but is {step!r}"
            raise OptionError(message)
        self._state.step = step

    @property
    def active(self) -> bool:
        """False once the rewrite is removed."""
        return self._state.active

    def apply(self) -> None:
        """Run the per-step rules on ``.grad`` now; the next step leaves what they made alone.

        For a loop that wants them in another place than right before the optimizer: before ``clip_grad_norm_``, or
        before gradients are reduced by hand.

        Raises:
            RuleError: a rule raised or broke its contract; then no gradient is changed.
        """
        if self.active:
            self._units.refresh()
            self._on_step.apply()

    def report(self) -> RewriteReport:
        """What the rules did so far; copies counts and norms to the host, once per device."""
        return dataclasses.replace(self._state.report(), capture=self._patched.rules.capture)

    def remove(self) -> None:
        """Give the model back as it was.  The report stays readable.  May be called twice."""
        if not self.active:
            return
        self._state.active = False
        self._patched.rules.drop(self._state)
        self._steps.remove()
        self._on_step.remove()
        self._in_backward.remove()
        self._engine.close()
        self._patched.take_out(self)
        if self._on_step.bound and self._on_step.arrived and not self._on_step.applied:
            names = ", ".join(repr(rule.name) for _, _, rule in self._on_step.bound)
            warnings.warn(
                f"gradients came, but no torch.optim optimizer that holds the parameters took a step, so {names} never "
                "ran; call apply() on the rewrite where the gradients are to be changed",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        """The model's class, and how it stands."""
        return f"Rewrite({type(self._model).__name__[:40]}, {'active' if self.active else 'removed'}, step {self.step})"

    def __str__(self) -> str:
        """The same, and what the rules did."""
        return f"{self!r}\n{self.report()}"

    def __dir__(self) -> list[str]:
        """The public names."""
        return list(_PUBLIC)

    def __enter__(self) -> Rewrite:  # noqa: PYI034  # Self is no part of typing before Python 3.11
        """The rewrite itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the rewrite."""
        self.remove()


def _refuse(model: Any) -> None:
    refuse_unpatchable(model, "rewrite")
    if isinstance(model, fx.GraphModule) and "_engine" in model.__dict__:
        message = "this is what fxgrad.instrument returned: rewrite the model itself, and its rules act here as well"
        raise RuleError(message)
