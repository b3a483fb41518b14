"""Which sites need no probe of their own: their gradient is a rearrangement of another site's.

Requires a recorded call sequence; gives, for each such site, the *step* to the site behind it.  A step is taken where
all of this holds:

* the value is used once, counting argument positions and the model's output, by one call with one output, and its
  very tensor is used under no other name;
* the call rearranges entries (a view, a permutation, a copy of the same dtype, the same tensor again), or is an
  ``add`` with alpha 1 whose operands and result have the same shape and dtype;
* neither the value, its result nor anything that shares their memory is changed in place;
* no user hook can lie between the two: neither value carries one or leaves the model, nor is it kept anywhere in
  Python, and no module next to them has hooks;
* no differentiable code ran that the front end could not see.

Then the value's gradient consists of the same numbers as its result's gradient, so that counts, norms and extrema are
equal (sums up to rounding).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_REARRANGES = frozenset({
    "view", "view_as", "reshape", "reshape_as", "permute", "transpose", "t", "T", "mT", "movedim", "moveaxis",
    "swapaxes", "swapdims", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "contiguous", "clone", "to",
    "type_as", "float", "double", "half", "bfloat16", "expand", "expand_as", "getitem",
})  # fmt: skip
_MODULES = frozenset({"Flatten", "Unflatten"})


@dataclass(frozen=True, slots=True)
class Step:
    """From a site to the one behind it.

    ``site``: number of the site whose gradient holds the same numbers.  ``same_shape``: the step holds only while both
    have one shape.  ``same_object``: it holds only while the call returns the very tensor that it took.
    """

    site: int
    same_shape: bool
    same_object: bool


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What the plan of a call sequence says about probes.

    Attributes:
        steps: of each site that needs no probe, the step to the site behind it.
        before: by the site that steps lead to, the sites that they start at.
        through: numbers of the calls that a step goes through.
        leaves: paths of the leaf modules next to a step, whose hooks would lie between its two sites.
    """

    steps: Mapping[int, Step]
    before: Mapping[int, tuple[int, ...]]
    through: frozenset[int]
    leaves: tuple[str, ...]


def plan_probes(plan: Any) -> ProbePlan:
    """Which sites of ``plan`` (a ``capture.captured.Plan``) need no probe of their own, and while what holds."""
    steps = {} if plan.hidden else _Planner(plan).steps()
    before: dict[int, tuple[int, ...]] = {}
    for number, step in steps.items():
        before[step.site] = (*before.get(step.site, ()), number)
    through = frozenset(plan.sites[step.site].call for step in steps.values())
    calls = through | {plan.sites[number].call for number in steps}
    near = [
        call for n, call in enumerate(plan.calls) if n in calls or any(ref.call in through for _, ref in call.uses())
    ]
    leaves = tuple(dict.fromkeys(call.target for call in near if call.op == "call_module"))
    return ProbePlan(steps, before, through, leaves)


