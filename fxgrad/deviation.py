"""The graph of a forward call that left all known courses of the native observer.

What ran before the first difference is that of a known course.  Behind it the observer tells each operator, where its
inputs come from and from where it was called; a call that an earlier course made from the same place keeps its name,
and one from a new place is named after its operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fxgrad.capture.captured import Call, ModuleSpan, Opaque, Output, Plan, Ref, SiteSpec
from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import canonical, of_a_library
from fxgrad.torch_private import module_called_in

if TYPE_CHECKING:
    from fxgrad.courses import Course
    from fxgrad.instrumentation.recording import Recording


class Where(NamedTuple):
    """From where an operator was called.

    ``path`` and ``type`` of the innermost module (of the leaf, if it is inside of one); ``code`` and ``instruction`` of
    the innermost frame of the user's; ``chain``: all modules around it, the innermost first.
    """

    path: str
    type: str
    leaf: bool
    code: CodeType | None
    instruction: int
    source: str | None
    chain: tuple[Place, ...]

    @property
    def key(self) -> Any:
        """What two calls from one place have in common."""
        return (self.path,) if self.leaf else (self.path, self.code, self.instruction)


class Finder:
    """Finds out from the Python frames where an operator is called."""

    def __init__(self, modules: ModuleMap) -> None:
        self._modules = modules
        self._libraries: dict[CodeType, bool] = {}

    def find(self, frame: FrameType | None) -> Where:
        """Of the operator that is running; ``frame`` is the innermost one that may be the user's."""
        places: list[Place] = []
        code, instruction, source = None, -1, None
        root = self._modules.root
        while frame is not None:
            called = module_called_in(frame)
            if called is not None:
                place = self._modules.places.get(id(called))
                if place is not None and place.module is called and called is not root:
                    places.append(place)
                if called is root:
                    break
            elif code is None and not self._of_a_library(frame.f_code):
                code, instruction = frame.f_code, frame.f_lasti
                source = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        inner = next((p for p in reversed(places) if p.leaf), places[0] if places else None)
        chain = tuple(places[places.index(inner) :]) if inner is not None else ()
        if inner is None:
            return Where(
                "", type(root).__name__, leaf=False, code=code, instruction=instruction, source=source, chain=chain
            )
        return Where(inner.path, inner.type, inner.leaf, code, instruction, source, chain)

    def _of_a_library(self, code: CodeType) -> bool:
        known = self._libraries.get(code)
        if known is None:
            known = self._libraries[code] = of_a_library(code.co_filename)
        return known


class _Operator(NamedTuple):
    """One operator: what it was, from where it was called, and its values (the first one's number)."""

    step: Any
    where: Where
    first: int


class _Template(NamedTuple):
    """A call of a known course, and the operators that it ran."""

    course: Course
    call: Call
    number: int
    operators: Sequence[_Operator]


@dataclass(slots=True)
class Found:
    """The graph of a call: which sites each value is, and which sites need no gradient."""

    plan: Plan
    slots: tuple[tuple[int, ...], ...]
    not_required: frozenset[int]
    same: Mapping[int, int]


def deviated(
    courses: Sequence[Course], nearby: int, native: Any, where: Sequence[Where | None], recording: Recording
) -> Found:
    """The graph of a call that left all known courses; ``nearby``: the number of one that began in the same way."""
    made = _Rebuilt(courses, courses[nearby], native, recording.sizes)
    kept, start = made.keep(native.differs_at)
    base = courses[nearby]
    operators = [
        _Operator(base.steps[n], base.where[n] or _NOWHERE, base.first_values[n])
        for n in range(start, native.differs_at)
    ]
    operators += [
        _Operator(step, place or _NOWHERE, first)
        for step, place, first in zip(native.steps, where, native.first_values, strict=True)
    ]
    made.follow(operators[:-1])
    return made.finished(operators[-1], kept)


_NOWHERE = Where("", "", leaf=False, code=None, instruction=-1, source=None, chain=())


