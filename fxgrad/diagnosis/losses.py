"""What the loss does with the outputs: an activation that it applies again, targets that they never reach."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from fxgrad.diagnosis.check import Draft, Evidence, number
from fxgrad.diagnosis.local import VIEWS, is_last
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Finding, LossOp, Node

#: What an operation applies to its input itself, and so shouldn't find there.
_AGAIN = {
    "cross_entropy": frozenset({"softmax", "sigmoid"}),
    "log_softmax": frozenset({"softmax", "sigmoid"}),
    "binary_cross_entropy_with_logits": frozenset({"sigmoid", "softmax"}),
    "log_sigmoid": frozenset({"sigmoid"}),
    "logsigmoid": frozenset({"sigmoid"}),
    "softmax": frozenset({"softmax"}),
    "sigmoid": frozenset({"sigmoid"}),
}
_INNER = frozenset({"softmax", "sigmoid"})  # inside of a model only at its end: a gate of gates may be meant
_INPUTS = frozenset({"args[0]", "kwargs['input']"})
_CALLED = {"log_softmax": "cross_entropy", "cross_entropy": "cross_entropy"}
_BOUNDS = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
_ALIKE = VIEWS | {"identity", "contiguous", "unflatten", "clone", "t", "half", "bfloat16", "double"}
_WEIGHTS = 10.0  # widths of the range that a weight of the positive class may make of it
_BEYOND = 1.5  # widths of the range by which targets are off that are of another unit, and no mere outliers


def double_activation(evidence: Evidence) -> Iterator[Finding]:
    """Softmax into cross_entropy, sigmoid into BCE-with-logits: in the loss, in the model, or one in each.

    Exact: read off the graph, and off the autograd nodes between the outputs and the loss.
    """
    view = evidence.view
    found: dict[str | None, tuple[str, str]] = {}
    for node in view.flow.nodes:
        outer = view.kinds[node.key]
        if outer not in _AGAIN or (outer in _INNER and not is_last(view, node.key)) or not view.received(node.key):
            continue
        for edge in view.takes[node.key]:
            inner = _maker(view, edge.producer)
            if edge.consumer.argument in _INPUTS and view.kinds[inner] in _AGAIN[outer]:
                found.setdefault(inner, (view.kinds[inner], outer))
    for op in view.flow.event.loss_ops:
        for taken in op.takes:
            word = taken.removeprefix("model.")
            if word in _AGAIN.get(op.name, ()):
                found.setdefault(_last_of(view, word) if taken != word else None, (word, op.name))
    for key, (inner, outer) in found.items():
        yield _twice(evidence, None if key is None else view.nodes[key], inner, outer)


def _maker(view: FlowView, key: str) -> str:
    """The node that made a value, views and casts left out."""
    while view.kinds[key] in _ALIKE and len(view.takes[key]) == 1:
        key = view.takes[key][0].producer
    return key


def _last_of(view: FlowView, kind: str) -> str | None:
    """The node of a kind whose value the model returns, if it is one of ours."""
    returned = [_maker(view, e.producer) for e in view.flow.edges if view.nodes[e.consumer.key].op == "output"]
    return next((key for key in returned if view.kinds[key] == kind), None)


def _twice(evidence: Evidence, node: Node | None, inner: str, outer: str) -> Finding:
    view = evidence.view
    where = "the loss" if node is None else view.source_words(node.key)
    loss = _CALLED.get(outer, outer)
    applied = {"cross_entropy": "a softmax", "softmax": "a softmax"}.get(loss, "a sigmoid")
    numbers: dict[str, float] = {}
    limits = f"{loss}, which applies {applied} itself, so that its input lies between 0 and 1"
    classes = _classes(view, node)
    if applied == "a softmax" and classes > 1:
        numbers = {"classes": classes, "largest_probability": math.e / (math.e + classes - 1)}
        limits += f": of {classes} classes none gets a probability above {number(numbers['largest_probability'])}"
    elif applied == "a sigmoid":
        numbers = {"smallest_probability": 0.5, "largest_probability": 1 / (1 + math.exp(-1))}
        limits += ": every probability lies between 0.5 and 0.73"
    if node is not None and (gain := view.gain(node.key)) is not None:
        numbers["gain"] = gain
    mend = f"give {loss} the values from before the {inner}"
    if loss == "cross_entropy":
        mend += ", or keep the probabilities and use nll_loss(torch.log(p))" if inner == "softmax" else ""
    elif loss == "binary_cross_entropy_with_logits":
        mend += ", or keep the probabilities and use binary_cross_entropy"
    elif loss in _INNER:
        with_logits = "cross_entropy" if loss == "softmax" else "binary_cross_entropy_with_logits"
        mend = f"drop one of the two, or give {with_logits}, which applies {applied} itself, what lies before both"
    message = f"the activation is applied twice: the {inner} at {where} goes into {limits}"
    draft = Draft(evidence, "double_activation", "warning", message, mend, numbers)
    return draft.at(node, confidence="exact")


def _classes(view: FlowView, node: Node | None) -> int:
    sites = [] if node is None else view.sites[node.key]
    return sites[0].shape[1 if len(sites[0].shape) > 2 else -1] if sites and sites[0].shape else 0  # noqa: PLR2004


# ---- targets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Distance:
    """How far the targets of a squared error are from the outputs.

    Attributes:
        key: of the node that made the outputs.
        rms: of output minus target.
        output: rms of the outputs; None without forward statistics.
        bounds: of the targets, where the loss itself has some.
    """

    key: str
    rms: float
    output: float | None
    bounds: tuple[float, float] | None = None


def target_range(evidence: Evidence) -> Iterator[Finding]:
    """Output minus target, worked out of the gradient of a squared error, over the size or the range of the outputs.

    The gradient of ``mse_loss`` is twice the difference over the number of entries.  Outputs of a sigmoid, softmax or
    tanh can't be off by more than the width of their range, and are judged by one and a half of it; others are taken
    to have about the size 1 or that which they have.
    """
    limits = evidence.thresholds
    found = [one for view in evidence.recent if (one := _distance(view)) is not None]
    if not found and len(evidence.views) > 1:  # the latest are spoilt: what was before them
        found = [one for view in evidence.views if (one := _distance(view)) is not None][-1:]
    if not found:
        return
    last = found[-1]
    bounds = last.bounds or _BOUNDS.get(evidence.view.kinds.get(last.key, ""))
    if bounds is not None:
        width = bounds[1] - bounds[0]
        if median([one.rms for one in found]) > (_WEIGHTS if last.bounds else _BEYOND) * width:
            draft = Draft(
                evidence, "target_range", "warning",
                f"targets are off the outputs of {evidence.view.source_words(last.key)} by rms {number(last.rms)}, but "
                f"{'the loss takes targets' if last.bounds else 'these lie'} between {bounds[0]:g} and {bounds[1]:g}: "
                "they can't be reached",
                f"scale the targets to [{bounds[0]:g}, {bounds[1]:g}], or drop the activation at the output",
                {"difference_rms": last.rms, "low": bounds[0], "high": bounds[1]},
            )  # fmt: skip
            yield draft.at(None)
        return
    evidence.need_values()
    ratios = [one.rms / max(1.0, one.output) for one in found if one.output is not None]
    if ratios and median(ratios) > limits.target_info:
        draft = Draft(
            evidence, "target_range", "warning" if median(ratios) > limits.target_range else "info",
            f"targets are off the outputs by rms {number(last.rms)}, while these have rms "
            f"{number(last.output or 0.0)}: {number(ratios[-1])} times the size of what the model gives",
            "normalise the targets to mean 0 and standard deviation 1 (undone to predict), or take their logarithm",
            {"difference_rms": last.rms, "output_rms": last.output or 0.0, "ratio": ratios[-1]},
        )  # fmt: skip
        yield draft.at(None)


def _distance(view: FlowView) -> _Distance | None:
    """None where the loss is no squared error of the one output, or its gradient isn't finite."""
    ops = view.flow.event.loss_ops
    seeds = seeds_of(view)
    logits = _of_logits(view)
    reduction = logits or _squared_error(view)
    if reduction is None or len(seeds) != 1 or not ops:
        return None
    site = seeds[0]
    gradient = site.statistics
    if gradient is None or gradient.nonfinite is not False or not gradient.numel:
        return None
    samples = site.shape[0] if site.shape else 1
    over = {"mean": gradient.numel, "samples": samples, "sum": 1}[reduction]
    factor = over / (1 if logits else 2) / (view.flow.event.loss_scale or 1.0)
    value = None if site.value is None or site.value.nonfinite else site.value.rms
    return _Distance(_maker(view, site.key), gradient.rms * factor, value, (0.0, 1.0) if logits else None)