class _Planner:
    def __init__(self, plan: Any) -> None:
        self.calls = plan.calls
        self.sites: list[tuple[int, Any]] = [(spec.call, spec.output) for spec in plan.sites]
        self.number = {(spec.call, spec.output.position): n for n, spec in enumerate(plan.sites)}
        self.uses: dict[Any, list[tuple[int, str]]] = {}
        for n, call in enumerate(self.calls):
            for argument, ref in call.uses():
                self.uses.setdefault(ref, []).append((n, argument))
        self.excluded: set[Any] = plan.lost | plan.hooked | plan.held | self._shared(plan.held)

    def steps(self) -> dict[int, Step]:
        found = {}
        for number in range(len(self.sites)):
            step = self._step(number)
            if step is not None:
                found[number] = step
        return found

    def _step(self, number: int) -> Step | None:
        at, value = self.sites[number]
        uses = self.uses.get((at, value.position), ())
        if self.calls[at].op == "placeholder" or not self._free(at, value) or len(uses) != 1:
            return None
        consumer, argument = uses[0]
        call = self.calls[consumer]
        if call.op in ("output", "external") or not call.grad_enabled or len(call.outputs) != 1:
            return None
        result = call.outputs[0]
        if not self._free(consumer, result) or self._leaves(consumer, result) or not self._only_name(at, value):
            return None
        if (value.dtype, value.device) != (result.dtype, result.device):
            return None
        behind = self.number[consumer, result.position]
        same_object = call.same_object[:1] == ((at, value.position),)
        if same_object or (argument == "args[0]" and _rearranges(call, value, result)):
            return Step(behind, same_shape=False, same_object=same_object)
        return Step(behind, same_shape=True, same_object=False) if self._adds(call, value, result) else None

    def _free(self, at: int, value: Any) -> bool:
        if not (value.requires_grad and value.strided):
            return False
        return (at, value.position) not in self.excluded and not self.calls[at].hooked

    def _only_name(self, at: int, value: Any) -> bool:
        """Whether the very tensor is used under no earlier name: a hook sees what all uses of the tensor send back."""
        call = self.calls[at]
        earlier = dict(zip((output.position for output in call.outputs), call.same_object, strict=False))
        before = earlier.get(value.position)
        while before is not None:
            if len(self.uses.get(before, ())) > 1:
                return False
            call = self.calls[before[0]]
            before = dict(zip((out.position for out in call.outputs), call.same_object, strict=False)).get(before[1])
        return True

    def _leaves(self, at: int, value: Any) -> bool:
        """Whether the value leaves the model or is taken by a module with hooks."""
        uses = self.uses.get((at, value.position), ())
        return any(self.calls[n].op == "output" or self.calls[n].hooked for n, _ in uses)

    def _adds(self, call: Any, value: Any, result: Any) -> bool:
        if call.word != "add" or not _of_torch(call) or len(call.args) != 2 or call.kwargs not in ({}, {"alpha": 1}):  # noqa: PLR2004
            return False
        for operand in call.args:
            number = self.number.get(operand) if hasattr(operand, "position") else None
            if number is None:
                return False
            output = self.sites[number][1]
            if (output.shape, output.dtype) != (result.shape, result.dtype):
                return False
        return bool(value.shape == result.shape)

    def _shared(self, held: set[Any]) -> set[Any]:
        """Every value that shares memory with one that is changed in place, or may be from outside."""
        root: dict[Any, Any] = {}

        def find(ref: Any) -> Any:
            while ref in root:
                ref = root[ref]
            return ref

        for n, call in enumerate(self.calls):
            for output, same, base in zip(call.outputs, call.same_object, call.bases, strict=False):
                for other in (same, base):
                    one, two = find((n, output.position)), find(tuple(other)) if other is not None else None
                    if two is not None and one != two:
                        root[one] = two
        changed = {find(tuple(ref)) for call in self.calls for ref in call.changed}
        # Whoever holds a value that shares the memory may change it when the call has returned.
        outside = [ref for call in self.calls if call.op == "output" for _, ref in call.uses()]
        changed |= {find(tuple(ref)) for ref in (*outside, *held)}
        return {(n, out.position) for n, call in enumerate(self.calls) for out in call.outputs
                if find((n, out.position)) in changed}  # fmt: skip


def _rearranges(call: Any, value: Any, result: Any) -> bool:
    if math.prod(value.shape) != math.prod(result.shape):
        return False
    if call.op == "call_module":
        return call.module_type in _MODULES
    if call.word == "getitem":
        index = call.args[1] if type(call.args[1]) is tuple else (call.args[1],)
        return all(_basic(part) for part in index)
    return call.word in _REARRANGES and _of_torch(call)


def _of_torch(call: Any) -> bool:
    """Whether the call is torch's own, and not one of somebody's that has the same name."""
    function, word = call.function, call.word
    if isinstance(function, str) or function is operator.getitem:  # a method, as torch.fx writes it
        return True
    names = (word, f"__{word}__", f"__r{word}__")
    known = [getattr(home, name, None) for home in (torch.Tensor, torch, operator) for name in names]
    owner = getattr(function, "__self__", None)  # of the getter of an attribute such as x.T
    return any(function is one or (owner is not None and owner is one) for one in known if one is not None)


def _basic(index: Any) -> bool:
    """Whether an index selects a view and repeats nothing."""
    if isinstance(index, slice):
        parts: Collection[Any] = (index.start, index.stop, index.step)
        return all(part is None or type(part) is int for part in parts)
    return index is None or index is Ellipsis or type(index) is int