@dataclass(slots=True)
class _Rebuilt:
    """A graph in the making."""

    courses: Sequence[Course]
    base: Course
    native: Any
    sizes: Any
    calls: list[Call] = field(default_factory=list)
    chains: list[tuple[Place, ...]] = field(default_factory=list)
    refs: dict[int, Ref] = field(default_factory=dict)  # by value
    names: dict[int, list[Ref]] = field(default_factory=dict)  # by value, all that it is
    same: dict[Ref, Ref] = field(default_factory=dict)  # the very tensor of an earlier name

    def keep(self, differs_at: int) -> tuple[int, int]:
        """The calls before the difference; how many, and the operator at which the others begin."""
        base = self.base
        start = differs_at
        for (
            call,
            (begin, end),
        ) in zip(base.plan.calls, base.ranges, strict=True):
            if call.op == "output" or end > differs_at:
                start = min(begin, differs_at)
                break
            self.calls.append(call)
            place = base.where[begin] if begin < end else None
            self.chains.append(place.chain if place is not None else ())
        kept = len(self.calls)
        for value, sites in enumerate(base.slots):
            for site in sites:
                spec = base.plan.sites[site]
                if spec.call < kept:
                    self._name(value, Ref(spec.call, spec.output.position))
        return kept, start

    def _name(self, value: int, ref: Ref) -> None:
        self.refs[value] = ref
        self.names.setdefault(value, []).append(ref)

    def follow(self, operators: Sequence[_Operator]) -> None:
        """The calls behind the difference."""
        templates = _templates(self.courses)
        at = 0
        while at < len(operators):
            here = operators[at]
            known = templates.get(here.where.key, ())
            template = next((t for t in known if _fits(t, operators, at)), None)
            if template is not None:
                count = len(template.operators)
                self._repeat(template, operators[at : at + count])
            else:
                count = _extent(operators, at)
                alike = (t.call for t in known if [op.step.name for op in t.operators] == [here.step.name])
                self._by_operator(operators[at : at + count], next(alike, None) if count == 1 else None)
            at += count

    def _repeat(self, template: _Template, operators: Sequence[_Operator]) -> None:
        """A call from a known place, on other values."""
        number = len(self.calls)
        moved: dict[Ref, Ref] = {}
        slots = _named(template.course)
        for old, new in zip(template.operators, operators, strict=True):
            for before, now in zip(_taken(old), _taken(new), strict=True):
                for ref in slots.get(before, ()):
                    if now in self.refs:
                        moved[ref] = self.refs[now]
        first_old, first_new = template.operators[0].first, operators[0].first
        outputs = []
        for output in template.call.outputs:
            site = template.course.plan.site_numbers.get(Ref(template.number, output.position))
            earlier = template.course.same.get(-1 if site is None else site)
            if earlier is not None and (source := moved.get(_ref(template.course, earlier))) is not None:
                self.same[Ref(number, output.position)] = source
            value = next((v for v, sites in enumerate(template.course.slots) if site in sites), None)
            if value is not None and value >= first_old:
                now = value - first_old + first_new
                self._name(now, Ref(number, output.position))
                output = dataclasses.replace(output, shape=tuple(self.sizes.at(now)))  # noqa: PLW2901
            outputs.append(output)

        def swap(value: Any) -> Any:
            return _swapped(value, moved)

        call = template.call
        self.calls.append(dataclasses.replace(
            call, refs=tuple(moved.get(ref) if ref is not None else None for ref in call.refs), args=swap(call.args),
            kwargs=swap(call.kwargs), outputs=tuple(outputs),
            same_object=tuple(moved.get(ref) if ref is not None else None for ref in call.same_object),
            bases=tuple(moved.get(ref) if ref is not None else None for ref in call.bases),
            changed=tuple(moved[ref] for ref in call.changed if ref in moved),
        ))  # fmt: skip
        self.chains.append(operators[0].where.chain)

    def _by_operator(self, operators: Sequence[_Operator], alike: Call | None) -> None:
        """A call from a place that no known course went through, named after its operator or leaf module.

        ``alike``: a known call from there of the same operator, which returned something else.
        """
        number, where, last = len(self.calls), operators[0].where, operators[-1]
        inner = {value for op in operators for value in range(op.first, op.first + len(op.step.outputs))}
        sources = [v for op in operators for v in _taken(op) if v not in inner and v in self.refs]
        refs = tuple(self.refs[value] for value in dict.fromkeys(sources))
        word = canonical(last.step.name.rpartition("::")[2])
        found, value = [], last.first
        several = len(last.step.outputs) > 1
        for index, (code, dtype) in enumerate(zip(last.step.outputs, last.step.dtypes(), strict=True)):
            position = f"[{index}]" if several else ""
            differs = dtype.is_floating_point or dtype.is_complex
            shape: tuple[int, ...] = ()
            if differs and value < self.native.values:
                self._name(value, Ref(number, position))
                shape = tuple(self.sizes.at(value))
                value += 1
            found.append(Output(position, shape, dtype, torch.device("cpu"), differs, bool(code % 2)))
        op, target = ("call_module", where.path) if where.leaf else ("call_function", word)
        word = where.path.rpartition(".")[2] if where.leaf else word
        stem = where.path if where.leaf else f"{where.path}/{word}"
        if alike is not None:
            op, target, word, stem = alike.op, alike.target, alike.word, alike.key_stem
        self.calls.append(Call(
            op, target, word, stem, where.path, where.type, None, refs, refs, {}, tuple(found), where.source,
            last.step.grad_mode, same_object=(None,) * len(found), bases=(None,) * len(found),
        ))  # fmt: skip
        self.chains.append(where.chain)

    def finished(self, outputs: _Operator, kept: int) -> Found:
        """With what the model returned."""
        known = self.base.plan.calls[-1]
        before, now = _taken(_Operator(self.base.steps[-1], _NOWHERE, 0)), _taken(outputs)
        refs = tuple(self.refs[value] for value in now if value in self.refs)
        args: Any = refs if len(refs) == 1 else (refs,)
        if len(before) == len(now):
            named = _named(self.base)
            pairs = [(ref, self.refs[new]) for old, new in zip(before, now, strict=True)
                     for ref in named.get(old, ()) if new in self.refs]  # fmt: skip
            args = _swapped(known.args, dict(pairs))
        self.calls.append(dataclasses.replace(known, refs=refs, args=args))
        self.chains.append(())
        base = self.base.plan
        whole = [span for span in base.spans if span.outputs and all(ref.call < kept for ref in span.outputs)]
        lost = {ref for ref in base.lost if ref.call < kept}
        inputs = tuple(Ref(n, "") for n, call in enumerate(self.calls) if call.op == "placeholder")
        root = ModuleSpan("", base.spans[-1].type, inputs, refs)
        plan = Plan(self.calls, [*whole, *self._spans(kept), root], lost, hidden=base.hidden, asked=base.asked)
        numbers = plan.site_numbers
        slots = tuple(
            tuple(numbers[ref] for ref in self.names.get(value, ()) if ref in numbers)
            for value in range(self.native.values)
        )
        without = frozenset(
            number
            for number, spec in enumerate(plan.sites)
            if (number in self.base.not_required if spec.call < kept else self._without_gradient(spec))
        )
        same = {one: other for one, other in self.base.same.items() if base.sites[one].call < kept}
        same.update({numbers[one]: numbers[other] for one, other in self.same.items()})
        return Found(plan, slots, without, same)

    def _without_gradient(self, spec: SiteSpec) -> bool:
        return not (spec.output.requires_grad and self.calls[spec.call].grad_enabled)

    def _spans(self, kept: int) -> Iterator[ModuleSpan]:
        """The module calls behind the difference, as they return, with what flows into them and out of them."""
        users: dict[Ref, list[int]] = {}
        for number, call in enumerate(self.calls):
            for _, ref in call.uses():
                users.setdefault(ref, []).append(number)
        for number in range(kept, len(self.calls)):
            following = self.chains[number + 1] if number + 1 < len(self.chains) else ()
            leaf = self.calls[number].op == "call_module"
            for place in self.chains[number]:
                if place in following and not (leaf and place.path == self.calls[number].path):
                    break
                yield self._span(place, number, users)

    def _span(self, place: Place, last: int, users: Mapping[Ref, list[int]]) -> ModuleSpan:
        """The call of a module that ended with call number ``last``."""
        first = last
        leaf = self.calls[last].op == "call_module" and place.path == self.calls[last].path
        while not leaf and first and place in self.chains[first - 1]:
            first -= 1
        inside = range(first, last + 1)
        taken = (ref for n in inside for _, ref in self.calls[n].uses() if ref.call not in inside)
        given = (
            Ref(n, out.position) for n in inside for out in self.calls[n].outputs
            if any(user not in inside for user in users.get(Ref(n, out.position), ()))
        )  # fmt: skip
        return ModuleSpan(place.path, place.type, tuple(dict.fromkeys(taken)), tuple(given))


