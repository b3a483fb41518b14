"""The native recorder of one model: which courses of its forward it knows, how it learns them and follows them.

The first call of a kind runs under the Python recorder with the native observer beside it, which gives every value that
the observer numbers its sites.  Later calls run under the observer alone.  It checks each operator as it happens; where
a call leaves all known courses it is still measured whole, and named by ``deviation``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxgrad.capture.captured import CallGraph
from fxgrad.capture.eager import Session
from fxgrad.capture.modules import ModuleMap
from fxgrad.courses.deviation import PARAMETERS, Deviation, Found, by_operator
from fxgrad.courses.edges import pieces_of
from fxgrad.courses.finding import Where
from fxgrad.courses.runs import Following, Learning, Prepared, input_tensors
from fxgrad.courses.values import unfit, wanted
from fxgrad.probes.edges import EdgeNotes, hook_edges
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.native import LEVELS
from fxgrad.schema import Level
from fxgrad.torch_support.private import without_torch_function

_MOST = 64  # courses that are kept
_TRIES = 3  # calls behind which one has to have gone a known way
_AGAIN = 3  # calls behind a new course that are learnt: a model may alternate
_PATIENCE = 16  # calls, of which at most half may leave the known courses


@dataclass(slots=True, eq=False)
class Course:
    """One way through the forward.

    Attributes:
        call_graph: the graph of calls, as the Python recorder wrote it.
        slots: by value of the observer, its sites.
        ranges: by call of the call graph, the operators that it ran.
        where: by operator, from where it was called.
        steps, first_values: the operators, and the number of the first value that appears in each.
        not_required, unmeasurable, same: as of the forward record under which it was learnt.
        parameters: by number of a parameter, the sites that are that very tensor.
        shown, gates: by value, what is wanted of it in the forward pass; how C++ counts its active units.
        pieces: the autograd edges of edge sites; None where edges are not measured.
        unmeasured: why an edge has none.
        sizes: of the values in the latest call.
    """

    call_graph: CallGraph
    slots: tuple[tuple[int, ...], ...]
    ranges: Sequence[tuple[int, int]]
    where: Sequence[Where | None]
    steps: Sequence[Any]
    first_values: Sequence[int]
    not_required: frozenset[int]
    unmeasurable: frozenset[int]
    same: dict[int, int]
    parameters: Mapping[int, Sequence[int]]
    pieces: Sequence[Any] | None = None
    unmeasured: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    shown: Mapping[int, int] = field(default_factory=dict)
    gates: Mapping[int, Any] = field(default_factory=dict)
    sizes: Any = None

    def share(self, sizes: Any) -> Any:
        """The sizes of a call's values; one object for all calls that have the same, since each event keeps them."""
        if self.sizes is None or not self.sizes.same_as(sizes):
            self.sizes = sizes
        return self.sizes


