"""A rule: where + when + what, and how it is run on gradients without ever being trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxgrad.errors import OptionError, RuleError
from fxgrad.schema.lines import in_a_line
from fxgrad.torch_support.private import version_of


@dataclass(frozen=True, slots=True)
class Moment:
    """Where and when a rule runs.

    Attributes:
        place: id of the site, or name of the parameter, layer or group.
        step: steps that the model's optimizers have taken since the rewrite began.
        generator: the random generator of this rule and place on a device.
    """

    place: str
    step: int
    generator: Callable[[torch.device], torch.Generator]


Each = Callable[[Tensor, Moment], Tensor | None]
Together = Callable[[dict[str, Tensor], Moment], Mapping[str, Tensor | None] | None]
Condition = Callable[[Any], Any]


@in_a_line("start", "stop", "condition")
@dataclass(frozen=True, slots=True)
class When:
    """When a rule runs.

    Attributes:
        start: the first step.
        stop: the first step at which it runs no more; None: it never stops.
        condition: takes the gradient (of a layer or group: a dict of name to gradient) and returns a boolean tensor
            with one entry, or for a single gradient one that broadcasts to its shape; where it is False, the gradient
            stays as it is.  It is never read by the host.
    """

    start: int = 0
    stop: int | None = None
    condition: Condition | None = None

    def __and__(self, other: When) -> When:
        """Both at once."""
        if self.condition is not None and other.condition is not None:
            one, two = self.condition, other.condition
            both: Condition | None = lambda gradient: one(gradient) & two(gradient)  # noqa: E731
        else:
            both = self.condition or other.condition
        stops = [stop for stop in (self.stop, other.stop) if stop is not None]
        return When(max(self.start, other.start), min(stops) if stops else None, both)

    def includes(self, step: int) -> bool:
        """Whether the rule runs at this step."""
        return step >= self.start and (self.stop is None or step < self.stop)


def steps(start: int = 0, stop: int | None = None) -> When:
    """From step ``start`` on, and before step ``stop`` (None: for good); steps are counted from 0.

    A step is a step of the optimizer; see ``Rewrite.step``.

    Raises:
        OptionError: not whole numbers, or ``stop`` is not above ``start``.
    """
    for name, value in (("start", start), ("stop", stop)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            message = f"{name} must be a whole number of at least 0, but is {value!r}"
            raise OptionError(message)
    if stop is not None and stop <= start:
        message = f"stop must be above start={start}, but is {stop}"
        raise OptionError(message)
    return When(start, stop)


def given(condition: Condition) -> When:
    """Only where ``condition`` holds.

    Args:
        condition: takes the gradient, for a layer or group a dict of name to gradient, and returns a boolean tensor
            with one entry; for a single gradient also one that broadcasts to its shape.  It is evaluated on the
            device, with ``torch.where``, and never read by the host.
    """
    return When(condition=condition)


ALWAYS = When()


class Where(Protocol):
    """A selection: of sites, or of parameters."""

    @property
    def words(self) -> str:
        """The selection, for messages."""


@in_a_line("name", "where", "when")
@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule.  Make it with the functions of ``fxgrad.rules``.

    Attributes:
        name: for messages and the report.
        each: takes one gradient and the moment; returns a replacement of the same shape, dtype, device and layout, or
            None to leave it.  It must not change its argument.
        where: selection of sites or parameters.
        when: all the time, or from and until a step, and under a condition.
        together: takes all gradients of a place at once, by name; where it is set, ``each`` is not used.
        through: acts on what a call passes back to its input; ``each`` gets what the call received.
        seed: of the random generators of the rule.
    """

    name: str
    each: Each | None
    where: Where
    when: When = ALWAYS
    together: Together | None = None
    through: bool = False
    seed: int = 0


def selects(rule: Rule, place: str, question: Callable[..., bool], *asked: Any) -> bool:
    """What a rule's selection says of a site or an edge.

    Raises:
        RuleError: a predicate of the user raised.
    """
    try:
        return question(*asked)
    except Exception as error:
        message = f"the selection of rule {rule.name!r} raised {type(error).__name__} at {place!r}: {error}"
        raise RuleError(message) from error


def apply_to_one(rule: Rule, gradient: Tensor, moment: Moment) -> Tensor:
    """What a rule makes of one gradient; ``gradient`` itself where it leaves it alone.

    Raises:
        RuleError: the rule raised, returned something else than a gradient like the given one, or changed its argument.
    """
    before = version_of(gradient)
    try:
        if rule.together is not None:
            several = rule.together({"": gradient}, moment)
            result = None if several is None else several.get("")
        else:
            result = rule.each(gradient, moment) if rule.each is not None else None
    except RuleError:
        raise
    except Exception as error:
        message = f"rule {rule.name!r} raised {type(error).__name__} at {moment.place!r}: {error}"
        raise RuleError(message) from error
    if version_of(gradient) != before:
        message = (
            f"rule {rule.name!r} changed the gradient of {moment.place!r} in place, which others may read as well; "
            "return a new tensor, e.g. g * 2 and not g.mul_(2)"
        )
        raise RuleError(message)
    if result is None or result is gradient:
        return gradient
    check_like(rule, moment.place, gradient, result)
    if rule.when.condition is None:
        return result
    holds = _holds(rule, moment.place, gradient, gradient)
    if isinstance(holds, bool):
        return result if holds else gradient
    return torch.where(holds, result, gradient)