def _templates(courses: Sequence[Course]) -> Mapping[Any, Sequence[_Template]]:
    found: dict[Any, list[_Template]] = {}
    for course in courses:
        for number, (call, (begin, end)) in enumerate(zip(course.plan.calls, course.ranges, strict=True)):
            where = course.where[begin] if begin < end else None
            if where is not None:
                operators = [
                    _Operator(course.steps[n], course.where[n] or _NOWHERE, course.first_values[n])
                    for n in range(begin, end)
                ]
                found.setdefault(where.key, []).append(_Template(course, call, number, operators))
    return found


def _fits(template: _Template, operators: Sequence[_Operator], at: int) -> bool:
    """Whether the operators from ``at`` on are those of a known call."""
    here = operators[at : at + len(template.operators)]
    if len(here) != len(template.operators):
        return False
    return all(
        old.step.name == new.step.name
        and old.step.outputs == new.step.outputs
        and len(old.step.sources) == len(new.step.sources)
        and old.where.key == new.where.key
        for old, new in zip(template.operators, here, strict=True)
    )


def _extent(operators: Sequence[_Operator], at: int) -> int:
    """How many operators belong to one call of an unknown leaf module; 1 for all else."""
    where = operators[at].where
    if not where.leaf:
        return 1
    end = at
    while end < len(operators) and operators[end].where.key == where.key:
        end += 1
    return end - at


