"""Rules at parameters: per optimizer step, with all gradients of a layer together.

First all rules compute, then all results are written, so that a rule that raises leaves every gradient as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxgrad.errors import RuleError
from fxgrad.rewriting.patterns import near
from fxgrad.rewriting.rule import Rule
from fxgrad.rewriting.state import Bound, State
from fxgrad.rewriting.units import Layers, Parameters, Unit

Gradients = dict[int, tuple[Tensor, Tensor]]  # id of a parameter -> the parameter, its gradient


class Units:
    """The parameters, layers and groups that the rules of one rewrite act on, kept current.

    Args:
        state: of the rewrite.
        model: whose parameters they are.
        changed: whether a module or parameter of the model was added, removed or swapped since the last question.
    """

    def __init__(self, state: State, model: nn.Module, changed: Callable[[], bool]) -> None:
        self._state = state
        self._model = model
        self._changed = changed
        self._units: dict[int, list[Unit]] = {}
        self._find()
        state.units_of = self.of
        for _, number, rule in state.of_parameters:
            if not self._units[number]:
                raise RuleError(_nothing_found(rule, model))

    def _find(self) -> None:
        self._units = {}
        for state, number, rule in self._state.of_parameters:
            where: Any = rule.where
            self._units[number] = where.units(self._model)
            for unit in self._units[number]:
                state.audit.expect((number, unit.name))

    def refresh(self) -> bool:
        """Find the parameters anew if the model has changed; whether it has."""
        changed = self._changed()
        if changed:
            self._find()
        return changed

    def of(self, number: int) -> list[Unit]:
        """The units of a rule."""
        return self._units[number]

    def parameters(self, bound: Iterable[Bound]) -> list[Tensor]:
        """All parameters that some rules act on, each once."""
        found = {id(p): p for _, n, _ in bound for unit in self._units[n] for _, p in unit.members}
        return list(found.values())


def compute(bound: Iterable[Bound], units: Units, gradients: Gradients, only: set[int] | None = None) -> Gradients:
    """The gradients that rules change, changed; nothing is written.

    Args:
        bound: the rules, in order; each sees what those before it made.
        units: what they act on.
        gradients: what there is; a parameter that is not in it has no gradient.
        only: act on units with at least one of these parameters (ids); None: on all.

    Raises:
        RuleError: a rule raised or broke its contract; no gradient is changed.
    """
    new: Gradients = {}
    with torch.no_grad():
        for state, number, rule in bound:
            if not state.runs(rule):
                continue
            for unit in units.of(number):
                if only is not None and not any(id(p) in only for _, p in unit.members):
                    continue
                try:
                    _compute_unit(state, number, unit, gradients, new)
                except RuleError as error:
                    message = f"{error}. No gradient of a parameter was changed by this rewrite."
                    raise RuleError(message) from (error.__cause__ or error)
    return new


def _compute_unit(state: State, number: int, unit: Unit, gradients: Gradients, new: Gradients) -> None:
    here = {name: p for name, p in unit.members if id(p) in gradients}
    given = {name: new.get(id(p), gradients[id(p)])[1].detach() for name, p in here.items()}
    if not given:
        return
    if set(given) == {""}:
        made = {"": state.one(number, unit.name, given[""])}
    else:
        made = state.several(number, unit.name, given)
    for name, gradient in made.items():
        if gradient is not given[name]:
            new[id(here[name])] = (here[name], gradient)


def separate(new: Gradients) -> Gradients:
    """The same with memory of their own: an optimizer or the next backward pass may write into a gradient."""
    seen: set[int] = set()
    found: Gradients = {}
    for key, (parameter, gradient) in new.items():
        whole = gradient.layout is not torch.strided or gradient.numel() == _memory(gradient)
        if not whole or id(gradient) in seen:
            gradient = gradient.clone(memory_format=torch.contiguous_format)  # noqa: PLW2901
        seen.add(id(gradient))
        found[key] = (parameter, gradient)
    return found


def _memory(gradient: Tensor) -> int:
    """How many entries lie between the first and the last in memory: fewer for an expanded, more for a sliced one."""
    if not gradient.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))


class StepRules:
    """The rules of one rewrite that act before an optimizer step.

    A gradient that was rewritten, by hand or since another optimizer holds a part of its layer, is not rewritten again
    before it was used by an optimizer or a further backward pass has added to it.
    """

    def __init__(self, state: State, units: Units) -> None:
        self._state = state
        self.bound = [b for b in state.of_parameters if b[2].where.per == "step"]  # type: ignore[attr-defined]
        self._units = units
        self._waiting: dict[int, weakref.ref[Tensor]] = {}  # rewritten, and not used by an optimizer yet
        self._hooks: dict[int, tuple[Tensor, RemovableHandle]] = {}  # with the parameter, so that its id stays its own
        self.arrived = False
        self.applied = False

    def refresh(self) -> None:
        """Follow the model's parameters."""
        if not self.bound:
            return
        parameters = {id(parameter): parameter for parameter in self._units.parameters(self.bound)}
        for key in self._hooks.keys() - parameters.keys():
            self._hooks.pop(key)[1].remove()
        for key, parameter in parameters.items():
            if parameter.requires_grad and key not in self._hooks:
                handle = parameter.register_hook(_Arrival(self, key))  # type: ignore[no-untyped-call]
                self._hooks[key] = (parameter, handle)

    def forget(self, key: int) -> None:
        """A backward pass adds to the gradient of a parameter."""
        if self._state.quiet():
            return
        self.arrived = True
        self._waiting.pop(key, None)

    def wants(self, held: set[int]) -> bool:
        """Whether rules act on one of these parameters."""
        return any(id(p) in held for p in self._units.parameters(self.bound))

    def early(self, held: set[int]) -> bool:
        """Whether rules are about to rewrite the gradient of a parameter before the step of another optimizer."""
        fresh = {
            id(p) for p in self._units.parameters(self.bound) if p.grad is not None and not self._waits(id(p), p.grad)
        }
        units = ({id(p) for _, p in unit.members} for _, n, _ in self.bound for unit in self._units.of(n))
        return any(unit & held & fresh and (unit & fresh) - held for unit in units)

    def apply(self, held: set[int] | None = None) -> None:
        """Rewrite ``.grad``, of all layers or of those with a parameter in ``held`` (ids).

        Raises:
            RuleError: a rule raised or broke its contract; then no gradient is changed.
        """
        parameters = self._units.parameters(self.bound)
        gradients = {id(p): (p, p.grad) for p in parameters if p.grad is not None}
        fresh = {key for key, (_, gradient) in gradients.items() if not self._waits(key, gradient)}
        wanted = fresh if held is None else fresh & held
        self.applied = self.applied or bool(wanted)
        new = separate(compute(self.bound, self._units, gradients, wanted))
        touched = self._touched(wanted)
        for key, (parameter, before) in gradients.items() if self._state.windows else ():
            if key in touched:
                self._state.record(parameter, (before, new.get(key, (parameter, before))[1]), "step")
        for parameter, gradient in new.values():
            parameter.grad = gradient
        for parameter in parameters:
            if id(parameter) in touched and parameter.grad is not None:
                self._waiting[id(parameter)] = weakref.ref(parameter.grad)

    def _touched(self, wanted: set[int]) -> set[int]:
        """The parameters whose layers were rewritten."""
        units = (unit for _, number, _ in self.bound for unit in self._units.of(number))
        return {id(p) for u in units if any(id(q) in wanted for _, q in u.members) for _, p in u.members}

    def _waits(self, key: int, gradient: Tensor) -> bool:
        known = self._waiting.get(key)
        return known is not None and known() is gradient

    def used(self, held: set[int]) -> None:
        """An optimizer is about to use the gradients of these parameters (ids)."""
        for key in held:
            self._waiting.pop(key, None)

    def remove(self) -> None:
        """Take the hooks off."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


class _Arrival:
    """Tells that a backward pass adds to a parameter's gradient."""

    __slots__ = ("key", "rules")
    __torch_unserializable__ = True

    def __init__(self, rules: StepRules, key: int) -> None:
        self.rules = rules
        self.key = key

    def __call__(self, gradient: Tensor) -> None:
        """Note it."""
        del gradient
        self.rules.forget(self.key)


def _nothing_found(rule: Rule, model: nn.Module) -> str:
    where: Any = rule.where
    if isinstance(where, Parameters):
        known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        word, what = where.path, "parameter"
    elif isinstance(where, Layers) and where.path is None:
        known = [type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())]
        first = where.kinds[0]
        word, what = first if isinstance(first, str) else first.__name__, "layer with parameters"
    else:
        known = [path for path, _ in model.named_modules() if path]
        word, what = where.path, "module with parameters"
    hint = near(word, known) if isinstance(word, str) else f"there are {len(known)} names"
    return f"rule {rule.name!r} selects {where.words}, but {type(model).__name__} has no such {what}; {hint}"
