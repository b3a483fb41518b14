"""The graph of a forward call that left all known courses of the native observer.

What ran before the first difference is that of a known course.  Behind it each operator is a node of its own, except
inside of a leaf module: named by the module that it ran in, the operator, and the line of the user's that called it.
Where the very same course is learnt afterwards, the call is named by it instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fxgrad.capture.captured import Call, CallGraph, ModuleSpan, Output, Ref, SiteSpec
from fxgrad.capture.names import canonical
from fxgrad.courses.finding import Around, Where

if TYPE_CHECKING:
    from fxgrad.courses.known import Course

_EXTERNAL = -2  # a source that no operator made, as the observer marks it
PARAMETERS = -16  # the first parameter, as it numbers them; the others are below


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that left all known courses.

    Attributes:
        base: the course whose beginning it shares.
        differs_at: the number of the first operator that differs.
        steps, where: the operators from there on, and from where they were called.
        values: how many values appeared.
        sizes: of them.
        given: values that the leaf module was given that the first of these operators ran in.
        leaves: by value or parameter that is a leaf, its sites: its hooks have these names.
    """

    base: Course
    differs_at: int
    steps: Sequence[Any]
    where: Sequence[Where | None]
    values: int
    sizes: Any
    given: frozenset[int]
    leaves: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def ran(self, course: Course) -> bool:
        """Whether it ran the very operators of a course, on the same values."""
        if len(course.steps) != self.differs_at + len(self.steps):
            return False
        own = itertools.chain(itertools.islice(self.base.steps, self.differs_at), self.steps)
        return all(map(_same_step, own, course.steps))

    @property
    def words(self) -> str:
        """Where it left the known courses."""
        where = self.where[0]
        line = f" ({where.source})" if where is not None and where.source else ""
        return f"left the known courses at operator {self.differs_at}, {self.steps[0].name}{line}"


def _same_step(one: Any, other: Any) -> bool:
    facts = [(step.name, step.grad_mode, step.sources, step.outputs, step.given) for step in (one, other)]
    return bool(facts[0] == facts[1])


@dataclass(slots=True)
class Found:
    """The graph of a call: which sites each value and parameter is, which need no gradient, which are one tensor."""

    call_graph: CallGraph
    slots: tuple[tuple[int, ...], ...]
    not_required: frozenset[int]
    same: dict[int, int]
    parameters: Mapping[int, Sequence[int]]


def by_operator(deviation: Deviation) -> Found:
    """The graph of a call whose course is not known."""
    made = _Rebuilt(deviation)
    kept, start = made.keep()
    base = deviation.base
    at = deviation.differs_at
    known = list(zip(base.steps[start:at], base.where[start:at], strict=False))
    made.follow(known, list(zip(deviation.steps[:-1], deviation.where, strict=False)), deviation.steps[-1])
    return made.finished(deviation.steps[-1], kept)


_NOWHERE = Where("", "", leaf=False, call=-1, source=None, chain=())
_Operator = tuple[Any, Where | None]
_Returned = tuple[str, int, torch.dtype, int]  # position, value, and as of a step's outputs


def _is_function(step: Any) -> bool:
    """Whether a step is a function with a backward of its own, of which the observer sees no result."""
    return "::" not in step.name and not step.outputs and step.grad_mode and any(s != -1 for s in step.sources)


def _all(step: Any) -> list[_Returned]:
    facts = list(zip(step.given, step.dtypes(), step.outputs, strict=True))
    return [(f"[{n}]" if len(facts) > 1 else "", *one) for n, one in enumerate(facts)]