def apply_through(
    rule: Rule, passed: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...], moment: Moment
) -> Tensor | None:
    """What a call passes back to its input, made of what it received; None where it received nothing.

    Raises:
        RuleError: the call has several inputs or outputs, or its input is not like its output; as ``apply_to_one``.
    """
    if len(passed) != 1 or len(received) != 1:
        message = (
            f"rule {rule.name!r} cannot act at {moment.place!r}: the call is no single autograd operation with one "
            f"differentiable input (it has {len(passed)}) and one output (it has {len(received)})"
        )
        raise RuleError(message)
    gradient, old = received[0], passed[0]
    if gradient is None:
        return None
    try:
        result = rule.each(gradient, moment) if rule.each is not None else None
    except Exception as error:
        message = f"rule {rule.name!r} raised {type(error).__name__} at {moment.place!r}: {error}"
        raise RuleError(message) from error
    if result is None:
        return None
    check_like(rule, moment.place, gradient if old is None else old, result)
    if rule.when.condition is None:
        return result
    holds = _holds(rule, moment.place, gradient, gradient)
    otherwise = torch.zeros_like(gradient) if old is None else old
    if isinstance(holds, bool):
        return result if holds else otherwise
    return torch.where(holds, result, otherwise)


def apply_to_several(rule: Rule, gradients: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
    """What a rule makes of all gradients of a layer or group, by name; those it leaves alone are the same objects.

    Raises:
        RuleError: as ``apply_to_one``.
    """
    given_ = dict(gradients)
    if rule.together is None:
        plain = Rule(rule.name, rule.each, rule.where)
        made = {name: apply_to_one(plain, g, _inside(moment, name)) for name, g in given_.items()}
    else:
        made = _together(rule, given_, moment)
    changed = [name for name in given_ if made[name] is not given_[name]]
    if rule.when.condition is None or not changed:
        return made
    holds = _holds(rule, moment.place, given_, None)
    if isinstance(holds, bool):
        return made if holds else given_
    here = {name: holds.to(given_[name].device) for name in changed}
    return {**made, **{name: torch.where(here[name], made[name], given_[name]) for name in changed}}


def _inside(moment: Moment, name: str) -> Moment:
    return Moment(f"{moment.place}.{name}" if name else moment.place, moment.step, moment.generator)


def _together(rule: Rule, gradients: dict[str, Tensor], moment: Moment) -> dict[str, Tensor]:
    before = {name: version_of(g) for name, g in gradients.items()}
    try:
        result = rule.together(dict(gradients), moment) if rule.together is not None else None
    except RuleError:
        raise
    except Exception as error:
        message = f"rule {rule.name!r} raised {type(error).__name__} at {moment.place!r}: {error}"
        raise RuleError(message) from error
    touched = [name for name, g in gradients.items() if version_of(g) != before[name]]
    if touched:
        message = (
            f"rule {rule.name!r} changed the gradient of {moment.place}.{touched[0]} in place; return a new tensor"
        )
        raise RuleError(message)
    if result is None:
        return gradients
    if not isinstance(result, Mapping) or not set(result) <= set(gradients):
        found = sorted(result) if isinstance(result, Mapping) else type(result).__name__
        message = (
            f"rule {rule.name!r} at {moment.place!r} must return a dict with some of the names "
            f"{sorted(gradients)}, or None, but returned {found}"
        )
        raise RuleError(message)
    made = dict(gradients)
    for name, new in result.items():
        if new is not None and new is not gradients[name]:
            check_like(rule, f"{moment.place}.{name}" if name else moment.place, gradients[name], new)
            made[name] = new
    return made


def _holds(rule: Rule, place: str, given_: Any, like: Tensor | None) -> Tensor | bool:
    """The condition's answer: a bool that the host knows, or a boolean tensor of one entry or broadcast to ``like``."""
    condition = rule.when.condition
    try:
        holds: Any = condition(given_) if condition is not None else None
    except Exception as error:
        message = f"the condition of rule {rule.name!r} raised {type(error).__name__} at {place!r}: {error}"
        raise RuleError(message) from error
    if isinstance(holds, bool):
        return holds
    fits = isinstance(holds, Tensor) and holds.dtype is torch.bool
    if fits and holds.numel() != 1:
        fits = like is not None and _broadcasts(holds.shape, like.shape)
    if not fits:
        found = f"{holds.dtype} {tuple(holds.shape)}" if isinstance(holds, Tensor) else type(holds).__name__
        wanted = "one entry" if like is None else f"one entry or a shape that broadcasts to {tuple(like.shape)}"
        message = (
            f"the condition of rule {rule.name!r} at {place!r} must return a boolean tensor with {wanted}, "
            f"but returned {found}"
        )
        raise RuleError(message)
    answer: Tensor = holds.reshape(()) if holds.numel() == 1 else holds
    return answer


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    if len(shape) > len(to):
        return False
    return all(one in (1, two) for one, two in zip(reversed(shape), reversed(to), strict=False))


def check_like(rule: Rule, place: str, gradient: Tensor, result: Any) -> None:
    """Refuse what cannot stand in for a gradient.

    Raises:
        RuleError: no tensor, or one of another shape, dtype, device or layout.
    """
    want = (gradient.shape, gradient.dtype, gradient.device, gradient.layout)
    if isinstance(result, Tensor) and (result.shape, result.dtype, result.device, result.layout) == want:
        return
    found = _facts(result) if isinstance(result, Tensor) else type(result).__name__
    message = (
        f"rule {rule.name!r} at {place!r} must return a gradient like the one it got, {_facts(gradient)}, or None, "
        f"but returned {found}"
    )
    raise RuleError(message)


def _facts(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape {tuple(tensor.shape)}, {dtype} on {tensor.device}{layout}"
