"""Checks about steps: spikes, updates, the optimizer's epsilon, the gradient at the loss, symmetry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from fxgrad.diagnosis.advice import of_loss, of_zero_loss
from fxgrad.diagnosis.causes import Cause
from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed, number
from fxgrad.diagnosis.kinds import WEIGHTED
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight
from fxgrad.schema import Finding, Node, ParameterRecord, Severity, Site

_WINDOW = 100  # flows that a spike is compared with
_MAD = 1.4826  # makes the median absolute deviation a standard deviation for normal noise
_USUAL = 20  # steps over which the size of updates is judged


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


def same_inputs(before: FlowView, view: FlowView) -> bool:
    """Whether the model was given the same values in two steps, as far as their statistics tell."""
    given = [[site.value for n in v.flow.nodes if n.op == "placeholder" for site in v.sites[n.key]]
             for v in (before, view)]  # fmt: skip
    return bool(given[0]) and all(value is not None for value in given[0]) and given[0] == given[1]


def _below_first(evidence: Evidence, at: int) -> bool:
    """Whether the gradient is smaller than in the first flow all the same: a fit that swings around its end."""
    first, now = total_norm(evidence.views[0]), total_norm(evidence.views[at])
    return first is not None and now is not None and now < first


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
    mend = "clip the gradient norm, skip or look at this batch, lower the learning rate or warm up longer"
    severity: Severity = "warning"
    if same_inputs(evidence.views[at - 1], view):
        message += "; the inputs are those of the step before: it is the steps that overshoot, or the targets changed"
        mend = "lower the learning rate or clip the gradient norm; with Adam, a smaller beta2 follows faster"
        severity = "info" if _below_first(evidence, at) else "warning"
    elif not jumps:
        message += "; no operation changed its gain: suspect the batch, the labels or the loss"
    draft = Draft(evidence, "spike", severity, message, mend, numbers)
    return draft.at(node, view=view, confidence="several steps")


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
        met = view.flow.event.margins_met
        why = "; the loss is exactly 0, as where every margin is met (triplet, hinge, ranking)" if met else ""
        draft = Draft(
            evidence, "loss_seed", "warning" if (alone and not met) or (evidence.several and lasting) else "info",
            f"the gradient that the loss sends to the model's output {seeds[0].id} is zero all over: nothing is learnt"
            + (why or (f". Likely: {cause.why}" if cause.why else "")),
            "nothing, where it is one batch; otherwise harder samples (mining) or a larger margin" if met
            else cause.mend,
            {"outputs": len(seeds)},
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

    In a series the first flow tells: rows that began alike stay alike, but their entries drift apart.  With
    ``channels=True`` also the spread of the units' gradients at what the node returned.
    """
    evidence.need_values()
    view = evidence.view
    same = []
    for node in view.flow.nodes:
        record = main_weight(view, node) if view.kinds[node.key] in WEIGHTED else None
        if record is None or not record.requires_grad:
            continue
        alike = any(_alike(site, evidence.thresholds.symmetry) for site in view.sites[node.key])
        first = evidence.views[0].parameters.get(record.name, record)
        if alike or any(_constant(one, evidence.thresholds.symmetry) for one in (first, record)):
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