@dataclass(eq=False)
class _Rebuilt:
    """A graph in the making."""

    deviation: Deviation
    calls: list[Call] = field(default_factory=list)
    chains: list[tuple[Around, ...]] = field(default_factory=list)
    refs: dict[int, Ref] = field(default_factory=dict)  # by value, its latest name
    names: dict[int, list[Ref]] = field(default_factory=dict)  # by value, all that it is
    goes_on: bool = False  # whether the first operator that differs is one of the leaf call that the others ended in
    applied: list[tuple[Any, Where]] = field(default_factory=list)  # functions whose results nobody has used yet
    last_use: dict[int, int] = field(default_factory=dict)  # by value, the number of the operator

    def keep(self) -> tuple[int, int]:
        """The calls that ended before the difference; how many, and the operator at which the others begin."""
        base, at = self.deviation.base, self.deviation.differs_at
        start = at
        for call, (begin, end) in zip(base.call_graph.calls, base.ranges, strict=True):
            placeholder = call.op == "placeholder"
            self.goes_on = self._goes_on(call, begin, end)
            if not placeholder and (call.op == "output" or end > at or begin >= at or self.goes_on):
                start = min(begin, at)
                break
            self.calls.append(call)
            place = base.where[begin] if begin < end else None
            self.chains.append(place.chain if place is not None else ())
        owned = [(PARAMETERS - number, sites) for number, sites in base.parameters.items()]
        for value, sites in [*enumerate(base.slots), *owned]:
            for site in sites:
                spec = base.call_graph.sites[site]
                if spec.call < len(self.calls):
                    self._name(value, Ref(spec.call, spec.output.position))
        return len(self.calls), start

    def _goes_on(self, call: Call, begin: int, end: int) -> bool:
        """Whether the first operator that differs is one of this call of a leaf module, and of no second call of it."""
        deviation = self.deviation
        first, at = deviation.where[0], deviation.differs_at
        if call.op != "call_module" or first is None or not first.leaf or first.path != call.target:
            return False
        made = {value for step in deviation.base.steps[begin:at] for value in step.given if value >= 0}
        if not begin < at <= end or made & deviation.given:
            return False
        return at < end or not made.isdisjoint(deviation.steps[0].taken)

    def _name(self, value: int, ref: Ref) -> None:
        if value >= 0 or value <= PARAMETERS:
            self.refs[value] = ref
            self.names.setdefault(value, []).append(ref)

    def follow(self, known: Sequence[_Operator], new: Sequence[_Operator], outputs: Any) -> None:
        """The calls behind the difference: one for each call of a leaf module, one for each other operator."""
        operators = [*known, *new]
        for number, step in enumerate([*(step for step, _ in operators), outputs]):
            self.last_use.update(dict.fromkeys(step.taken, number))
        latest, first = known[-1][1] if known else None, new[0][1] if new else None

        def group(numbered: tuple[int, _Operator]) -> Any:
            number, (_, where) = numbered
            if where is None or not where.leaf:
                return object()
            if number < len(known):
                return "known", where.call
            goes_on = self.goes_on and latest is not None and first is not None and where.call == first.call
            return ("known", latest.call) if goes_on and latest is not None else ("new", where.call)

        for _, found in itertools.groupby(enumerate(operators), group):
            run = list(found)
            self._call([operator for _, operator in run], run[-1][0] + 1)

    def _call(self, run: Sequence[_Operator], end: int) -> None:
        """One call that ran these operators, the last of which has the number before ``end``."""
        steps, where = [step for step, _ in run], run[0][1] or _NOWHERE
        functions = [step for step in steps if _is_function(step)]
        if not (where.leaf and functions):  # else what they returned may be its own
            self._externals(steps)
        if any(step.outputs for step in steps):
            self._known_operators(steps, where, end)
        else:
            self.applied += [(step, where) for step in functions]

    def _externals(self, steps: Sequence[Any]) -> None:
        """Values that no operator made get a node when they are first used."""
        for step in steps:
            for source, value in zip(step.sources, step.taken, strict=True):
                if source == _EXTERNAL:
                    self._external(value, step)

    def _external(self, value: int, user: Any) -> None:
        """What a function with a backward of its own returned, if it can be one only; else it is from nowhere."""
        output = self._output("", value, torch.float32, requires_grad=True)
        if len(self.applied) == 1:
            step, where = self.applied.pop()
            refs = tuple(dict.fromkeys(self.refs[taken] for taken in step.taken if taken in self.refs))
            op, word = ("call_module", where.path.rpartition(".")[2]) if where.leaf else ("external", step.name)
            stem = where.path if where.leaf else f"{where.path}/{word}"
            self._append(where, op, word, stem, refs, (output,), user.grad_mode)
        else:
            where = _NOWHERE._replace(type=self.deviation.base.call_graph.spans[-1].type)
            self._append(where, "external", "external", "/external", (), (output,), user.grad_mode)
        self._name(value, Ref(len(self.calls) - 1, ""))

    def _known_operators(self, steps: Sequence[Any], where: Where, end: int) -> None:
        last = next(step for step in reversed(steps) if step.outputs)
        inner = {value for step in steps for value in step.given}
        taken = dict.fromkeys(v for step in steps for v in step.taken if v not in inner and v in self.refs)
        refs = tuple(self.refs[value] for value in taken)
        named = (where.leaf and (self._as_before(steps, where) or self._used(steps, end))) or _all(last)
        outputs = tuple(
            self._output(position, value, dtype, requires_grad=bool(code % 2)) for position, value, dtype, code in named
        )
        word = canonical(last.name.rpartition("::")[2])
        if where.leaf:
            self._append(where, "call_module", where.path.rpartition(".")[2], where.path, refs, outputs, last.grad_mode)
        else:
            self._append(where, "call_function", word, f"{where.path}/{word}", refs, outputs, last.grad_mode)
        for position, value, _, _ in named:
            self._name(value, Ref(len(self.calls) - 1, position))

    @cached_property
    def _leaf_calls(self) -> dict[str, list[int]]:
        """By path, the known calls of a leaf module."""
        found: dict[str, list[int]] = {}
        for number, call in enumerate(self.deviation.base.call_graph.calls):
            if call.op == "call_module":
                found.setdefault(call.target, []).append(number)
        return found

    def _as_before(self, steps: Sequence[Any], where: Where) -> list[_Returned]:
        """What a leaf returned, where a known call of it ran the same operators; nothing where none did."""
        base = self.deviation.base
        for number in self._leaf_calls.get(where.path, ()):
            call, (begin, end) = base.call_graph.calls[number], base.ranges[number]
            if end - begin != len(steps):
                continue
            pairs = list(zip(base.steps[begin:end], steps, strict=True))
            if any((one.name, one.outputs) != (other.name, other.outputs) for one, other in pairs):
                continue
            sites = base.call_graph.site_numbers
            wanted = {sites.get(Ref(number, output.position)): output.position for output in call.outputs}
            named = {
                wanted[site]: ("", *facts)
                for known, step in pairs
                for value, *facts in zip(known.given, step.given, step.dtypes(), step.outputs, strict=True)
                if 0 <= value < len(base.slots)
                for site in base.slots[value]
                if site in wanted
            }
            found: list[_Returned] = []
            for output in call.outputs:
                if output.position in named:
                    found.append((output.position, *named[output.position][1:]))
                elif output.differentiable:
                    break
                else:
                    found.append((output.position, -1, output.dtype, 0))
            else:
                return found
        return []

    def _used(self, steps: Sequence[Any], end: int) -> list[_Returned]:
        """What a leaf made and others use: it has returned that."""
        found = {
            value: (value, dtype, code)
            for step in steps
            for value, dtype, code in zip(step.given, step.dtypes(), step.outputs, strict=True)
            if value >= 0 and self.last_use.get(value, -1) >= end
        }
        return [(f"[{n}]" if len(found) > 1 else "", *one) for n, one in enumerate(found.values())]

    def _output(self, position: str, value: int, dtype: torch.dtype, *, requires_grad: bool) -> Output:
        shape = tuple(self.deviation.sizes.at(value)) if value >= 0 else ()
        differentiable = dtype.is_floating_point or dtype.is_complex
        return Output(position, shape, dtype, torch.device("cpu"), differentiable, requires_grad)

    def _append(  # noqa: PLR0913, PLR0917  # the facts of one node
        self, where: Where, op: str, word: str, stem: str, refs: tuple[Ref, ...], outputs: tuple[Output, ...],
        grad_mode: bool,  # noqa: FBT001
    ) -> None:  # fmt: skip
        target = where.path if op == "call_module" else word
        nothing = (None,) * len(outputs)
        self.calls.append(Call(
            op, target, word, stem, where.path, where.type, None, refs, refs, {}, outputs, where.source, grad_mode,
            same_object=nothing, bases=nothing,
        ))  # fmt: skip
        self.chains.append(where.chain)

    # ---- the whole -------------------------------------------------------------------------------------------

    def finished(self, outputs: Any, kept: int) -> Found:
        """With what the model returned."""
        base = self.deviation.base
        self._externals([outputs])
        refs = tuple(self.refs[value] for value in outputs.taken if value in self.refs)
        args: Any = refs if len(refs) == 1 else (refs,)
        self.calls.append(replace(base.call_graph.calls[-1], refs=refs, args=args))
        self.chains.append(())
        inputs = tuple(Ref(n, "") for n, call in enumerate(self.calls) if call.op == "placeholder")
        whole = [
            span for span in base.call_graph.spans if span.outputs and all(ref.call < kept for ref in span.outputs)
        ]
        root = ModuleSpan("", base.call_graph.spans[-1].type, inputs, refs)
        lost = {ref for ref in base.call_graph.lost if ref.call < kept}
        spans = [*whole, *self._spans(kept), root]
        call_graph = CallGraph(self.calls, spans, lost, hidden=base.call_graph.hidden, asked=base.call_graph.asked)
        return self._found(call_graph, kept)

    def _found(self, call_graph: CallGraph, kept: int) -> Found:
        base = self.deviation.base
        numbers = call_graph.site_numbers
        sites = {value: tuple(numbers[ref] for ref in names if ref in numbers) for value, names in self.names.items()}
        slots = tuple(sites.get(value, ()) for value in range(self.deviation.values))
        parameters = {PARAMETERS - value: found for value, found in sites.items() if value <= PARAMETERS}
        without = frozenset(
            number
            for number, spec in enumerate(call_graph.sites)
            if (number in base.not_required if spec.call < kept else self._without_gradient(spec))
        )
        calls = [spec.call for spec in base.call_graph.sites]
        same = {one: other for one, other in base.same.items() if calls[one] < kept}
        return Found(call_graph, slots, without, same, parameters)

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
            for place in self.chains[number]:
                if place in following and not place.leaf:
                    break
                yield self._span(place, number, users)

    def _span(self, place: Around, last: int, users: Mapping[Ref, list[int]]) -> ModuleSpan:
        """The call of a module that ended with call number ``last``."""
        first = last
        while not place.leaf and first and place in self.chains[first - 1]:
            first -= 1
        inside = range(first, last + 1)
        taken = (ref for n in inside for _, ref in self.calls[n].uses() if ref.call not in inside)
        given = (
            Ref(n, out.position) for n in inside for out in self.calls[n].outputs
            if any(user not in inside for user in users.get(Ref(n, out.position), ()))
        )  # fmt: skip
        return ModuleSpan(place.path, place.type, tuple(dict.fromkeys(taken)), tuple(given))
