"""The graph of a forward call that left all known courses of the native observer.

What ran before the first difference is that of a known course.  Behind it each operator is a node of its own, except
inside of a leaf module: named by the module that it ran in, the operator, and the line of the user's that called it.
Where the very same course is learnt afterwards, the call is named by it instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fxgrad.capture.captured import Call, ModuleSpan, Output, Plan, Ref, SiteSpec
from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import canonical, of_a_library
from fxgrad.torch_support.private import module_called_in

if TYPE_CHECKING:
    from fxgrad.courses.known import Course

_EXTERNAL = -2  # a source that no operator made, as the observer marks it
PARAMETERS = -16  # the first parameter, as it numbers them; the others are below


class Around(NamedTuple):
    """A module that an operator ran in.  Not the module itself: one that is replaced is to go."""

    path: str
    type: str
    leaf: bool


class Where(NamedTuple):
    """From where an operator was called.

    ``path`` and ``type`` of the innermost module (of the leaf, if it is inside of one); ``call``: operators with the
    same number ran in one call of a leaf; ``source``: the line of the user's; ``chain``: all modules around it, the
    innermost first.
    """

    path: str
    type: str
    leaf: bool
    call: int
    source: str | None
    chain: tuple[Around, ...]


class Finder:
    """Finds out from the Python frames where an operator is called."""

    def __init__(self, modules: ModuleMap) -> None:
        self._modules = modules
        self._libraries: dict[CodeType, bool] = {}
        self._frame: FrameType | None = None  # of the latest leaf; held, so that no other gets its place
        self._calls = 0

    def find(self, frame: FrameType | None) -> Where:
        """Of the operator that is running; ``frame`` is the innermost one that may be the user's."""
        places: list[tuple[Place, FrameType]] = []
        source = None
        root = self._modules.root
        while frame is not None:
            called = module_called_in(frame)
            if called is root:
                break
            if called is not None:
                place = self._modules.places.get(id(called))
                if place is not None and place.module is called:
                    places.append((place, frame))
            elif source is None and not self._of_a_library(frame.f_code):
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        found = self._where(places, source)
        del places, frame
        return found

    def _where(self, places: Sequence[tuple[Place, FrameType]], source: str | None) -> Where:
        leaf = next((n for n in reversed(range(len(places))) if places[n][0].leaf), None)
        if leaf is None or places[leaf][1] is not self._frame:
            self._calls += 1
            self._frame = None if leaf is None else places[leaf][1]
        chain = tuple(Around(place.path, place.type, place.leaf) for place, _ in places[leaf or 0 :])
        if not chain:
            return Where("", type(self._modules.root).__name__, leaf=False, call=self._calls, source=source, chain=())
        return Where(chain[0].path, chain[0].type, leaf is not None, self._calls, source, chain)

    def done(self) -> None:
        """The forward has returned."""
        self._frame = None

    def _of_a_library(self, code: CodeType) -> bool:
        known = self._libraries.get(code)
        if known is None:
            known = self._libraries[code] = of_a_library(code.co_filename)
        return known


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that left all known courses.

    Attributes:
        base: the course whose beginning it shares.
        differs_at: the number of the first operator that differs.
        steps, where: the operators from there on, and from where they were called.
        values: how many values appeared.
        sizes: of them.
        leaves: by value or parameter that is a leaf, its sites: its hooks have these names.
    """

    base: Course
    differs_at: int
    steps: Sequence[Any]
    where: Sequence[Where | None]
    values: int
    sizes: Any
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

    plan: Plan
    slots: tuple[tuple[int, ...], ...]
    not_required: frozenset[int]
    same: Mapping[int, int]
    parameters: Mapping[int, Sequence[int]]


def by_operator(deviation: Deviation) -> Found:
    """The graph of a call whose course is not known."""
    made = _Rebuilt(deviation)
    kept, start = made.keep()
    base = deviation.base
    steps = [*base.steps[start : deviation.differs_at], *deviation.steps]
    where = [*base.where[start : deviation.differs_at], *deviation.where]
    made.follow(list(zip(steps[:-1], where, strict=False)))
    return made.finished(steps[-1], kept)


_NOWHERE = Where("", "", leaf=False, call=-1, source=None, chain=())
_Operator = tuple[Any, "Where | None"]


@dataclass(slots=True)
class _Rebuilt:
    """A graph in the making."""

    deviation: Deviation
    calls: list[Call] = field(default_factory=list)
    chains: list[tuple[Around, ...]] = field(default_factory=list)
    refs: dict[int, Ref] = field(default_factory=dict)  # by value, its latest name
    names: dict[int, list[Ref]] = field(default_factory=dict)  # by value, all that it is

    def keep(self) -> tuple[int, int]:
        """The calls that ended before the difference; how many, and the operator at which the others begin."""
        base, at = self.deviation.base, self.deviation.differs_at
        start = at
        for call, (begin, end) in zip(base.plan.calls, base.ranges, strict=True):
            placeholder = call.op == "placeholder"
            if not placeholder and (call.op == "output" or end > at or begin >= at):
                start = min(begin, at)
                break
            self.calls.append(call)
            place = base.where[begin] if begin < end else None
            self.chains.append(place.chain if place is not None else ())
        owned = [(PARAMETERS - number, sites) for number, sites in base.parameters.items()]
        for value, sites in [*enumerate(base.slots), *owned]:
            for site in sites:
                spec = base.plan.sites[site]
                if spec.call < len(self.calls):
                    self._name(value, Ref(spec.call, spec.output.position))
        return len(self.calls), start

    def _name(self, value: int, ref: Ref) -> None:
        if value >= 0 or value <= PARAMETERS:
            self.refs[value] = ref
            self.names.setdefault(value, []).append(ref)

    def follow(self, operators: Sequence[_Operator]) -> None:
        """The calls behind the difference: one for each call of a leaf module, one for each other operator."""

        def group(operator: _Operator) -> Any:
            where = operator[1]
            return where.call if where is not None and where.leaf else object()

        for _, found in itertools.groupby(operators, group):
            run = list(found)
            self._externals(run)
            if any(step.outputs for step, _ in run):
                self._call([step for step, _ in run], run[0][1] or _NOWHERE)

    def _externals(self, operators: Sequence[_Operator]) -> None:
        """Values that no operator made get a node when they are first used."""
        for step, where in operators:
            for source, value in zip(step.sources, step.taken, strict=True):
                if source == _EXTERNAL:
                    place = where or _NOWHERE
                    output = self._output("", value, torch.float32, requires_grad=True)
                    self._append(place, "external", "external", f"{place.path}/external", (), (output,), step.grad_mode)
                    self._name(value, Ref(len(self.calls) - 1, ""))

    def _call(self, steps: Sequence[Any], where: Where) -> None:
        last = next(step for step in reversed(steps) if step.outputs)
        inner = {value for step in steps for value in step.given}
        taken = dict.fromkeys(v for step in steps for v in step.taken if v not in inner and v in self.refs)
        refs = tuple(self.refs[value] for value in taken)
        several = len(last.outputs) > 1
        positions = [f"[{n}]" if several else "" for n in range(len(last.outputs))]
        outputs = tuple(
            self._output(position, value, dtype, requires_grad=bool(code % 2))
            for position, value, dtype, code in zip(positions, last.given, last.dtypes(), last.outputs, strict=True)
        )
        word = canonical(last.name.rpartition("::")[2])
        if where.leaf:
            self._append(where, "call_module", where.path.rpartition(".")[2], where.path, refs, outputs, last.grad_mode)
        else:
            self._append(where, "call_function", word, f"{where.path}/{word}", refs, outputs, last.grad_mode)
        for position, value in zip(positions, last.given, strict=True):
            self._name(value, Ref(len(self.calls) - 1, position))

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
        self._externals([(outputs, None)])
        refs = tuple(self.refs[value] for value in outputs.taken if value in self.refs)
        args: Any = refs if len(refs) == 1 else (refs,)
        self.calls.append(replace(base.plan.calls[-1], refs=refs, args=args))
        self.chains.append(())
        inputs = tuple(Ref(n, "") for n, call in enumerate(self.calls) if call.op == "placeholder")
        whole = [span for span in base.plan.spans if span.outputs and all(ref.call < kept for ref in span.outputs)]
        root = ModuleSpan("", base.plan.spans[-1].type, inputs, refs)
        lost = {ref for ref in base.plan.lost if ref.call < kept}
        spans = [*whole, *self._spans(kept), root]
        plan = Plan(self.calls, spans, lost, hidden=base.plan.hidden, asked=base.plan.asked)
        return self._found(plan, kept)

    def _found(self, plan: Plan, kept: int) -> Found:
        base = self.deviation.base
        numbers = plan.site_numbers
        sites = {value: tuple(numbers[ref] for ref in names if ref in numbers) for value, names in self.names.items()}
        slots = tuple(sites.get(value, ()) for value in range(self.deviation.values))
        parameters = {PARAMETERS - value: found for value, found in sites.items() if value <= PARAMETERS}
        without = frozenset(
            number
            for number, spec in enumerate(plan.sites)
            if (number in base.not_required if spec.call < kept else self._without_gradient(spec))
        )
        calls = [spec.call for spec in base.plan.sites]
        same = {one: other for one, other in base.same.items() if calls[one] < kept}
        return Found(plan, slots, without, same, parameters)

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