def _taken(operator: _Operator) -> list[int]:
    """The values that an operator takes, negative where that is not known."""
    step = operator.step
    return [one if one >= 0 else other for one, other in zip(step.sources, step.plain, strict=True)]


def _named(course: Course) -> Mapping[int, Sequence[Ref]]:
    """By value of a course, the names that it has."""
    found = {value: [_ref(course, n) for n in numbers] for value, numbers in enumerate(course.slots)}
    value_at = {n: value for value, numbers in enumerate(course.slots) for n in numbers}
    for site, earlier in course.same.items():  # in the order in which they ran
        if earlier in value_at:
            value_at[site] = value_at[earlier]
            found[value_at[site]].append(_ref(course, site))
    return found


def _ref(course: Course, site: int) -> Ref:
    spec = course.plan.sites[site]
    return Ref(spec.call, spec.output.position)


def _swapped(value: Any, moved: Mapping[Ref, Ref]) -> Any:
    """An argument with other values in it; one that the observer cannot follow is a tensor from elsewhere."""
    if isinstance(value, Ref):
        return moved.get(value, Opaque("tensor"))
    if type(value) in (tuple, list):
        return type(value)(_swapped(item, moved) for item in value)
    if isinstance(value, dict):
        return {key: _swapped(item, moved) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*_swapped((value.start, value.stop, value.step), moved))
    return value