class Observer:
    """Runs the forward calls of one model under the native observer.

    Args:
        extension: the compiled module.
        modules: the model's paths.
        level: statistics level.
        edges: whether edge sites are measured.

    Attributes:
        extension, modules, level: as given; the level as the extension has it.
        refused: why the Python recorder has to do it for good; None as long as it hasn't.
    """

    def __init__(
        self, extension: Any, modules: ModuleMap, level: Level, *, edges: bool
    ) -> None:  # fmt: skip
        self.extension = extension
        self.modules = modules
        self.level = extension.Level(LEVELS[level])
        self._edges = edges
        self._model = extension.Model()
        self.courses: list[Course] = []
        self._kinds: set[Any] = set()
        self._structure: Any = None
        self._parameters: Any = None
        self._latest: deque[bool] = deque(maxlen=_PATIENCE)  # whether a call left the known courses
        self._relearn = 0
        self._raised: list[frozenset[int]] = []
        self.refused: str | None = None
        self.trained = b""  # by parameter, whether it requires a gradient now

    # ---- which recorder --------------------------------------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Prepared | None:
        """What is to be known of a call before it runs; None where that failed, which refuses all later calls."""
        try:
            inputs = input_tensors(args, kwargs, names)
            kind = self.kind_of(inputs)
            return Prepared(inputs, kind, self.reason_to_learn(kind))
        except Exception as error:  # noqa: BLE001  # the user's forward must go on
            self._give_up(error)
            return None

    def _give_up(self, error: Exception | str) -> None:
        """An error of ours: the Python recorder does it from here on, and the report says why."""
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.refused = f"the native observer failed: {words}".splitlines()[0]

    def reason_to_learn(self, kind: Any) -> str | None:
        """Why the next call of this kind has to run under the Python recorder; None where it need not."""
        if self.modules.structure is not self._structure:
            self._structure = self.modules.structure
            self._forget()
        if self.modules.parameters is not self._parameters:
            self._parameters = self.modules.parameters
            self._model.set_parameters([parameter for _, parameter in self._parameters])
        if kind not in self._kinds:
            return "the first call of a kind; the native observer learns its course"
        if self._relearn:
            return "a call before took a new course; the native observer learns the courses of the calls behind it"
        return None

    def _forget(self) -> None:
        self._model.clear()
        self.courses.clear()
        self._kinds.clear()
        self._latest.clear()
        self._raised.clear()
        self._relearn = 0

    def kind_of(self, tensors: Sequence[tuple[str, Tensor]]) -> Any:
        """What the course of a call is known to depend on."""
        root = self.modules.root
        inputs = tuple((name, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return inputs, root.training, self.trained, cast

    def record_of(self, forward_record: ForwardRecord) -> Any:
        """What C++ hooks write to in one forward call."""
        return self.extension.Record(forward_record, self.level)

    def forward(self, record: Any, *, learning: bool) -> Any:
        """The observer of one call."""
        return self.extension.Forward(self._model, record, learning, self._edges)

    # ---- running ---------------------------------------------------------------------------------------------

    def learn(
        self, forward_record: ForwardRecord, call: Callable[[Callable[..., Session]], Any], prepared: Prepared
    ) -> Any:  # fmt: skip
        """Run a call under the Python recorder, with the observer beside it.

        ``call`` runs it, under the session that what it is given makes.
        """
        run = Learning(self, prepared.inputs)
        try:
            result = call(run.session)
        except BaseException:
            run.leave()
            raise
        with without_torch_function():
            run.finish(result)
        self._kinds.add(prepared.kind)
        self._relearn = max(0, self._relearn - 1)
        with run.noting(), without_torch_function():
            if run.error is None:
                self._add(forward_record, run.sessions[-1], run.native, run.where)
        run.leave()
        if run.error is not None:
            self._give_up(run.error)
        return result

    def _add(self, forward_record: ForwardRecord, session: Session, forward: Any, where: list[Where | None]) -> None:
        call_graph = forward_record.graph
        if forward_record.recomputed:
            self.refused = "a checkpointed part runs without gradients and again in the backward pass"
            return
        if any(call.op == "external" and call.path in self._opaque() for call in call_graph.calls):
            self.refused = "compiled or scripted modules run in another way beside the Python recorder"
            return
        noted = [(value, site) for value, site in forward.noted if value >= 0]
        slots, parameters = _by_value(forward.noted, forward.values)
        if parameters and _has_passed(forward_record):
            self.refused = "a backward pass inside of the forward came to a parameter that a call returned"
            return
        course = Course(
            call_graph, slots, tuple(session.ranges), where, forward.steps, forward.first_values,
            frozenset(forward_record.not_required), frozenset(forward_record.unmeasurable), dict(forward_record.same),
            parameters,
        )  # fmt: skip
        number = forward.learn(len(self.courses))
        if number < len(self.courses):
            if not _named_alike(self.courses[number], course):
                self.refused = "two calls with the same operators, on the same values, went through different modules"
            return
        if forward_record.values is not None:
            self.refused = unfit(call_graph, noted, forward.first_values, session.ranges, forward_record.same)
            course.shown, course.gates = wanted(call_graph, course.slots, self.extension.Gate)
            self._model.set_gates(number, course.gates)
        self.courses.append(course)
        if self._edges:
            course.pieces, course.unmeasured = pieces_of(forward_record, forward.noted, self.extension.Piece)
        self._set_levels()
        if len(self.courses) > _MOST:
            self.refused = f"the model took more than {_MOST} courses"

    def _opaque(self) -> set[str]:
        return {place.path for place in self.modules.places.values() if place.opaque}

    def _set_levels(self) -> None:
        """Tell the observer which values of the courses get a hook, and at which level."""
        raised = [frozenset(course.call_graph.escalated) for course in self.courses]
        if raised == self._raised:
            return
        self._raised, usual = raised, int(self.level)
        self._model.set_levels({
            number: {
                value: (max(usual, LEVELS["full"]) if raised[number].intersection(sites) else usual)
                | course.shown.get(value, 0)
                for value, sites in enumerate(course.slots)
                if sites
            }
            for number, course in enumerate(self.courses)
        })  # fmt: skip

    def follow(self, forward_record: ForwardRecord, prepared: Prepared) -> Following:
        """From here on the observer alone sees what runs, until ``arrived`` or the ``leave`` of what this returns."""
        run = Following(self, forward_record)
        forward_record.slots = ()  # no Python hooks
        with run.noting():
            self._set_levels()
            run.begin(self, prepared.inputs)
        return run

    def arrived(self, run: Following, result: Any) -> None:
        """The forward returned this; an error of ours leaves the call without a record."""
        forward_record = run.forward_record
        run.finish(result)
        if run.error is None:
            with run.noting():
                self._arrived(forward_record, run)
        run.leave()
        if run.error is not None:
            forward_record.call_graph, forward_record.slots = None, ()
            self._give_up(run.error)

    def rename(self, forward_record: ForwardRecord) -> None:
        """Name a call that left the known courses by the course that it took, where that has been learnt since."""
        found = forward_record.deviation
        if found is None or forward_record.edges is not None:  # edges have their hooks by the names that they had
            return
        course = next((course for course in self.courses if found.ran(course)), None)
        named = {**found.leaves, **{slot: tuple(forward_record.sites_of(slot)) for slot, _, _ in forward_record.units}}
        if course is not None and all(_sites_at(course, value) == sites for value, sites in named.items()):
            forward_record.deviation = None
            _use(
                forward_record,
                Found(course.call_graph, course.slots, course.not_required, course.same, course.parameters),
            )
            forward_record.unmeasurable = set(course.unmeasurable)

    def _arrived(self, forward_record: ForwardRecord, run: Following) -> None:
        number = run.native.plan
        self._latest.append(number < 0)
        forward_record.computed = True
        forward_record.sizes, forward_record.written, forward_record.units = (
            run.record.shapes,
            run.record.values,
            run.record.units,
        )
        if number >= 0:
            course = self.courses[number]
            forward_record.call_graph, forward_record.slots = course.call_graph, course.slots
            forward_record.not_required, forward_record.unmeasurable = (
                set(course.not_required),
                set(course.unmeasurable),
            )
            forward_record.same, forward_record.escalated = course.same, frozenset(course.call_graph.escalated)
            parameters = course.parameters
            if course.pieces is not None and forward_record.edges is not None:
                _hook_edges(forward_record.edges, forward_record, run, course, self._by_number(parameters))
        else:
            self._relearn = _AGAIN
            base, native = self.courses[run.native.plan_nearby], run.native
            found = Deviation(
                base, native.differs_at, native.steps, run.where, native.values, forward_record.sizes, run.given
            )
            forward_record.deviation = found
            graph = by_operator(found)
            _use(forward_record, graph)
            parameters = graph.parameters
            if forward_record.edges is not None:
                _search_edges(forward_record.edges, forward_record, run, parameters, self._by_number(parameters))
            if len(self._latest) >= _TRIES and all(self._latest):
                self.refused = "no call went the way that those under the Python recorder went"
            elif sum(self._latest) > _PATIENCE // 2:
                self.refused = "the model takes a new course in most calls"
        leaves = run.bind_leaves(parameters, [parameter for _, parameter in self._parameters] if parameters else ())
        if forward_record.deviation is not None:
            forward_record.deviation.leaves.update(leaves)
        else:  # all slots are there
            forward_record.sizes = self.courses[number].share(forward_record.sizes)

    def _by_number(self, parameters: Iterable[int]) -> dict[int, Tensor]:
        """Parameters by the number that the observer gives them."""
        return {PARAMETERS - number: self._parameters[number][1] for number in parameters}


def _has_passed(forward_record: ForwardRecord) -> bool:
    """Whether a backward pass has come to the call."""
    return forward_record.task is not None or any(
        event_record.forward_record is forward_record for event_record in tuple(forward_record.sink.history)
    )


def _use(forward_record: ForwardRecord, found: Found) -> None:
    forward_record.call_graph, forward_record.slots = found.call_graph, found.slots
    forward_record.not_required, forward_record.same = set(found.not_required), found.same


def _by_value(
    noted: Sequence[tuple[int, int]], values: int
) -> tuple[tuple[tuple[int, ...], ...], dict[int, list[int]]]:
    """The sites of each value, and of each parameter that is one."""
    slots: list[list[int]] = [[] for _ in range(values)]
    parameters: dict[int, list[int]] = {}
    for value, site in noted:
        if value >= 0:
            slots[value].append(site)
        else:
            parameters.setdefault(PARAMETERS - value, []).append(site)
    return tuple(map(tuple, slots)), parameters


def _sites_at(course: Course, value: int) -> tuple[int, ...]:
    """The sites, by the observer's number of a value or parameter, of what has its names since the forward returned."""
    return course.slots[value] if value >= 0 else tuple(course.parameters.get(PARAMETERS - value, ()))


def _named_alike(one: Course, other: Course) -> bool:
    """Whether two courses with the same operators have the same names and sites."""
    stems = [[call.key_stem for call in course.call_graph.calls] for course in (one, other)]
    return stems[0] == stems[1] and one.slots == other.slots and one.parameters == other.parameters


def _hook_edges(
    notes: EdgeNotes, forward_record: ForwardRecord, run: Following, course: Course, parameters: Mapping[int, Tensor]
) -> None:
    edges = course.call_graph.fan_out
    start = len(course.call_graph.sites)
    notes.unmeasured = dict(course.unmeasured)
    raised = {number - start for number in course.call_graph.escalated if number >= start}
    for edge in run.native.hook_edges(course.pieces, len(edges), raised, parameters):
        notes.unmeasured[edge] = ("untraceable_use", "its place in the autograd graph is another than before")
    values = run.native.values
    forward_record.slots = (
        *course.slots, *(() for _ in range(values - len(course.slots))), *((start + n,) for n in range(len(edges))),
    )  # fmt: skip


def _search_edges(
    notes: EdgeNotes, forward_record: ForwardRecord, run: Following, parameters: Mapping[int, Sequence[int]],
    tensors: Mapping[int, Tensor],
) -> None:  # fmt: skip
    """In a call whose course is not known, edges are found as after one under the Python recorder."""
    for slot, place in enumerate(run.native.places()):
        for site in (forward_record.slots or ())[slot] if place is not None else ():
            notes.at[site] = place
    for number, sites in parameters.items():
        for site in sites:
            notes.note(site, tensors[PARAMETERS - number])
    hook_edges(forward_record)
