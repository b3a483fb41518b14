"""Checks about steps: spikes, updates, the optimizer's epsilon, the gradient at the loss, symmetry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from fxgrad.diagnosis.advice import of_loss, of_step, of_zero_loss
from fxgrad.diagnosis.causes import Cause
from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed, number
from fxgrad.diagnosis.kinds import WEIGHTED
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight, scale
from fxgrad.schema import Finding, Node, ParameterRecord, Site

_WINDOW = 100  # flows that a spike is compared with
_MAD = 1.4826  # makes the median absolute deviation a standard deviation for normal noise
_USUAL = 20  # steps over which the size of updates is judged
_FELL = 0.1  # of its first norm: below it a small gradient is a fit, no fault


def total_norm(view: FlowView) -> float | None:
    """l2 norm over all parameters' gradients, the loss scale divided out; None where none is finite and positive."""
    norms = [r.statistics.l2_norm for r in view.flow.parameters if r.statistics is not None]
    if not norms or any(r.statistics is not None and r.statistics.nonfinite for r in view.flow.parameters):
        return None
    norm = math.hypot(*norms) / (view.flow.event.loss_scale or 1.0)
    return norm if math.isfinite(norm) and norm > 0 else None


def spike(evidence: Evidence) -> Iterator[Finding]:
    """Score z = (log g - median) / (1.4826 MAD) over the flows before, and g over their median.

    Source: spike score of OLMo 2 (7 sigma), with robust estimates.  False alarms: a change of learning rate or data.
    """
    limits = evidence.thresholds
    if len(evidence.views) <= limits.spike_steps:
        message = f"a spike needs a series of more than {limits.spike_steps} flows"
        raise LackingError(message)
    logs = [math.log(n) if (n := total_norm(view)) is not None else None for view in evidence.views]
    worst: tuple[float, float, int] | None = None
    for at in range(limits.spike_steps, len(logs)):
        here = logs[at]
        before = [v for v in logs[max(0, at - _WINDOW) : at] if v is not None]
        if here is None or len(before) < limits.spike_steps:
            continue
        middle = median(before)
        spread = _MAD * median(abs(v - middle) for v in before)
        score = (here - middle) / max(spread, 1e-3)
        rise = here - middle
        if score > limits.spike_sigma and rise > math.log(limits.spike_factor) and (worst is None or rise > worst[0]):
            worst = rise, score, at
    if worst is not None:
        yield _spike(evidence, *worst)


def _spike(evidence: Evidence, rise: float, score: float, at: int) -> Finding:
    view = evidence.views[at]
    before = evidence.views[max(0, at - _WINDOW) : at]
    jumps = []
    for one in view.flow.nodes:
        gain = view.gain(one.key)
        usual = [g for v in before[-_USUAL:] if one.key in v.nodes and (g := v.gain(one.key))]
        if gain and usual and gain / median(usual) > evidence.thresholds.spike_factor:
            jumps.append((gain / median(usual), one))
    factor = math.exp(rise)
    node: Node | None = None
    message = (
        f"in backward {view.flow.event.backward} the gradient was {number(factor)} times its median (z = {score:.0f})"
    )
    numbers = {"factor": factor, "z": score}
    if jumps:
        jump, node = max(jumps, key=lambda item: item[0])
        message += f"; the gain of {view.source_words(node.key)} rose {number(jump)} times"
        numbers["gain_factor"] = jump
    else:
        message += "; no operation changed its gain: suspect the batch, the labels or the loss"
    mend = "clip the gradient norm, skip or look at this batch, lower the learning rate or warm up longer"
    draft = Draft(evidence, "spike", "warning", message, mend, numbers)
    return draft.at(node, view=view, confidence="several steps")


# ---- the optimizer -------------------------------------------------------------------------------------------------


def _could_give(evidence: Evidence) -> str | None:
    """An optimizer can be given to the watch of a series, and not to a single pass."""
    return "optimizer=" if len(evidence.views) > 1 and evidence.view.flow.optimizer is None else None


def _matrix(record: ParameterRecord) -> bool:
    return len(record.shape) > 1


