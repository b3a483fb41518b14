"""The size of a step's gradient, what the loss sends into the model, and units that are all alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fxgrad.diagnosis.advice import is_cut_off, no_label, of_loss, of_zero_loss
from fxgrad.diagnosis.causes import Cause
from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed, number
from fxgrad.diagnosis.kinds import WEIGHTED
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight
from fxgrad.schema import Finding, ParameterRecord, Site

# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_seed(evidence: Evidence) -> Iterator[Finding]:
    """Root mean square of the gradient at an output, times its entries per sample, the loss scale divided out.

    Information: the scale of a loss is the user's, and so is a batch without a label among others.  A warning where all
    outputs get nothing but zeros, in one flow or in all recent ones.
    """
    view = evidence.view
    seeds = [site for site in seeds_of(view) if site.statistics is not None and not site.statistics.nonfinite]
    without = [one for one in evidence.views if no_label(one)]
    if without and len(without) < len(evidence.views):
        yield _no_label(evidence, without)
    if seeds and _all_zero(view):
        if not 0 < len(without) < len(evidence.views):
            yield _zero_seed(evidence, seeds[0])
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


def _all_zero(view: FlowView) -> bool:
    return all(site.statistics is not None and site.statistics.all_zero for site in seeds_of(view))


def _zero_seed(evidence: Evidence, site: Site) -> Finding:
    """Nothing but zeros come out of the loss of the latest flow."""
    view = evidence.view
    alone = len(evidence.views) == 1
    always = all(map(_all_zero, evidence.views))  # from the first flow on: that is no fit
    cause = of_zero_loss(view)
    met = view.flow.event.margins_met or (is_cut_off(view) and not always)
    alone = alone and not met
    lasting = evidence.several and all(map(_all_zero, evidence.recent)) and not met
    why = "; the loss is cut off at 0, as where every margin is met (triplet, hinge, ranking)" if met else ""
    draft = Draft(
        evidence, "loss_seed", "warning" if alone or lasting else "info",
        f"the gradient that the loss sends to the model's output {site.id} is zero all over: nothing is learnt"
        + (why or (f". Likely: {cause.why}" if cause.why else "")),
        "nothing, where it is one batch; otherwise harder samples (mining) or a larger margin" if met else cause.mend,
        {"outputs": len(seeds_of(view))},
    )  # fmt: skip
    return draft.at(None, affected=tuple(r.name for r in view.flow.parameters if r.statistics is not None))


def _no_label(evidence: Evidence, views: Sequence[FlowView]) -> Finding:
    """Batches without a label among others: the loss is NaN, the weights go on as if nothing had been."""
    first, cause = views[0], of_zero_loss(views[0])
    draft = Draft(
        evidence, "loss_seed", "info",
        f"in backward {first.flow.event.backward} the gradient that the loss sends to the model is zero all over, and "
        f"the loss, a mean over no labels, NaN; so in {len(views)} of {len(evidence.views)} backward passes. Likely: "
        + cause.why,
        cause.mend, {"backwards": len(views), "of": len(evidence.views)},
    )  # fmt: skip
    return draft.at(None, view=first, confidence="several steps")


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
