"""The same training steps under both recorders, and everything in which their flows differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import NoFlowError
from fxgrad.schema import GradientFlow, Node, Statistics
from tests.runs import RunResult, plain_run, run_differences

RELATIVE = 1e-3  # plain torch adds up millions of float32 squares in float32


@dataclasses.dataclass
class Watched:
    """What the steps of one watched model left behind."""

    runs: list[RunResult]
    flows: list[GradientFlow | None]

    @property
    def recorders(self) -> list[str]:
        """Which recorder observed each step."""
        return [flow.capture.recorder if flow is not None else "none" for flow in self.flows]

    def word(self, step: int) -> str:
        """Which recorder, and whether the call took a course never seen."""
        return self.recorders[step] + ", new course" * self.new(step)

    def new(self, step: int) -> bool:
        """Whether the call left all courses that were known then."""
        return self.reasons[step].startswith("left the known courses")

    @property
    def reasons(self) -> list[str]:
        """Why that one."""
        return [flow.capture.reason if flow is not None else "" for flow in self.flows]


def watched(
    model: nn.Module, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], loss: Callable[[Any], Tensor],
    *, native: bool, **options: Any,
) -> Watched:  # fmt: skip
    """One step for each batch."""
    found = Watched([], [])
    with fxgrad.watch(model, native=native, **options) as watch:
        for step, (args, kwargs) in enumerate(batches):
            found.runs.append(plain_run(model, args, kwargs, loss, seed=step))
            try:
                found.flows.append(watch.flow())
            except NoFlowError:
                found.flows.append(None)
    return found


def differences(
    make: Callable[[], nn.Module],
    batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], loss: Callable[[Any], Tensor],
    **options: Any,
) -> tuple[list[str], Watched]:  # fmt: skip
    """All that differs between the recorders, in words, and what the native one saw."""
    want = watched(make(), batches, loss, native=False, **options)
    got = watched(make(), batches, loss, native=True, **options)
    found: list[str] = []
    for step, (mine, theirs) in enumerate(zip(got.runs, want.runs, strict=True)):
        found += [f"step {step}: {words}" for words in run_differences(mine, theirs)]
    for step, (seen, known) in enumerate(zip(got.flows, want.flows, strict=True)):
        if seen is None or known is None:
            found += [f"step {step}: a flow is missing"] if seen is not known else []
            continue
        behind = any(map(got.new, range(step)))  # what ``norm`` cannot tell is known a step later
        words = new_course(seen, known) if got.new(step) else flow_differences(seen, known, levels=not behind)
        found += [f"step {step} ({got.word(step)}): {one}" for one in words]
    return found, got


def flow_differences(got: GradientFlow, want: GradientFlow, *, levels: bool = True) -> Iterator[str]:
    """In which facts two flows of the same step differ; ``levels``: those of the statistics too."""
    mine, theirs = [site.id for site in got.sites], [site.id for site in want.sites]
    if mine != theirs:
        place = next((n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), -1)
        yield f"site ids from {place} on: {mine[place:][:3]} instead of {theirs[place:][:3]}"
        return
    for one, other in zip(got.sites, want.sites, strict=True):
        for name in ("node", "output_position", "shape", "dtype", "device", "derived_from"):
            if name == "shape" and one.statistics is None:
                continue  # what nothing uses keeps the shape of the call that was learnt
            mine_, theirs_ = (_without_constants(getattr(each, name)) for each in (one, other))
            if mine_ != theirs_:
                yield f"{one.id}: {name} {getattr(one, name)} instead of {getattr(other, name)}"
        yield from statistics_differences(one.id, one.statistics, other.statistics, levels=levels)
    for record, known in zip(got.parameters, want.parameters, strict=True):
        if dataclasses.replace(record, statistics=None) != dataclasses.replace(known, statistics=None):
            yield f"parameter {record.name}: {record.reason} instead of {known.reason}"
        yield from statistics_differences(
            f"parameter {record.name}", record.statistics, known.statistics, levels=levels
        )
    spots, others = set(map(_spot, got.blind_spots)), set(map(_spot, want.blind_spots))
    if spots != others:
        yield f"blind spots: {sorted(spots - others, key=str)} instead of {sorted(others - spots, key=str)}"
    if got.calls != want.calls:
        pairs = [pair for pair in zip(got.calls, want.calls, strict=False) if pair[0] != pair[1]]
        yield f"module calls: {len(got.calls)} and {len(want.calls)}, {pairs[:1]}"
    yield from _edges(got, want, levels=levels)


def _without_constants(fact: Any) -> Any:
    """A node's constants are those of the call from which its course was learnt."""
    return dataclasses.replace(fact, constants=()) if isinstance(fact, Node) else fact