def update_size(evidence: Evidence) -> Iterator[Finding]:
    """l2 norm of a step's change over that of the parameter; matrices only, weights that are small on purpose left out.

    Without an optimizer, what the norms of a parameter in two forward calls differ by is a lower bound of its change.

    Source: update ratio of about 1e-3 (Karpathy); SageMaker Debugger's WeightUpdateRatio.
    """
    told = [v for v in evidence.views if any(r.update is not None for r in v.flow.parameters)]
    if not told and (len(evidence.views) < 2 or not evidence.view.flow.event.values):  # noqa: PLR2004  # before and after
        message = "no optimizer was given to watch (optimizer=), or it has not stepped yet"
        raise LackingError(message, give=_could_give(evidence))
    throttle = evidence.thresholds.throttle
    for number_, view in enumerate(evidence.views):
        after = evidence.views[number_ + 1] if number_ + 1 < len(evidence.views) else None
        ratios = {r.name: _ratio(r, throttle) or _least_ratio(r, after, throttle) for r in view.flow.parameters}
        large = {name: ratio for name, ratio in ratios.items() if ratio > evidence.thresholds.update_large}
        if large:
            yield _large(evidence, view, large)
            return
    yield from _unusual(evidence, told)


def _ratio(record: ParameterRecord, throttle: float) -> float:
    update = record.update
    if update is None or not _matrix(record) or update.weight_norm <= 0:
        return 0.0
    size = scale(record)
    if size is None:
        size = update.weight_norm / math.sqrt(record.shape[0])
    return update.l2_norm / update.weight_norm if size >= throttle else 0.0


def _least_ratio(record: ParameterRecord, after: FlowView | None, throttle: float) -> float:
    """What a parameter changed by at least until the next forward, over its norm."""
    later = None if after is None else after.parameters.get(record.name)
    if later is None or record.value is None or later.value is None or not _matrix(record) or record.value.nonfinite:
        return 0.0
    norm, size = record.value.l2_norm, scale(record)
    if size is None or size < throttle or norm <= 0:
        return 0.0
    if later.value.nonfinite:
        return 0.0  # whatever made it so is told by ``nonfinite``
    return abs(later.value.l2_norm - norm) / norm


def _large(evidence: Evidence, view: FlowView, large: dict[str, float]) -> Finding:
    name = max(large, key=lambda n: large[n])
    update = view.parameters[name].update
    numbers = {"ratio": large[name], "parameters": float(len(large))}
    words = (
        f"by {number(large[name])} times its norm"
        if update is not None
        else f"by at least {number(large[name])} times its norm"
    )
    if update is not None and update.learning_rate is not None:
        numbers["learning_rate"] = update.learning_rate
        words += f" at a learning rate of {number(update.learning_rate)}"
    cause = of_step(view, view.parameters[name])
    draft = Draft(
        evidence, "update_size", "error",
        f"the step behind backward {view.flow.event.backward} changed {name} {words} (usual: 1e-3), "
        f"{len(large)} {'matrices' if len(large) > 1 else 'matrix'} by more than the norm"
        + (f". Likely: {cause.why}" if cause.why else ""),
        cause.mend, numbers,
    )  # fmt: skip
    return draft.at(None, view=view, parameter=name, affected=tuple(large), confidence="exact")


def _unusual(evidence: Evidence, views: list[FlowView]) -> Iterator[Finding]:
    limits = evidence.thresholds
    steps = {view.flow.optimizer.step if view.flow.optimizer is not None else n: view for n, view in enumerate(views)}
    views = list(steps.values())  # several backward passes may lead to one step
    if len(views) < _USUAL:
        return
    names = [r.name for r in views[-1].flow.parameters if _matrix(r) and r.update is not None]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for view in views[-_USUAL:]:
        for record in view.flow.parameters:
            if record.name in ratios and record.update is not None:
                ratios[record.name].append(_ratio(record, limits.throttle))
    odd = {
        n: median(r)
        for n, r in ratios.items()
        if r and median(r) > 0 and not limits.update_low <= median(r) <= limits.update_high
    }
    if odd:
        worst = max(odd, key=lambda n: abs(math.log10(odd[n]) + 3))
        draft = Draft(
            evidence, "update_size", "info",
            f"steps change {worst} by {number(odd[worst])} times its norm (median of {_USUAL} steps; usual: 1e-3)",
            "check the learning rate of its group", {"ratio": odd[worst], "parameters": len(odd)},
        )  # fmt: skip
        yield draft.at(None, parameter=worst, affected=tuple(odd))


def optimizer_epsilon(evidence: Evidence) -> Iterator[Finding]:
    """Root mean square of the unscaled gradient below ``epsilon`` times the optimizer's eps, for most matrices.

    Not where the gradient has fallen to a tenth of what the first flow had: a fit that has converged.
    """
    view = evidence.view
    known = [
        r for r in view.flow.parameters if r.update is not None and r.update.epsilon and _matrix(r) and r.statistics
    ]
    if not known:
        message = "no optimizer with an epsilon was given to watch (optimizer=), or it has not stepped yet"
        raise LackingError(message, give=_could_give(evidence))
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


# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_seed(evidence: Evidence) -> Iterator[Finding]:
    """Root mean square of the gradient at an output, times its entries per sample, the loss scale divided out.

    Information: the scale of a loss is the user's.  A warning where all outputs get nothing but zeros.
    """
    view = evidence.view
    seeds = [site for site in seeds_of(view) if site.statistics is not None and not site.statistics.nonfinite]
    if seeds and all(site.statistics is not None and site.statistics.all_zero for site in seeds):
        cause = of_zero_loss(view)
        alone = len(evidence.views) == 1
        lasting = all(s.statistics is not None and s.statistics.all_zero for v in evidence.recent for s in seeds_of(v))
        draft = Draft(
            evidence, "loss_seed", "warning" if alone or (evidence.several and lasting) else "info",
            f"the gradient that the loss sends to the model's output {seeds[0].id} is zero all over: nothing is learnt"
            + (f". Likely: {cause.why}" if cause.why else ""),
            cause.mend, {"outputs": len(seeds)},
        )  # fmt: skip
        yield draft.at(None, affected=tuple(r.name for r in view.flow.parameters if r.statistics is not None))
        return
    if any(site.statistics is not None and site.statistics.outside_range for site in seeds):
        message = "at statistics='norm' a norm of 0 or Inf may be the accumulator's; it is measured in full next time"
        raise LackingError(message)
    for site in seeds:
        size = _seed_size(view, site)
        cause = of_loss(view) or Cause("", "look at the scale and the reduction of the loss")
        if size and not evidence.thresholds.seed_low <= size <= evidence.thresholds.seed_high:
            draft = Draft(
                evidence, "loss_seed", "info",
                f"the gradient that the loss sends to the model's output {site.id} has rms {number(site.rms or 0.0)}"
                + (f". Likely: {cause.why}" if cause.why else ""),
                cause.mend, {"rms": site.rms or 0.0, "size": size},
            )  # fmt: skip
            yield draft.at(None)
            return


def _seed_size(view: FlowView, site: Site) -> float:
    statistics = site.statistics
    if statistics is None:
        return 0.0
    batch = site.shape[0] if len(site.shape) > 1 and site.shape[0] else 1
    return statistics.rms * statistics.numel / batch / (view.flow.event.loss_scale or 1.0)


def symmetry(evidence: Evidence) -> Iterator[Finding]:
    """Variance of a weight matrix's entries: of a constant, non-zero initialisation all units learn the same.

    With ``channels=True`` also the spread of the units' gradients at what the node returned.
    """
    evidence.need_values()
    view = evidence.view
    same = []
    for node in view.flow.nodes:
        record = main_weight(view, node) if view.kinds[node.key] in WEIGHTED else None
        if record is None or not record.requires_grad:
            continue
        alike = any(_alike(site, evidence.thresholds.symmetry) for site in view.sites[node.key])
        if alike or _constant(record, evidence.thresholds.symmetry):
            same.append((node, record))
    if same:
        names = tuple(dict.fromkeys(record.name for _, record in same))
        draft = Draft(
            evidence, "symmetry", "warning" if len(names) > 1 else "info",
            f"the units of {listed(names)} are all alike, so that they get the same gradient and stay so",
            "initialise the weights at random", {"parameters": len(names)},
        )  # fmt: skip
        yield draft.at(same[0][0], affected=names)


def _alike(site: Site, limit: float) -> bool:
    """Whether all units of a value got a gradient of the same size."""
    sums = site.channels.square_sums if site.channels is not None else ()
    if len(sums) < 2 or not max(sums) or not math.isfinite(max(sums)):  # noqa: PLR2004  # one unit is like itself
        return False
    return max(sums) - min(sums) <= limit * max(sums)


def _constant(record: ParameterRecord, limit: float) -> bool:
    value = record.value
    if value is None or value.sum is None or len(record.shape) < 2 or record.shape[0] < 2 or not value.max_abs:  # noqa: PLR2004
        return False
    if math.prod(record.shape[1:]) < 2:  # noqa: PLR2004  # one entry a unit is a scale
        return False
    mean = value.sum / value.numel
    return abs(value.rms**2 - mean**2) <= limit * mean**2