def _unscaled(view: FlowView) -> list[LossOp]:
    """The operations of the loss behind a loss scale, a division for accumulation, and sums with others."""
    ops = list(view.flow.event.loss_ops)
    if ops and ops[0].name == "mul" and view.flow.event.loss_scale:
        ops = ops[1:]
    # Divided by the steps of an accumulation, the difference is larger than it looks.
    while ops and ops[0].name in {"div", "add"}:
        ops = ops[1:]
    return ops


def _of_model(op: LossOp) -> bool:
    return any(taken.startswith("model.") for taken in op.takes)


def _of_logits(view: FlowView) -> str | None:
    """The reduction where the loss is a binary cross entropy with logits, whose targets lie between 0 and 1."""
    ops = _unscaled(view)
    if not ops or ops[0].name != "binary_cross_entropy_with_logits" or not _of_model(ops[0]):
        return None
    return ops[0].reduction if ops[0].reduction in {"mean", "sum"} else None


def _squared_error(view: FlowView) -> str | None:
    """``"mean"``, ``"sum"``, or ``"samples"`` for the mean over samples of sums, of a squared error of the output."""
    ops = _unscaled(view)
    if ops and ops[0].name == "mse_loss" and _of_model(ops[0]):
        return ops[0].reduction if ops[0].reduction in {"mean", "sum"} else None
    words = [op.name for op in ops]
    for first, reduction in ((["mean", "sum"], "samples"), (["mean"], "mean"), (["sum"], "sum")):
        rest = words[len(first) :]
        if words[: len(first)] != first or not rest:
            continue
        rest = rest[1:] if rest[0] == "mul" else rest  # by weights of about 1
        if rest in (["pow", "sub"], ["pow", "rsub"]) and _of_model(ops[-1]):
            return reduction
    return None


__all__ = ["double_activation", "target_range"]
