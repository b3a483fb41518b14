"""The state of one rewrite: its rules with their numbers and names, the step, the audit, random generators."""

from __future__ import annotations

import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.errors import OptionError, RuleError
from fxgrad.rewriting.audit import Audit, Level
from fxgrad.rewriting.rule import Moment, Rule, apply_to_one, apply_to_several
from fxgrad.rewriting.selection import Edges, Nodes, Outputs
from fxgrad.rewriting.units import Groups, Layers, Parameters, Unit
from fxgrad.schema import NotRewritten, RewriteReport

Bound = tuple["State", int, Rule]  # a rule of a rewrite, with its number there
_OF_SITES = (Nodes, Outputs)
_OF_PARAMETERS = (Parameters, Layers, Groups)


class State:
    """What the parts of one rewrite share.

    Args:
        rules: in the order in which they run.
        audit: ``"count"`` or ``"full"``.

    Raises:
        RuleError: something else than rules, or a rule that its selection does not fit.
    """

    def __init__(self, rules: Rule | Sequence[Rule], audit: Level) -> None:
        given = checked_rules(rules)
        names = _unique([rule.name for rule in given])
        self.rules = tuple(dataclasses.replace(rule, name=name) for rule, name in zip(given, names, strict=True))
        self.active = True
        self.quiet: Callable[[], bool] = lambda: False  # whether a one-shot call runs, after which .grad is given back
        self.step = 0
        self.audit = Audit(audit)
        self.not_rewritten: dict[tuple[int, str], str] = {}
        self.found: set[int] = set()  # rules whose selection has found something
        self.units_of: Callable[[int], list[Unit]] = lambda _: []  # what a rule at parameters acts on, by its number
        self.windows: weakref.WeakSet[Any] = weakref.WeakSet()  # where a watch notes what happens to parameters
        self._generators: dict[tuple[int, str, torch.device], torch.Generator] = {}

    @property
    def of_nodes(self) -> list[Bound]:
        """The rules that act at sites."""
        return [(self, n, rule) for n, rule in enumerate(self.rules) if isinstance(rule.where, _OF_SITES)]

    @property
    def of_edges(self) -> list[Bound]:
        """The rules that act at edges."""
        return [(self, n, rule) for n, rule in enumerate(self.rules) if isinstance(rule.where, Edges)]

    @property
    def of_parameters(self) -> list[Bound]:
        """The rules that act at parameters, layers and groups."""
        return [(self, n, rule) for n, rule in enumerate(self.rules) if isinstance(rule.where, _OF_PARAMETERS)]

    def moment(self, number: int, place: str) -> Moment:
        """Now, for a rule at a place."""
        return Moment(place, self.step, functools.partial(self._generator, number, place))

    def _generator(self, number: int, place: str, device: torch.device) -> torch.Generator:
        key = (number, place, device)
        found = self._generators.get(key)
        if found is None:
            # The CPU's generator takes 32 bits of a seed.
            seed = zlib.crc32(f"{self.rules[number].seed}:{number}:{place}".encode())
            found = torch.Generator(device).manual_seed(seed)
            self._generators[key] = found
        return found

    def runs(self, rule: Rule) -> bool:
        """Whether a rule runs at the present step."""
        return self.active and rule.when.includes(self.step)

    def one(self, number: int, place: str, gradient: Tensor, note: Callable[[Any], None] | None = None) -> Tensor:
        """Run a rule on one gradient; ``note`` takes what ``Audit.note`` returns.

        Raises:
            RuleError: the rule raised or broke its contract.
        """
        rule = self.rules[number]
        result = apply_to_one(rule, gradient, self.moment(number, place))
        changed = self.audit.note((number, place), {"": gradient}, {"": result})
        if note is not None:
            note(changed)
        return result

    def several(self, number: int, place: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a rule on the gradients of a layer or group.

        Raises:
            RuleError: the rule raised or broke its contract.
        """
        rule = self.rules[number]
        result = apply_to_several(rule, gradients, self.moment(number, place))
        self.audit.note((number, place), gradients, result)
        return result

    def record(self, parameter: Tensor, way: tuple[Tensor, Tensor], moment: str, number: int = 0) -> None:
        """Tell a watch what rules made of the gradient of a parameter (``way``: before, after), where one looks.

        ``moment`` is their ``per``, ``number`` tells those of one moment apart that run one by one.
        """
        for window in tuple(self.windows):
            window.note(parameter, *way, (moment, id(self), number))

    def report(self) -> RewriteReport:
        """What was done so far."""
        names = {number: rule.name for number, rule in enumerate(self.rules)}
        missing = tuple(NotRewritten(names[n], place, why) for (n, place), why in self.not_rewritten.items())
        return RewriteReport(self.step, self.audit.records(names), missing)


def checked_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules, each with a selection that it can act on.

    Raises:
        RuleError: see ``State``.
    """
    listed = [rules] if isinstance(rules, Rule) else list(rules) if isinstance(rules, (list, tuple)) else None
    if not listed or not all(isinstance(rule, Rule) for rule in listed):
        odd = type(rules).__name__ if listed is None else [type(r).__name__ for r in listed if not isinstance(r, Rule)]
        message = f"rules are a list of what the functions of fxgrad.rules return, but got {odd or 'none'}"
        raise RuleError(message)
    for rule in listed:
        _check_place(rule)
    return tuple(listed)


def _check_place(rule: Rule) -> None:
    where = rule.where
    if not isinstance(where, (*_OF_SITES, Edges, *_OF_PARAMETERS)):
        message = (
            f"rule {rule.name!r} acts at {where!r}, which is no selection; make one with fxgrad.rules.nodes, outputs, "
            "edges, parameters, layers or groups"
        )
        raise RuleError(message)
    if rule.through and not isinstance(where, _OF_SITES):
        message = f"rule {rule.name!r} acts between what a call returns and takes: select nodes(...), not {where.words}"
        raise RuleError(message)
    if rule.each is None and rule.together is None:
        message = f"rule {rule.name!r} does nothing"
        raise OptionError(message)


def _unique(names: list[str]) -> list[str]:
    """Names with ``#n`` for the n-th repetition, as in node keys."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen[name] = seen.get(name, -1) + 1
        found.append(f"{name}#{count}" if count else name)
    return found
