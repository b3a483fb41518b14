"""The ready rules: each a function that returns a ``Rule``.  All act on a tensor's device and never wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.rewriting.rule import ALWAYS, Moment, Rule, When, Where, given, steps
from fxgrad.rewriting.selection import edges, is_relu, nodes, outputs
from fxgrad.rewriting.units import groups, layers, parameters

Function = Callable[[Tensor], Tensor | None]
Part = Function | float | None

_RELUS = nodes(predicate=is_relu)
_STEPS = nodes(op=("sign", "sign_", "sgn", "sgn_", "round", "round_", "floor", "floor_", "ceil", "ceil_", "trunc",
                   "trunc_", "fix", "fix_"))  # fmt: skip


# ---- your own ------------------------------------------------------------------------------------------------------


def custom(function: Function, where: Where, when: When = ALWAYS, *, name: str | None = None) -> Rule:
    """``function(gradient)`` instead of the gradient; None leaves it alone.

    Args:
        function: pure: returns a tensor of the same shape, dtype, device and layout, and changes nothing in place.
        where: selection of sites or parameters; in a layer or group it is called for each gradient.
        when: all the time, or ``steps(...)``, ``given(...)``, or both (``&``).
        name: for messages and the report; None: the function's.
    """
    _check_callable(function, "function")
    return Rule(name or _name(function), lambda g, _: function(g), where, when)


def custom_layer(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor | None] | None], where: Where | None = None,
    when: When = ALWAYS, *, name: str | None = None,
) -> Rule:  # fmt: skip
    """``function(gradients)`` for all gradients of a layer at once.

    Args:
        function: takes a dict from the parameters' names in the layer (``"weight"``, ``"bias"``) to their gradients;
            those without gradient are not in it.  Returns a dict with the new ones; what is missing or None stays.
        where: ``layers(...)`` (the default: every ``nn.Linear``) or ``groups(...)``.
        when: see ``custom``; a condition takes the same dict.
        name: for messages and the report; None: the function's.
    """
    _check_callable(function, "function")
    return Rule(name or _name(function), None, _or_linear(where), when, lambda g, _: function(g))


def where(condition: Function, a: Part, b: Part, at: Where, when: When = ALWAYS) -> Rule:
    """``a`` where ``condition`` holds, elsewhere ``b``, entry by entry.

    Args:
        condition: takes the gradient, returns a boolean tensor that broadcasts to its shape.
        a: a function of the gradient, a number, or None for the gradient itself.
        b: the same.
        at: selection of sites or parameters.
        when: see ``custom``.
    """
    _check_callable(condition, "condition")

    def choose(gradient: Tensor, _: Moment) -> Tensor:
        holds: Any = condition(gradient)
        return torch.where(holds, _part(a, gradient), _part(b, gradient))

    return Rule("where", choose, at, when)


# ---- scaling and clipping ------------------------------------------------------------------------------------------


def scale(factor: float, where: Where, when: When = ALWAYS) -> Rule:
    """The gradient times ``factor``."""
    _check_number(factor, "factor")
    return Rule(f"scale({factor:g})", lambda g, _: g * factor, where, when)


def clip_by_value(limit: float, where: Where, when: When = ALWAYS) -> Rule:
    """Every entry held between ``-limit`` and ``limit``, as ``torch.clamp`` (NaN stays)."""
    _check_number(limit, "limit", above=0.0)
    return Rule(f"clip_by_value({limit:g})", lambda g, _: g.clamp(-limit, limit), where, when)


def clip_by_norm(max_norm: float, where: Where, when: When = ALWAYS) -> Rule:
    """Scaled down so that the l2 norm is at most ``max_norm``; smaller gradients stay as they are, bit for bit.

    The norm is that of one gradient for ``nodes`` and ``parameters``, and the joint one of all gradients for ``layers``
    and ``groups``.  A gradient with NaN stays as it is; one with Inf becomes NaN there and 0 elsewhere.
    """
    _check_number(max_norm, "max_norm", above=0.0)

    def clip(gradients: dict[str, Tensor], _: Moment) -> dict[str, Tensor]:
        norm = joint_norm(gradients.values())
        factor = torch.where(norm > max_norm, max_norm / norm, 1.0)
        return {name: _times(g, factor) for name, g in gradients.items()}

    return Rule(f"clip_by_norm({max_norm:g})", None, where, when, clip)


def unit_norm(where: Where, when: When = ALWAYS, *, eps: float = 0.0) -> Rule:
    """Divided by the l2 norm (joint for ``layers`` and ``groups``); a norm of at most ``eps`` leaves it as it is."""
    _check_number(eps, "eps")

    def normalise(gradients: dict[str, Tensor], _: Moment) -> dict[str, Tensor]:
        norm = joint_norm(gradients.values())
        factor = torch.where(norm > eps, 1.0 / norm, 1.0)
        return {name: _times(g, factor) for name, g in gradients.items()}

    return Rule("unit_norm", None, where, when, normalise)


# ---- replacing entries ---------------------------------------------------------------------------------------------


def replace_zeros(value: float, where: Where, when: When = ALWAYS) -> Rule:
    """Entries that are exactly zero (of either sign) become ``value``."""
    _check_number(value, "value")
    return Rule(f"replace_zeros({value:g})", lambda g, _: torch.where(g == 0, value, g), where, when)


def replace_nonfinite(
    where: Where, when: When = ALWAYS, *, nan: float = 0.0, posinf: float = 0.0, neginf: float = 0.0
) -> Rule:
    """NaN and Inf become numbers (0 by default), as ``torch.nan_to_num``."""
    for name, value in (("nan", nan), ("posinf", posinf), ("neginf", neginf)):
        _check_number(value, name)
    return Rule("replace_nonfinite", lambda g, _: torch.nan_to_num(g, nan, posinf, neginf), where, when)


def zero_out(where: Where, when: When = ALWAYS) -> Rule:
    """Zeros instead of the gradient, also where it is NaN."""
    return Rule("zero_out", lambda g, _: torch.zeros_like(g), where, when)


def freeze(path: str, when: When = ALWAYS) -> Rule:
    """Freeze a branch: zeros instead of the gradient that enters the modules at ``path`` through what they return.

    Their parameters, and all that reaches the loss through them only, get gradients of zero.  An optimizer with
    momentum or weight decay still moves those; ``requires_grad_(False)`` keeps them from it.
    """
    return Rule(f"freeze({path!r})", lambda g, _: torch.zeros_like(g), outputs(path), when)


def sign(where: Where, when: When = ALWAYS) -> Rule:
    """-1, 0 or 1 instead of each entry; of a complex one, the entry divided by its modulus."""
    return Rule("sign", lambda g, _: torch.sgn(g), where, when)


def add_noise(
    std: float, where: Where, when: When = ALWAYS, *, seed: int = 0, schedule: Callable[[int], float] | None = None
) -> Rule:
    """Gaussian noise added to each entry.

    The noise of a place depends on the seed, the place and how often the rule ran there, on nothing else, and torch's
    own random streams are left alone.

    Args:
        std: standard deviation, in units of the gradient.
        where: selection of sites or parameters.
        when: see ``custom``.
        seed: any whole number.
        schedule: takes the step, returns a factor on ``std``; for example ``lambda t: (1 + t) ** -0.55``.
    """
    _check_number(std, "std")
    if isinstance(seed, bool) or not isinstance(seed, int):
        message = f"seed must be a whole number, but is {seed!r}"
        raise OptionError(message)

    def disturb(gradient: Tensor, moment: Moment) -> Tensor:
        size = std * (1.0 if schedule is None else float(schedule(moment.step)))
        noise = torch.randn(
            gradient.shape, generator=moment.generator(gradient.device), dtype=gradient.dtype, device=gradient.device
        )
        return torch.add(gradient, noise, alpha=size)

    return Rule(f"add_noise({std:g})", disturb, where, when, seed=seed)


# ---- activations ---------------------------------------------------------------------------------------------------


def straight_through(where: Where = _STEPS, when: When = ALWAYS) -> Rule:
    """What a call receives is passed to its input unchanged: the straight-through estimate of a step function.

    By default at every sign, sgn, round, floor, ceil and trunc, as functions and methods, in place or not.  The call
    must be one autograd operation with one differentiable input of the shape and dtype of its output.
    """
    return Rule("straight_through", lambda g, _: g, where, when, through=True)


def guided_relu(where: Where = _RELUS, when: When = ALWAYS) -> Rule:
    """Guided backprop: negative entries of what a ReLU receives become 0, at functional and module calls alike.

    With the mask that the ReLU applies itself, what passes is where both value and gradient are positive (Springenberg
    et al. 2015, "Striving for Simplicity: The All Convolutional Net").
    """
    return Rule("guided_relu", lambda g, _: g.clamp(min=0), where, when)


# ---- layers --------------------------------------------------------------------------------------------------------


def fill_zero(all_zero: float = 1.0, some_zero: float = 0.5, where: Where | None = None, when: When = ALWAYS) -> Rule:
    """Fill zeros: the entries of a layer that are all zero become ``all_zero``, otherwise its zeros ``some_zero``.

    Args:
        all_zero: where every gradient entry of the layer, of all its parameters, is exactly zero, all become this.
        some_zero: otherwise entries that are exactly zero become this; others stay as they are.
        where: ``layers(...)``, by default every ``nn.Linear``; also ``groups``, ``parameters`` or ``nodes``.
        when: see ``custom``; a condition takes a dict of name to gradient.

    Parameters that got no gradient (None) are not counted and stay without one.
    """
    for name, value in (("all_zero", all_zero), ("some_zero", some_zero)):
        _check_number(value, name)

    def fill(gradients: dict[str, Tensor], _: Moment) -> dict[str, Tensor]:
        zeros = {name: g == 0 for name, g in gradients.items()}
        first = next(iter(gradients.values())).device
        whole = torch.stack([zero.all().to(first) for zero in zeros.values()]).all()
        return {
            # A scalar of the gradient's own dtype, so that 0.1 is float64's in float64.
            name: torch.where(zeros[name], g.new_full((), some_zero).masked_fill(whole.to(g.device), all_zero), g)
            for name, g in gradients.items()
        }

    return Rule(f"fill_zero({all_zero:g}, {some_zero:g})", None, _or_linear(where), when, fill)


# ---- parts ---------------------------------------------------------------------------------------------------------


def joint_norm(gradients: Any) -> Tensor:
    """The l2 norm over all entries of all gradients, accumulated in float32 at least, without a dimension."""
    listed = list(gradients)
    wide = torch.float64 if any(g.dtype in (torch.float64, torch.complex128) for g in listed) else torch.float32
    norms = [_norm(g).to(device=listed[0].device, dtype=wide) for g in listed]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm(gradient: Tensor) -> Tensor:
    if gradient.dtype in (torch.float16, torch.bfloat16):
        half: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return half
    full: Tensor = torch.linalg.vector_norm(gradient)
    return full


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """``gradient * factor`` in the gradient's dtype: a tensor without dimensions does not widen it."""
    return gradient * factor.to(gradient.device)


def _part(part: Part, gradient: Tensor) -> Any:
    if callable(part):
        return part(gradient)
    return gradient if part is None else part


def _or_linear(where: Where | None) -> Where:
    return layers() if where is None else where


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _check_callable(value: object, name: str) -> None:
    if not callable(value):
        message = f"{name} must be callable, but is {type(value).__name__}"
        raise OptionError(message)


def _check_number(value: object, name: str, above: float = -math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or value <= above:  # type: ignore[arg-type, operator]
        least = "" if above == -math.inf else f" above {above:g}"
        message = f"{name} must be a number{least}, but is {value!r}"
        raise OptionError(message)


__all__ = [
    "Rule",
    "When",
    "add_noise",
    "clip_by_norm",
    "clip_by_value",
    "custom",
    "custom_layer",
    "edges",
    "fill_zero",
    "freeze",
    "given",
    "groups",
    "guided_relu",
    "layers",
    "nodes",
    "outputs",
    "parameters",
    "replace_nonfinite",
    "replace_zeros",
    "scale",
    "sign",
    "steps",
    "straight_through",
    "unit_norm",
    "where",
    "zero_out",
]
