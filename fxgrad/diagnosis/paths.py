"""Vanishing and exploding: what the gradient loses or gains on its way, and which node does it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median

from fxgrad.diagnosis.advice import of_chain, of_one
from fxgrad.diagnosis.check import Draft, Evidence, number
from fxgrad.diagnosis.kinds import LOSSES, NORMS, WEIGHTED
from fxgrad.diagnosis.local import is_output_unit
from fxgrad.diagnosis.view import FlowView, decades
from fxgrad.diagnosis.weights import factor, throttled
from fxgrad.schema import Finding

_CHAIN = 3  # weighted nodes in a row that make a side entrance a path of its own
_RECURRENT = 2.0  # decades more that a recurrence may lose: its parameters get their gradient from the late calls
#: What hands parts of its gradient to several values: that one of them gets little is no loss of its own.
_SHARES = frozenset(
    {"cat", "stack", "getitem", "select", "split", "chunk", "unbind", "index_select", "gather", "narrow"}
)
_NORMALISES = frozenset({"normalize", "cosine_similarity"})  # their gradient at a zero vector is that of 1/eps
_UNIT = 1.5  # decades more that a constant behind all weights may gain: the unit of what is predicted
_BOTH = 1.0  # decades less that a gradient must gain on a chain along which the values grow as well
_SHARE = 0.4  # of all decades: what one node must do to be blamed alone
_UNIFORM = 2.0  # times the median of a chain, in decades: what no operation of a uniform one exceeds
_SCORES = frozenset({"attention", "matmul", "softmax"})
_INIT = 0.5  # share of tiny weights from which on they are no throttle but the initialisation


@dataclass(frozen=True, slots=True)
class Step:
    """A node on the path and the decades by which the gradient changes through it (negative: smaller)."""

    key: str
    change: float
    throttle: bool


@dataclass(frozen=True, slots=True)
class Path:
    """The way that most of the gradient took from the loss to an entrance.

    Attributes:
        steps: from the loss on.
        first, last: node keys: where it enters the model, and where parameters take it.
        total: decades from one to the other, the changes by throttles left out.
        lowest, highest: the extremes of that on the way, at nodes with parameters.
        lowest_at, highest_at: and where they are.
    """

    steps: tuple[Step, ...]
    first: str
    last: str
    total: float
    lowest: float
    highest: float
    lowest_at: str
    highest_at: str


def paths(view: FlowView, throttle: float) -> list[Path]:
    """The paths to the first node with a trained parameter, and to others that a chain of weighted nodes leads from."""
    memo = ("paths", throttle)
    if memo not in view.memo:
        view.memo[memo] = list(_paths(view, throttle))
    found: list[Path] = view.memo[memo]
    return found


def _paths(view: FlowView, throttle: float) -> Iterator[Path]:
    trained = [node.key for node in view.flow.nodes if _takes_gradient(view, node.key)]
    entrances, seen = [], set()
    below: dict[str, bool] = {}  # whether a trained node lies before a node
    takers = set(trained)
    for node in view.flow.nodes:
        before = list(view.producers(node.key))
        below[node.key] = any(below[p] or p in takers for p in before)
        if node.key in takers and not below[node.key]:
            entrances.append(node.key)
    for number_, key in enumerate(entrances):
        way = _towards_loss(view, key)
        weighted = sum(view.kinds[k] in WEIGHTED for k in way if k not in seen)
        if number_ == 0 or weighted >= _CHAIN:
            path = _path(view, way, throttle)
            if path is not None:
                yield path
        seen.update(way)


def _takes_gradient(view: FlowView, key: str) -> bool:
    received = view.received(key)
    node = view.nodes[key]
    return bool(received) and any(r.statistics is not None for r in view.records(node))


def _towards_loss(view: FlowView, key: str) -> list[str]:
    """Node keys from ``key`` to the loss, along the use that sent the largest part."""
    way = [key]
    seen = {key}
    while True:
        best, largest = None, 0.0
        for edge in view.users[way[-1]]:
            part = view.part(edge)
            size = part.l2_norm if part is not None else view.received(edge.consumer.key)
            if view.nodes[edge.consumer.key].op == "output" or edge.consumer.key in seen:
                continue
            if size is not None and size > largest and view.received(edge.consumer.key):
                best, largest = edge.consumer.key, size
        if best is None:
            return way
        way.append(best)
        seen.add(best)


def _path(view: FlowView, way: list[str], throttle: float) -> Path | None:
    keys = way[::-1]
    levels = [view.received(key) for key in keys]
    if any(level is None or not math.isfinite(level) or level <= 0 for level in levels) or len(keys) < 2:  # noqa: PLR2004
        return None
    logs = [math.log10(level) for level in levels if level]
    tiny = {key for key in keys if throttled(view, view.nodes[key], throttle) is not None}
    weighted = [key for key in keys if view.kinds[key] in WEIGHTED]
    if len(weighted) >= _CHAIN and len(tiny.intersection(weighted)) > _INIT * len(weighted):
        tiny -= set(weighted)
    steps, level, lowest, highest = [], 0.0, (0.0, keys[0]), (0.0, keys[0])
    for index, key in enumerate(keys):
        after = logs[index + 1] if index + 1 < len(keys) else logs[index]
        change = after - logs[index]
        exempt = change < 0 and (
            key in tiny or view.kinds[key] in _SHARES or view.kinds[key] in LOSSES or _unknown(view, key, change)
        )
        steps.append(Step(key, change, exempt))
        if _takes_gradient(view, key):
            lowest, highest = min(lowest, (level, key)), max(highest, (logs[index] - logs[0], key))
        level += 0.0 if exempt else change
    return Path(tuple(steps), keys[0], keys[-1], level, lowest[0], highest[0], lowest[1], highest[1])


def _unknown(view: FlowView, key: str, change: float) -> bool:
    """Whether a large drop is at a learnable factor whose size was not measured: it may be small on purpose."""
    record = factor(view, key) if change < -1.0 else None
    return record is not None and record.requires_grad and record.value is None


def vanishing(evidence: Evidence) -> Iterable[Finding]:
    """log10 of the l2 norm at the furthest parameters over that at the outputs, throttles left out, median over steps.

    Source: the ratio of first and last gradient as in AutoTrainer (Zhang et al., ICSE 2021), taken along the path that
    most of the gradient took.  False alarms: unrolled recurrences lose up to 3.6 decades and still train.
    """
    limits = evidence.thresholds
    for path, level in _levels(evidence, "lowest"):
        recurrent = _recurrent(evidence.view, path)
        if level < -limits.vanishing - (_RECURRENT if recurrent else 0.0):
            severity = "error" if level < -limits.vanishing_error else "warning"
            if recurrent:
                severity = "warning" if level < -limits.vanishing_recurrent else "info"
            yield _finding(evidence, path, ("vanishing", severity), level)


def exploding(evidence: Evidence) -> Iterable[Finding]:
    """The same for a gain.  False alarms: normalisation of a small signal (1/sigma) gains up to 2.6 decades.

    A chain that multiplies the values as well, which normalisation keeps in bounds, is judged by both.
    """
    limits = evidence.thresholds
    view = evidence.view
    depth = limits.depth_rate * sum(kind in WEIGHTED for kind in view.kinds.values())
    for path, level in _levels(evidence, "highest"):
        grown = _grown(view, path)
        runs_away = grown is not None and grown > max(limits.exploding, depth) and level > limits.exploding - _BOTH
        if not (level > limits.exploding or runs_away):
            continue
        severity = "error" if max(level, grown or 0.0) > limits.exploding_error else "warning"
        found = _finding(evidence, path, ("exploding", severity), level)
        if found.evidence["alone"] and level <= limits.exploding:
            continue
        if not found.evidence["alone"] and level < max(limits.exploding_chain, depth) and not runs_away:
            continue  # what depth alone does: a residual stream grows a little with every block
        at = found.node
        if at is not None and is_output_unit(view, at) and level < limits.exploding + _UNIT:
            continue
        of_zero_rows = at is not None and view.kinds[at.key] in _NORMALISES
        yield replace(found, severity="info") if of_zero_rows else found


def _grown(view: FlowView, path: Path) -> float | None:
    """The decades by which the values grow along a path, root mean squares; None where they were not measured."""
    values = [site.value for key in (path.last, path.first) for site in view.sites[key][:1]]
    sizes = [value.rms for value in values if value is not None and not value.nonfinite]
    return decades(sizes[1] / sizes[0]) if len(sizes) == 2 and min(sizes) > 0 else None  # noqa: PLR2004  # both ends


def _recurrent(view: FlowView, path: Path) -> bool:
    """Whether the parameters at the end of a path take part at several places of it, as in an unrolled recurrence."""
    records = [r for r in view.records(view.nodes[path.last]) if r.statistics is not None]
    return bool(records) and all(len(view.owners.get(r.name, ())) >= _CHAIN for r in records)


def _levels(evidence: Evidence, which: str) -> Iterator[tuple[Path, float]]:
    """The paths of the latest flow with the median of their level over the recent flows."""
    by_entrance: dict[str, list[float]] = {}
    for view in evidence.recent:
        for path in paths(view, evidence.thresholds.throttle):
            by_entrance.setdefault(path.last, []).append(getattr(path, which))
    for path in paths(evidence.view, evidence.thresholds.throttle):
        yield path, median(by_entrance[path.last])


def _finding(evidence: Evidence, path: Path, what: tuple[str, str], level: float) -> Finding:
    rule, severity = what
    view = evidence.view
    sign = -1.0 if rule == "vanishing" else 1.0
    end = path.lowest_at if sign < 0 else path.highest_at
    way = list(takewhile(lambda s: s.key != end, path.steps))
    moving = [step for step in way if not step.throttle]
    step = max(moving, key=lambda s: sign * s.change)
    recurrent = _recurrent(view, path)
    # A normalisation gains what the operation before it has lost, unless that is out of all proportion.
    own = evidence.thresholds.scale_break if view.kinds[step.key] in NORMS else evidence.thresholds.own_drop
    alone = sign * step.change > max(own, _SHARE * abs(level))
    if not alone:
        step = _of_the_guilty_kind(view, moving, sign)
    rate = 10 ** (level / max(1, sum(view.kinds[s.key] in WEIGHTED for s in way)))
    verb = "falls" if sign < 0 else "grows"
    message = (
        f"gradient l2 norm {verb} by {abs(level):.1f} decades from {view.source_words(path.first)} to "
        f"{view.source_words(end)}"
    )
    numbers = {"decades": level, "own_decades": step.change, "alone": float(alone), "per_node": rate}
    if alone:
        message += f"; {number(10**step.change)}x of it at {view.source_words(step.key)}"
        step = _first_of_its_kind(view, step, sign)
        cause = of_one(view, rule, view.nodes[step.key])
    else:
        kind = view.kinds[step.key]
        alike = [one.change for one in moving if view.kinds[one.key] == kind]
        each = 10 ** (sum(alike) / len(alike))
        numbers |= {"operations": len(alike), "each": each}
        message += f": all {len(alike)} {kind} operations, about x{number(each)} each" if len(alike) > 1 else ""
        cause = of_chain(view, rule, kind, recurrent=recurrent)
    grown = _grown(view, path) if rule == "exploding" else None
    if grown is not None and grown > evidence.thresholds.exploding:
        numbers["value_decades"] = grown
        message += f"; the values grow by {grown:.1f} decades the other way"
    message += f". Likely: {cause.why}" if cause.why else ""
    numbers["nodes"] = len(path.steps)
    draft = Draft(evidence, rule, severity, message, cause.mend, numbers)  # type: ignore[arg-type]
    return draft.at(view.nodes[step.key], path=tuple(s.key for s in path.steps), affected=_hit(view, path, level))


def _first_of_its_kind(view: FlowView, worst: Step, sign: float) -> Step:
    """Of the attentions that do about as much, the first in forward order: which is the worst varies by chance."""
    kind = view.kinds[worst.key]
    for node in view.flow.nodes if kind in _SCORES else ():
        if view.kinds[node.key] != kind or not view.received(node.key):
            continue
        gain = view.gain(node.key)
        if gain is None or sign * decades(gain) > sign * worst.change / 2:  # None: what it sends was not measured
            return Step(node.key, worst.change if gain is None else decades(gain), throttle=False)
    return worst


def _of_the_guilty_kind(view: FlowView, steps: list[Step], sign: float) -> Step:
    """Of the kind of node that changes the gradient most in sum, the node that changes it most.

    Where none does much more than the others, it is the first in forward order, whatever the seed.

    A node that is called again and again, as in an unrolled recurrence, is a kind of its own.
    """
    calls = Counter(_stem(step.key) for step in steps)
    kinds = {
        s.key: _stem(s.key) if calls[_stem(s.key)] >= _CHAIN and "/" not in s.key else view.kinds[s.key] for s in steps
    }
    total: dict[str, float] = {}
    for step in steps:
        total[kinds[step.key]] = total.get(kinds[step.key], 0.0) + sign * step.change
    worst = max(total, key=lambda kind: total[kind])
    alike = [s for s in steps if kinds[s.key] == worst]
    # Rounded, so that of equal ones the same is named, whatever the scale of the loss does to the last digits.
    most = max(alike, key=lambda s: round(sign * s.change, 2))
    usual = median(sign * s.change for s in alike)
    uniform = len(alike) >= _CHAIN and sign * most.change < _UNIFORM * usual
    return min(alike, key=lambda s: view.order[s.key]) if uniform else most


def _stem(key: str) -> str:
    return key.partition("#")[0]


def _hit(view: FlowView, path: Path, level: float) -> tuple[str, ...]:
    """The parameters on the path that lie beyond half of the way, in decades."""
    names, at = [], 0.0
    for step in path.steps:
        if abs(at) >= abs(level) / 2 and at * level > 0:
            names += [r.name for r in view.records(view.nodes[step.key]) if r.statistics is not None]
        at += step.change
    return tuple(dict.fromkeys(names))


__all__ = ["Path", "Step", "decades", "exploding", "paths", "vanishing"]