def _spot(spot: Any) -> tuple[Any, ...]:
    return spot.id, spot.reason, spot.detail, spot.cut


def _edges(got: GradientFlow, want: GradientFlow, *, levels: bool) -> Iterator[str]:
    mine = [(edge.producer, edge.output_position, edge.consumer) for edge in got.edges]
    if mine != [(edge.producer, edge.output_position, edge.consumer) for edge in want.edges]:
        yield f"edges: {len(got.edges)} and {len(want.edges)}"
        return
    for name, one, other in zip(mine, got.edges, want.edges, strict=True):
        yield from statistics_differences(f"edge {name}", one.statistics, other.statistics, levels=levels)


def statistics_differences(
    name: str, got: Statistics | None, want: Statistics | None, *, levels: bool = True
) -> Iterator[str]:
    """In which numbers the statistics of one thing differ."""
    if got is None or want is None:
        if got is not want:
            yield f"{name}: {'not ' if got is None else ''}measured"
        return
    if not levels and got.level != want.level:
        if not _close(got.l2_norm, want.l2_norm):
            yield f"{name}: l2_norm {got.l2_norm} instead of {want.l2_norm}"
        return
    for entry in dataclasses.fields(want):
        mine, theirs = getattr(got, entry.name), getattr(want, entry.name)
        if entry.name == "sum" and want.abs_sum is not None and got.sum is not None and want.sum is not None:
            known = abs(got.sum - want.sum) <= RELATIVE * want.abs_sum  # what cancels leaves rounding
        else:
            known = _close(mine, theirs)
        if not known:
            yield f"{name}: {entry.name} {mine} instead of {theirs}"


def _close(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=RELATIVE) or (math.isnan(mine) and math.isnan(theirs))
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)) and len(mine) == len(theirs):
        return all(_close(one, other) for one, other in zip(mine, theirs, strict=True))
    return bool(mine == theirs)


def repeated(
    args: tuple[Any, ...], kwargs: dict[str, Any], steps: int = 3
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The same batch for so many steps."""
    return [(args, kwargs)] * steps


def acted(
    make: Callable[[], nn.Module], act: Callable[[nn.Module, int], Any], steps: int = 5, **options: Any
) -> tuple[list[str], Watched]:
    """As ``differences``, where ``act(model, step)`` does a step; what it returns is compared as well."""
    seen = {}
    for native in (False, True):
        torch.manual_seed(0)
        model, found, results = make(), Watched([], []), []
        with fxgrad.watch(model, native=native, **options) as watch:
            for step in range(steps):
                torch.manual_seed(step)
                results.append(act(model, step))
                found.flows.append(watch.flow())
        seen[native] = found, results
    (want, plain), (got, told) = seen[False], seen[True]
    wrong = [] if all(map(_equal, told, plain)) else [f"the results differ: {told} instead of {plain}"]
    for step, (one, other) in enumerate(zip(got.flows, want.flows, strict=True)):
        assert one is not None
        assert other is not None
        wrong += [
            f"step {step} ({got.word(step)}): {words}"
            for words in (new_course if got.new(step) else flow_differences)(one, other)
        ]
    return wrong, got


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def new_course(got: GradientFlow, want: GradientFlow) -> Iterator[str]:
    """In which facts a call on a course never seen is wrong: it is named by its operators, and everything has a name.

    What its leaf modules returned, and its parameters, are those of the Python recorder; an operator is a node.
    """
    known = {site.id: site for site in want.sites if site.node.op == "call_module" and site.measured}
    for site in got.sites:
        if site.id in known:
            yield from statistics_differences(site.id, site.statistics, known[site.id].statistics)
    seen = {site.id for site in got.sites}
    quiet = {site.id for site in known.values() if site.derived_from is not None}  # they ran no operator
    for name in sorted(known.keys() - seen - quiet):
        yield f"no site {name}"
    for record, other in zip(got.parameters, want.parameters, strict=True):
        yield from statistics_differences(f"parameter {record.name}", record.statistics, other.statistics)
