"""What the optimizer never did: parameters that it does not have, steps that move nothing, gradients never cleared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed, number
from fxgrad.diagnosis.updates import could_give
from fxgrad.diagnosis.view import FlowView, total_norm
from fxgrad.schema import Finding, OptimizerFacts, ParameterRecord, StepFacts, Update

_LONG = 20  # backward passes without a step that may still be one accumulation
_LEFT = 1e-3  # share of the gradient below which clipping has left next to nothing
_CLIPPED = 1e-2  # norm that no clipping is set to on purpose: what is usual lies between 0.1 and 10
_OVERFLOWS = 1e18  # l2 norm from which on squares, or their sum, may be infinite in float32
_STILL = 8  # steps in a row without any change that no schedule is meant to end with
_SPENT = 1e-3  # of the largest learning rate: below it a schedule has come to its end
_FELL = 0.3  # of its first norm: below it the gradient has fallen, and what is left may well be a fit
_SAME = 1e-3  # relative difference of two norms of the same gradients
_FAR = 0.03  # of a step that moves every entry by the learning rate
_SWALLOWED = 10.0  # times epsilon above which a gradient's root mean square was of use before it was clipped


def need_optimizer(evidence: Evidence) -> OptimizerFacts:
    """The optimizer of the latest flow.

    Raises:
        LackingError: none was given.
    """
    facts = evidence.view.flow.optimizer
    if facts is None:
        message = "no optimizer was given to watch (optimizer=)"
        raise LackingError(message, give=could_give(evidence))
    return facts


def taken(evidence: Evidence) -> list[tuple[FlowView, StepFacts]]:
    """The steps that were taken, oldest first, each with the last flow that it used."""
    found: dict[tuple[int, int], tuple[FlowView, StepFacts]] = {}
    for view in evidence.views:
        for step in view.flow.optimizer.steps if view.flow.optimizer is not None else ():
            if step.number is not None:
                found[step.place, step.number] = view, step
    return list(found.values())


def _got(view: FlowView) -> dict[str, float]:
    """By name of the parameters that got a gradient other than zero: its l2 norm, the loss scale divided out."""
    scale = view.flow.event.loss_scale or 1.0
    norms = {r.name: r.statistics.l2_norm / scale for r in view.flow.parameters if r.statistics is not None}
    return {name: norm for name, norm in norms.items() if norm > 0}


# ---- parameters that no optimizer has ------------------------------------------------------------------------------


def optimizer_misses(evidence: Evidence) -> Iterator[Finding]:
    """Trained parameters that got a gradient, are in no group of any optimizer, and that nothing else changes.

    Exact, once there are ``steps`` flows: until then another optimizer may still come to it.
    """
    facts = need_optimizer(evidence)
    if not evidence.several or not taken(evidence):
        return
    moved = set(facts.moved) | _changed(evidence)
    got: set[str] = set().union(*(_got(view) for view in evidence.recent))
    missed = tuple(name for name in facts.missing if name in got and name not in moved)
    if not missed:
        return
    trained = [r.name for r in evidence.view.flow.parameters if r.requires_grad and r.name in got]
    everything = set(trained) <= set(missed)
    whose = "none of the model's parameters is" if everything else f"{listed(missed)} {_are(missed)}"
    mend = (
        "build the optimizer from the parameters of the model that is trained, after it was copied, moved or wrapped"
        if everything
        else "build the optimizer after the last change of the model, or call optimizer.add_param_group(); "
        "where they are not to be trained, requires_grad_(False) says so and saves their gradients"
    )
    draft = Draft(
        evidence, "optimizer_misses", "error" if everything else "warning",
        f"{whose} in any group of {facts.type}: {len(missed)} of {len(trained)} parameters get gradients and are never "
        "stepped",
        mend, {"parameters": len(missed), "of": len(trained)},
    )  # fmt: skip
    yield draft.at(None, parameter=missed[0], affected=missed, confidence="exact")


def _are(names: Sequence[str]) -> str:
    return "is not" if len(names) == 1 else "are not"


def _changed(evidence: Evidence) -> set[str]:
    """The parameters whose values differ between flows, where they were measured."""
    first: dict[str, float] = {}
    changed = set()
    for view in evidence.views:
        for record in view.flow.parameters:
            if record.value is not None and first.setdefault(record.name, record.value.l2_norm) != record.value.l2_norm:
                changed.add(record.name)
    return changed


# ---- steps that move nothing ---------------------------------------------------------------------------------------


def optimizer_idle(evidence: Evidence) -> Iterator[Finding]:
    """No step moves anything: none is taken, all are skipped, the rate is 0, or there is nothing in ``.grad``."""
    facts = need_optimizer(evidence)
    steps = taken(evidence)
    if not steps:
        yield from _never(evidence, facts)
        return
    for reason in (_without_rate(evidence, steps), _emptied(evidence, facts, steps), _clipped(evidence, steps)):
        found = list(reason)
        if found:
            yield from found
            return
    yield from list(_rounded(evidence, steps)) or _decayed(evidence, steps)


def _never(evidence: Evidence, facts: OptimizerFacts) -> Iterator[Finding]:
    """No step at all."""
    limits, events = evidence.thresholds, len(evidence.views)
    if facts.asked:
        if facts.skipped >= facts.asked >= limits.idle:
            scale = evidence.view.flow.event.loss_scale
            draft = Draft(
                evidence, "optimizer_idle", "error",
                f"GradScaler skipped {facts.skipped} of {facts.asked} steps, all there were: the gradients were Inf or "
                "NaN each time, now at a loss scale of " + number(scale or 0.0),
                "begin with a smaller scale (GradScaler(init_scale=2.0**16)); where it fell that far already, find "
                "what is non-finite without any scaling",
                {"skipped": facts.skipped, "asked": facts.asked},
            )  # fmt: skip
            yield draft.at(None, confidence="exact")
        return
    cleared = [view.flow.event.accumulating is False for view in evidence.views[1:]]
    if _changed(evidence) or all(total_norm(view) is None for view in evidence.views):
        return  # another optimizer does it than the one that was given; or no gradient was fit for a step
    if evidence.several and all(cleared):
        draft = Draft(
            evidence, "optimizer_idle", "error",
            f"{facts.type} was not stepped in {events} backward passes, and their gradients were thrown away",
            "call optimizer.step() behind loss.backward(); of several optimizers, give the one that steps",
            {"backwards": events},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")
    elif events >= _LONG:
        draft = Draft(
            evidence, "optimizer_idle", "warning" if events >= limits.starved_steps else "info",
            f"{facts.type} was not stepped in {events} backward passes; their gradients add up",
            "nothing, where that many are accumulated; otherwise call optimizer.step()", {"backwards": events},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")


def _without_rate(evidence: Evidence, steps: list[tuple[FlowView, StepFacts]]) -> Iterator[Finding]:
    """A learning rate of 0 in every step; in some groups only, or no more than of late, it may be meant."""
    several = evidence.thresholds.steps
    zero = [all(rate == 0 for rate in step.learning_rates) and bool(step.learning_rates) for _, step in steps]
    groups = {i for _, step in steps for i, rate in enumerate(step.learning_rates) if rate != 0}
    if len(steps) < several:
        return
    if all(zero):
        draft = Draft(
            evidence, "optimizer_idle", "error",
            f"the learning rate was 0 in all {len(steps)} steps: nothing moved",
            "set the learning rate; a scheduler that starts at 0 must be stepped with each step of the optimizer",
            {"steps": len(steps)},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")
    elif len({step.place for _, step in steps}) == 1 and len(groups) < max(len(s.learning_rates) for _, s in steps):
        draft = Draft(
            evidence, "optimizer_idle", "info", "the learning rate of a parameter group was 0 in every step",
            "nothing, if that is meant; requires_grad_(False) saves its gradients", {"steps": len(steps)},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")


def _emptied(evidence: Evidence, facts: OptimizerFacts, steps: list[tuple[FlowView, StepFacts]]) -> Iterator[Finding]:
    """Nothing was in ``.grad`` when a step began, though its backward pass had brought something."""
    if len(steps) < evidence.thresholds.steps:
        return
    empty = [step.gradient_norm == 0 and set(_got(view)) - set(facts.missing) != set() for view, step in steps]
    if all(empty) and all(math.hypot(*_got(view).values()) > _OVERFLOWS for view, _ in steps):
        draft = Draft(
            evidence, "optimizer_idle", "error",
            f"the {len(steps)} steps of {facts.type} had a gradient of exactly 0: the norm that the gradients were "
            "divided by is infinite in float32",
            "clip_grad_norm_ cannot help: see what makes the gradient so large", {"steps": len(steps), "left": 0.0},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")
    elif all(empty):
        draft = Draft(
            evidence, "optimizer_idle", "error",
            f"there was nothing in .grad when the {len(steps)} steps of {facts.type} began, though the backward passes "
            "before them brought gradients: zero_grad() stands between backward() and step()",
            "call optimizer.zero_grad() before backward() or behind step()", {"steps": len(steps)},
        )  # fmt: skip
        yield draft.at(None, confidence="exact")


def _clipped(evidence: Evidence, steps: list[tuple[FlowView, StepFacts]]) -> Iterator[Finding]:
    """The gradient was of ordinary size, next to nothing of it was left for the step, and so the step is tiny."""
    recent = steps[-evidence.thresholds.steps :]
    if len(recent) < evidence.thresholds.steps or _warms_up([step for _, step in recent]):
        return
    lefts, smalls = [], []
    for view, step in recent:
        came = math.hypot(*_got(view).values())
        if not step.gradient_norm or not came or not math.isfinite(came) or step.gradient_norm > _CLIPPED:
            return
        lefts.append(step.gradient_norm / came)
        smalls.append(_tiny(evidence, view, lefts[-1]))
    left = median(lefts)
    if left < _LEFT and all(smalls):
        draft = Draft(
            evidence, "optimizer_idle", "warning",
            f"next to nothing is left of the gradient when the optimizer takes it: {number(left)} of its norm, so that "
            "steps are tiny",
            _unscaled_first(recent[-1][0].flow.event.loss_scale)
            + "raise the limit of the clipping (clip_grad_norm_(parameters, 1.0) is usual), or remove the factor that "
            "gradients are divided by",
            {"left": left, "steps": len(recent)},
        )  # fmt: skip
        yield draft.at(None)


def _unscaled_first(loss_scale: float | None) -> str:
    """What to try first where a scaler multiplies the gradients that are clipped."""
    if not loss_scale or loss_scale <= 1:
        return ""
    return (
        f"call scaler.unscale_(optimizer) before clipping: the gradients are still multiplied by {number(loss_scale)} "
        "there; otherwise "
    )


def _rounded(evidence: Evidence, steps: list[tuple[FlowView, StepFacts]]) -> Iterator[Finding]:
    """Steps with a gradient and a rate that leave every parameter bit for bit as it was."""
    if len(steps) < evidence.thresholds.steps or _warms_up([step for _, step in steps]):
        return
    for view, step in steps:
        moved = [r for r in view.flow.parameters if r.update is not None]
        changes = [r.update.l2_norm for r in moved if r.update is not None]
        if any(r.dtype in {"float16", "bfloat16"} for r in moved):
            return  # ``update_lost`` judges it
        if not step.gradient_norm or not changes or any(change != 0 for change in changes):
            return
    rate = max((rate for rate in steps[-1][1].learning_rates if rate is not None), default=0.0)
    draft = Draft(
        evidence, "optimizer_idle", "error",
        f"none of {len(steps)} steps changed a single entry, at a learning rate of {number(rate)}: what a step adds is "
        "lost to rounding",
        "raise the learning rate", {"steps": len(steps), "learning_rate": rate},
    )  # fmt: skip
    yield draft.at(None, confidence="exact")


def _decayed(evidence: Evidence, steps: list[tuple[FlowView, StepFacts]]) -> Iterator[Finding]:
    """Steps that leave all as it was since the learning rate fell to next to nothing, while there is much to learn.

    A rate of exactly 0 is where a schedule ends on purpose.
    """
    recent = steps[-_STILL:]
    moves = [[r.update.l2_norm for r in view.flow.parameters if r.update is not None] for view, _ in recent]
    still = len(recent) == _STILL and all(sizes and not any(sizes) for sizes in moves)
    rates = [max((rate for rate in step.learning_rates if rate is not None), default=0.0) for _, step in steps]
    half = any(r.dtype in {"float16", "bfloat16"} and r.update is not None for r in recent[-1][0].flow.parameters)
    if (
        not still
        or half
        or not 0 < rates[-1] < max(rates) * _SPENT
        or not all(step.gradient_norm for _, step in recent)
    ):
        return
    first, now = total_norm(steps[0][0]), total_norm(recent[-1][0])
    if first is None or now is None or now < _FELL * first:
        return
    draft = Draft(
        evidence, "optimizer_idle", "warning",
        f"no entry changed in the last {_STILL} steps: the learning rate has fallen from {number(max(rates))} to "
        f"{number(rates[-1])}, and the gradient is {number(now / first)} times what it was",
        "let the schedule fall more slowly: one that counts epochs is to be stepped once an epoch, not once a batch; "
        "or end the training here",
        {"steps": _STILL, "learning_rate": rates[-1], "largest_rate": max(rates)},
    )  # fmt: skip
    yield draft.at(None, confidence="exact")


def _warms_up(steps: Sequence[StepFacts]) -> bool:
    """Whether a learning rate rises."""
    rates = [max((rate for rate in step.learning_rates if rate is not None), default=0.0) for step in steps]
    return any(later > earlier for earlier, later in pairwise(rates))


def _tiny(evidence: Evidence, view: FlowView, left: float) -> bool:
    """Whether a step hardly moves the matrices, and would have without what took the gradient away."""
    low = evidence.thresholds.update_low
    known = [(r, r.update) for r in view.flow.parameters if r.update is not None and len(r.shape) > 1]
    ratios = [u.l2_norm / u.weight_norm for _, u in known if u.weight_norm > 0]
    if not ratios:
        return False
    if median(ratios) < low:
        return median(ratios) / left > low or any(u.epsilon for _, u in known)
    # What divides the gradient by its own size moves on until it is as small as epsilon.
    swallowed = [_swallowed(record, update, left) for record, update in known if update.epsilon]
    return bool(swallowed) and sum(swallowed) > len(swallowed) / 2


def _swallowed(record: ParameterRecord, update: Update, left: float) -> bool:
    """Whether a gradient was well above epsilon and is below it now, so that a step is far below the learning rate."""
    rms, epsilon = record.rms or 0.0, update.epsilon or 0.0
    full = (update.learning_rate or 0.0) * math.sqrt(math.prod(record.shape))
    return rms * left < epsilon < rms / _SWALLOWED and update.l2_norm < _FAR * full


# ---- gradients that are never cleared ------------------------------------------------------------------------------


def zero_grad_missing(evidence: Evidence) -> Iterator[Finding]:
    """What a step found in ``.grad`` is still there when the next step's backward pass begins, in every step."""
    need_optimizer(evidence)
    by_place: dict[int, list[StepFacts]] = {}
    for _, step in taken(evidence):
        by_place.setdefault(step.place, []).append(step)
    for steps in by_place.values():
        kept = [_still_there(one, two) for one, two in pairwise(steps)]
        if len(steps) >= evidence.thresholds.steps and kept and all(kept):
            first, last = steps[0].gradient_norm or 0.0, steps[-1].gradient_norm or 0.0
            draft = Draft(
                evidence, "zero_grad_missing", "error",
                f"gradients are never cleared: each of {len(steps)} steps of {steps[0].optimizer} added to what the "
                f"step before had used (norm {number(first)} at first, {number(last)} at last); zero_grad is missing",
                "call optimizer.zero_grad() once per step, before backward()",
                {"steps": len(steps), "first": first, "last": last},
            )  # fmt: skip
            yield draft.at(None, confidence="exact")
            return


def _still_there(before: StepFacts, step: StepFacts) -> bool:
    used, carried = before.gradient_norm, step.carried_norm
    if not used or not carried:
        return False
    return not math.isfinite(carried) or abs(carried - used) <= _SAME * max(carried, used)
