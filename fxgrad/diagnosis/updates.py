"""What steps do to the parameters: too much, too little, lost to rounding, eaten by the decay, swallowed by epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from fxgrad.diagnosis.advice import of_step
from fxgrad.diagnosis.check import Draft, Evidence, LackingError, number
from fxgrad.diagnosis.spoilt import made_nonfinite
from fxgrad.diagnosis.view import FlowView, total_norm
from fxgrad.diagnosis.weights import scale
from fxgrad.schema import Finding, ParameterRecord, Severity, Update

_USUAL = 20  # steps over which the size of updates is judged
_FELL = 0.1  # of its first norm: below it a small gradient is a fit, no fault
_RUINOUS = 10.0  # times its own norm by which no matrix is ever meant to change
_CRAWL = 1e-6  # times its own norm below which a step moves no matrix
_SLOW = 1e-5  # learning rate below which that is because of it
_SETTLED = 0.5  # times the gradient's norm before a step below which what followed went well
_HARM = 4.0  # times the gradient's norm before a step from which on the step has done harm


def matrix(record: ParameterRecord) -> bool:
    """Whether a parameter is one whose size steps are compared with."""
    return len(record.shape) > 1


def distinct(views: Sequence[FlowView]) -> list[FlowView]:
    """The last flow of each step: several backward passes may lead to one."""
    steps = {view.flow.optimizer.step if view.flow.optimizer is not None else n: view for n, view in enumerate(views)}
    return list(steps.values())


def _stepped(evidence: Evidence) -> list[FlowView]:
    """The flows that know of updates, one for each step.

    Raises:
        LackingError: none does.
    """
    told = [v for v in evidence.views if any(r.update is not None for r in v.flow.parameters)]
    if not told and evidence.view.flow.optimizer is None:
        message = "no optimizer was given to watch (optimizer=)"
        raise LackingError(message, give=could_give(evidence))
    return distinct(told)


# ---- too much, too little ------------------------------------------------------------------------------------------


def update_size(evidence: Evidence) -> Iterator[Finding]:
    """l2 norm of a step's change over that of the parameter; matrices only, weights that are small on purpose left out.

    Without an optimizer, what the norms of a parameter in two forward calls differ by is a lower bound of its change.
    An error only where a large step came again, did harm, or was beyond all measure: a small matrix may well change by
    its own norm in the first step of a run that learns.

    Source: update ratio of about 1e-3 (Karpathy); SageMaker Debugger's WeightUpdateRatio.
    """
    told = [v for v in evidence.views if any(r.update is not None for r in v.flow.parameters)]
    if not told and (len(evidence.views) < 2 or not evidence.view.flow.event.values):  # noqa: PLR2004  # before and after
        message = "no optimizer was given to watch (optimizer=), or it has not stepped yet"
        raise LackingError(message, give=could_give(evidence))
    large = _large_steps(evidence)
    if large:
        yield _large(evidence, large)
    else:
        views = distinct(told)
        yield from _crawling(evidence, views) or _unusual(evidence, views)


def _large_steps(evidence: Evidence) -> list[tuple[int, dict[str, float]]]:
    """Where large steps were: the number of the flow before each, and by how much it changed what."""
    limits = evidence.thresholds
    found: dict[int | None, tuple[int, dict[str, float]]] = {}
    for at, view in enumerate(evidence.views):
        after = evidence.views[at + 1] if at + 1 < len(evidence.views) else None
        ratios = {r.name: ratio(r, limits.throttle) or _least(r, after, limits.throttle) for r in view.flow.parameters}
        large = {name: size for name, size in ratios.items() if size is not None and size > limits.update_large}
        if large:
            step = view.flow.optimizer.step if view.flow.optimizer is not None else None
            found.setdefault(-at - 1 if step is None else step, (at, large))
    return list(found.values())


def first_ruin(evidence: Evidence) -> int | None:
    """Number of the flow in front of the first step that was far too large, or that spoilt the weights."""
    steps = _large_steps(evidence)
    large = [steps[0][0]] if steps and _is_harm(evidence, steps) else []
    spoilt = [at for at, view in enumerate(evidence.views) if any(map(made_nonfinite, view.flow.parameters))]
    return min([*large, *spoilt[:1]], default=None)


def ratio(record: ParameterRecord, throttle: float) -> float | None:
    """A matrix's change in a step over its norm; None where it isn't judged."""
    update = record.update
    if update is None or not matrix(record) or not 0 < update.weight_norm < math.inf or math.isnan(update.l2_norm):
        return None
    size = scale(record)
    if size is None:
        size = update.weight_norm / math.sqrt(record.shape[0])
    return update.l2_norm / update.weight_norm if size >= throttle else None


def could_give(evidence: Evidence) -> str | None:
    """An optimizer can be given to the watch of a series, and not to a single pass."""
    return "optimizer=" if len(evidence.views) > 1 and evidence.view.flow.optimizer is None else None


def _least(record: ParameterRecord, after: FlowView | None, throttle: float) -> float | None:
    """What a parameter changed by at least until the next forward, over its norm."""
    later = None if after is None else after.parameters.get(record.name)
    if later is None or record.value is None or later.value is None or not matrix(record) or record.value.nonfinite:
        return None
    norm, size = record.value.l2_norm, scale(record)
    if size is None or size < throttle or norm <= 0:
        return None
    if later.value.nonfinite:
        return None  # whatever made it so is told by ``nonfinite``
    return abs(later.value.l2_norm - norm) / norm


def _large(evidence: Evidence, steps: list[tuple[int, dict[str, float]]]) -> Finding:
    at, large = steps[0]
    view = evidence.views[at]
    name = max(large, key=lambda n: large[n])
    update = view.parameters[name].update
    numbers = {"ratio": large[name], "parameters": float(len(large)), "steps": float(len(steps))}
    words = (
        f"by {number(large[name])} times its norm"
        if update is not None
        else f"by at least {number(large[name])} times its norm"
    )
    if update is not None and update.learning_rate is not None:
        numbers["learning_rate"] = update.learning_rate
        words += f" at a learning rate of {number(update.learning_rate)}"
    bad = _is_harm(evidence, steps)
    cause = of_step(view, view.parameters[name])
    draft = Draft(
        evidence, "update_size", "error" if bad else "info",
        f"the step behind backward {view.flow.event.backward} changed {name} {words} (usual: 1e-3), "
        f"{len(large)} {'matrices' if len(large) > 1 else 'matrix'} by more than the norm"
        + (f"; so did {len(steps) - 1} more" if len(steps) > 1 else "")
        + (f". Likely: {cause.why}" if cause.why else ""),
        cause.mend if bad
        else "nothing, where the loss falls: it was one step, and what follows looks as before",
        numbers,
    )  # fmt: skip
    return draft.at(None, view=view, parameter=name, affected=tuple(large), confidence="exact")


def _is_harm(evidence: Evidence, steps: list[tuple[int, dict[str, float]]]) -> bool:
    """Whether large steps are more than one that a run which learns may well take."""
    at, large = steps[0]
    again = len(steps) > 1 and not _settled(evidence, at)
    return again or max(large.values()) > _RUINOUS or _harmed(evidence, at)


def _settled(evidence: Evidence, at: int) -> bool:
    """Whether the gradient has fallen since a step, as where LBFGS goes a long way in a few."""
    before, now = total_norm(evidence.views[at]), total_norm(evidence.view)
    return before is not None and now is not None and now < _SETTLED * before


def _harmed(evidence: Evidence, at: int) -> bool:
    """Whether behind a step the gradient is gone or non-finite, or much larger for most of the time."""
    before = total_norm(evidence.views[at])
    if before is None:
        return False
    later = [total_norm(view) for view in evidence.views[at + 1 :] if view.flow.parameters]
    known = [norm for norm in later if norm is not None]
    return len(known) < len(later) or (bool(known) and median(known) > _HARM * before)


def _crawling(evidence: Evidence, views: Sequence[FlowView]) -> list[Finding]:
    """Steps that move no matrix, at a learning rate that was as tiny all the time, while there is much to learn."""
    recent = views[-evidence.thresholds.steps :]
    updates = [(r, r.update) for view in views for r in view.flow.parameters if r.update is not None]
    rates = {(r.name, u.learning_rate) for r, u in updates}
    known = [size for view in recent for r in view.flow.parameters
             if (size := ratio(r, evidence.thresholds.throttle)) is not None]  # fmt: skip
    fastest = max((rate for _, rate in rates if rate is not None), default=0.0)
    changing = len(rates) > len({name for name, _ in rates})
    if len(recent) < evidence.thresholds.steps or not known or changing or not 0 < fastest < _SLOW:
        return []
    first, now = total_norm(views[0]), total_norm(views[-1])
    if not 0 < max(known) < _CRAWL or first is None or now is None or now < _FELL * first:
        return []
    draft = Draft(
        evidence, "update_size", "warning",
        f"steps change no matrix by more than {number(max(known))} times its norm, at a learning rate of "
        f"{number(fastest)}: it takes {number(1 / max(known))} of them to move one by its own size",
        "raise the learning rate (usual: 1e-4 to 1e-2 with Adam, 1e-2 to 1 with SGD)",
        {"ratio": max(known), "learning_rate": fastest, "steps": len(views)},
    )  # fmt: skip
    return [draft.at(None, affected=tuple(dict.fromkeys(r.name for r, _ in updates)))]


def _unusual(evidence: Evidence, views: list[FlowView]) -> Iterator[Finding]:
    limits = evidence.thresholds
    if len(views) < _USUAL:
        return
    ratios: dict[str, list[float]] = {}
    for view in views[-_USUAL:]:
        for record in view.flow.parameters:
            size = ratio(record, limits.throttle)
            if size is not None and record.statistics is not None and not record.statistics.all_zero:
                ratios.setdefault(record.name, []).append(size)
    middle = {name: median(sizes) for name, sizes in ratios.items()}
    odd = {n: size for n, size in middle.items() if not limits.update_low <= size <= limits.update_high}
    if odd:
        worst = max(odd, key=lambda n: abs(math.log10(max(odd[n], 1e-30)) + 3))
        draft = Draft(
            evidence, "update_size", "info",
            f"steps change {worst} by {number(odd[worst])} times its norm (median of {_USUAL} steps; usual: 1e-3)",
            "check the learning rate of its group", {"ratio": odd[worst], "parameters": len(odd)},
        )  # fmt: skip
        yield draft.at(None, parameter=worst, affected=tuple(odd))


# ---- lost to rounding ----------------------------------------------------------------------------------------------


def update_lost(evidence: Evidence) -> Iterator[Finding]:
    """Share of a parameter's entries with a gradient that a step in float16 or bfloat16 leaves as they were.

    A change below half of the distance to the next number of the dtype rounds to nothing.
    """
    recent = _stepped(evidence)[-evidence.thresholds.steps :]
    shares: dict[str, list[float]] = {}
    for view in recent:
        for record in view.flow.parameters:
            update = record.update
            if update is not None and update.lost is not None and update.learning_rate != 0:
                shares.setdefault(record.name, []).append(update.lost)
    limits = evidence.thresholds
    lost = {name: share for name, found in shares.items() if (share := median(found)) > limits.update_lost}
    if lost:
        whole = len(recent) >= limits.steps and len(lost) > len(shares) / 2 and not _rising(recent)
        yield _lost(evidence, recent[-1], lost, "warning" if whole else "info")


def _rising(views: Sequence[FlowView]) -> bool:
    """Whether the learning rate rises from step to step: what is lost now may not be lost later."""
    rates = [max((r.update.learning_rate or 0.0 for r in v.flow.parameters if r.update), default=0.0) for v in views]
    return any(later > earlier for earlier, later in pairwise(rates))


def _lost(evidence: Evidence, view: FlowView, lost: dict[str, float], severity: Severity) -> Finding:
    name = max(lost, key=lambda n: lost[n])
    dtype = view.parameters[name].dtype
    draft = Draft(
        evidence, "update_lost", severity,
        f"{lost[name]:.0%} of the entries of {name} with a gradient stay as they are in a step: the change is below "
        f"half of the distance to the next number in {dtype}; so in {len(lost)} parameters",
        "keep the parameters in float32 (torch.autocast for the compute), or use an optimizer with float32 master "
        "weights or stochastic rounding",
        {"share": lost[name], "parameters": len(lost)},
    )  # fmt: skip
    return draft.at(None, parameter=name, affected=tuple(lost))


# ---- eaten by the decay --------------------------------------------------------------------------------------------


def weight_decay(evidence: Evidence) -> Iterator[Finding]:
    """Steps that take a good part of most matrices away, along the matrix itself: the update is the decay."""
    eaten = [(view, found) for view in _stepped(evidence) if (found := _eaten(evidence, view))]
    if len(eaten) < 2:  # noqa: PLR2004  # once may be chance
        return
    view, found = eaten[0]
    record, update = max(found, key=lambda item: item[1].l2_norm / item[1].weight_norm)
    share = update.l2_norm / update.weight_norm
    product = (update.learning_rate or 0.0) * (update.weight_decay or 0.0)
    draft = Draft(
        evidence, "weight_decay", "error",
        f"a step takes {share:.0%} of {record.name} away, and it is the weight decay that does: learning rate "
        f"{number(update.learning_rate or 0.0)} times weight_decay {number(update.weight_decay or 0.0)} is "
        f"{number(product)} (usual: 1e-6 to 1e-4); so in {len(found)} matrices and {len(eaten)} steps",
        "lower weight_decay (0.01 to 0.1 with AdamW, 1e-4 with SGD)",
        {"share": share, "product": product, "parameters": len(found), "steps": len(eaten)},
    )  # fmt: skip
    affected = tuple(r.name for r, _ in found)
    yield draft.at(None, view=view, parameter=record.name, affected=affected, confidence="several steps")


def _eaten(evidence: Evidence, view: FlowView) -> list[tuple[ParameterRecord, Update]]:
    """The matrices that a step did little with but shrink, where those are most of them."""
    limits = evidence.thresholds
    known = [(r, r.update) for r in view.flow.parameters if matrix(r) and r.update is not None]
    eaten = [
        (r, u) for r, u in known
        if u.shrink is not None and u.weight_decay and u.shrink > limits.shrink
        and u.l2_norm > limits.decay * u.weight_norm
    ]  # fmt: skip
    return eaten if len(eaten) > len(known) / 2 else []


# ---- swallowed by epsilon ------------------------------------------------------------------------------------------


def optimizer_epsilon(evidence: Evidence) -> Iterator[Finding]:
    """Root mean square of the unscaled gradient below ``epsilon`` times the optimizer's eps, for most matrices.

    Not where the gradient has fallen to a tenth of what the first flow had: a fit that has converged.
    """
    view = evidence.view
    known = [
        r for r in view.flow.parameters if r.update is not None and r.update.epsilon and matrix(r) and r.statistics
    ]
    if not known:
        message = "no optimizer with an epsilon was given to watch (optimizer=), or it has not stepped yet"
        raise LackingError(message, give=could_give(evidence))
    loss_scale = view.flow.event.loss_scale or 1.0
    small = [r for r in known if _swallowed(r, loss_scale, evidence.thresholds.epsilon)]
    first, now = total_norm(evidence.views[0]), total_norm(view)
    converged = first is not None and now is not None and now < _FELL * first
    # Branches that begin small (LayerScale) have such gradients; of a loss that is too small the head has one as well.
    order = {r.name: max(map(view.order.__getitem__, view.owners.get(r.name, [])), default=-1) for r in known}
    last = max(known, key=lambda r: order[r.name])
    if len(small) > evidence.thresholds.epsilon_share * len(known) and not converged:
        worst = min(small, key=lambda r: r.rms or 0.0)
        epsilon = (worst.update.epsilon if worst.update is not None else None) or 0.0
        draft = Draft(
            evidence, "optimizer_epsilon", "warning" if last in small else "info",
            f"the gradient of {worst.name} has rms {number((worst.rms or 0.0) / loss_scale)}, the optimizer's eps is "
            f"{number(epsilon)}: steps shrink, for {len(small)} of {len(known)} matrices",
            "lower eps (1e-12 to 1e-15), or undo the factor that makes the loss so small",
            {"rms": (worst.rms or 0.0) / loss_scale, "epsilon": epsilon, "parameters": len(small)},
        )  # fmt: skip
        yield draft.at(None, parameter=worst.name, affected=tuple(r.name for r in small))


def _swallowed(record: ParameterRecord, loss_scale: float, times: float) -> bool:
    epsilon = record.update.epsilon if record.update is not None else None
    rms = (record.rms or 0.0) / loss_scale
    return epsilon is not None and 0 < rms < times * epsilon
