"""What one operation does to the gradient: a break in scale, saturation, exact zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from fxgrad.diagnosis.check import Draft, Evidence, LackingError, number
from fxgrad.diagnosis.kinds import SCALING, WEIGHTED, constant
from fxgrad.diagnosis.view import FlowView, decades, total_norm
from fxgrad.diagnosis.weights import factor, main_weight, throttled
from fxgrad.schema import Constant, Consumer, Finding, Node, Severity, Statistics

VIEWS = frozenset(
    {"view", "reshape", "squeeze", "flatten", "unsqueeze", "float", "to", "permute", "transpose", "getitem"}
)
_UNIT = 1.5  # decades more that a constant behind all weights may have: the unit of what is predicted
_LOGITS = ("log_softmax", "softmax", "nll_loss", "binary_cross_entropy", "sigmoid", "log_sigmoid")
_SURE = 1e-4  # gain that a classifier which has learnt to be sure may have
_FLAT = 0.1  # of the slope that is allowed: below it nothing is learnt any more, however it came
_LEFT = 0.7  # of its first slope: below it an activation has moved towards its ends
_FELL = 0.7  # of its largest norm, to which the gradient must have fallen meanwhile
_INSIDE = 0.5  # of the slope that is allowed to a softmax inside of the model: attention may be sharp
_INVERSE_EPS = 1 / math.sqrt(1e-5)  # what nn.BatchNorm begins with
_USES = 0.1  # of the factor that a running variance of zero makes: above it that is what was used
_BETWEEN = 2.0  # decades beyond ``scale_break`` from which on it is an error


def over_steps(evidence: Evidence, key: str, measure: Callable[[FlowView, str], float | None]) -> float | None:
    """The median of a measure of a node over the recent flows that have it; None where the latest lacks it."""
    if measure(evidence.view, key) is None:
        return None
    found = [value for view in evidence.recent if key in view.nodes and (value := measure(view, key)) is not None]
    return median(found)


def scale_break(evidence: Evidence) -> Iterator[Finding]:
    """|log10(sent / received)| of one scaling operation; l2 norms over all its inputs together.

    Source: bands of healthy local gains by operation, measured on stock and toy models (-2.6 to +0.9 decades for
    linear, convolution, product and division).  False alarms: learnable throttles (LayerScale, weights that begin at
    zero) are exempt while their scale is small.
    """
    for node in evidence.view.flow.nodes:
        if evidence.view.kinds[node.key] == "batch_norm":
            yield from _without_variance(evidence, node)
        if evidence.view.kinds[node.key] not in SCALING:
            continue
        gain = over_steps(evidence, node.key, lambda view, key: view.gain(key))
        limit = evidence.thresholds.scale_break
        if not gain or abs(decades(gain)) <= limit:
            continue
        if is_output_unit(evidence.view, node) and abs(decades(gain)) <= limit + _UNIT:
            continue
        weight = factor(evidence.view, node.key)
        if weight is None and _factor(node) is None and not _fixed(evidence.view, node):
            continue  # two values of the model's own: what one does to the other is no scale of its own
        if weight is not None and weight.requires_grad and weight.value is None:
            continue  # it may be small on purpose
        if _within_bounds(evidence, node):
            continue
        if gain > 1 or throttled(evidence.view, node, evidence.thresholds.throttle) is None:
            yield _break(evidence, node, gain)
    evidence.need_parts(SCALING)


def _without_variance(evidence: Evidence, node: Node) -> Iterator[Finding]:
    """A batch normalisation by a running variance of zero, as in eval mode before any training."""
    finite = [one for one in evidence.views if node.key in one.nodes and one.gain(node.key)]
    view = finite[0] if finite else evidence.view  # before what it leads to spoils the numbers
    for buffer in view.flow.buffers:
        if not buffer.name.endswith("running_var") or buffer.name not in node.parameters or buffer.value.max_abs != 0:
            continue
        eps = constant(node, "eps", "args[7]")
        usual = 1 / math.sqrt(eps.number) if eps is not None and eps.number else _INVERSE_EPS
        weight = main_weight(view, node)
        scale = weight.value.rms if weight is not None and weight.value is not None else 1.0
        gain = view.gain(node.key)
        value = next((site.value.rms for site in view.sites[node.key] if site.value is not None), 0.0)
        used = gain > _USES * usual * scale if gain is not None else value > _USES * usual * scale
        if used:  # in training mode it would be the batch's own variance
            shown = gain if gain is not None else usual * scale
            draft = Draft(
                evidence, "scale_break", "error",
                f"{view.source_words(node.key)} divides by the root of {buffer.name}, which is zero all over: values "
                f"and gradients are multiplied by {number(shown)} (1/sqrt(eps))",
                f"set {buffer.name} to 1 (reset_running_stats()), load it from the checkpoint, or train with "
                "model.train() before model.eval()",
                {"gain": shown, "decades": decades(shown), "running_var": 0.0},
            )  # fmt: skip
            yield draft.at(node, view=view, parameter=buffer.name, path=view.way_back(node.key))


def _factor(node: Node) -> Constant | None:
    """The number that a node multiplies or divides by."""
    names = ("args[0]", "args[1]", "kwargs['other']")
    return next((c for c in node.constants if c.argument in names and c.number), None)


def is_output_unit(view: FlowView, node: Node) -> bool:
    """Whether a constant factor stands behind all weights, where the loss may well divide it out again.

    Not one in front of a softmax or sigmoid of the loss: logits have no unit.
    """
    if any(op.name.startswith(_LOGITS) for op in view.flow.event.loss_ops):
        return False
    if view.kinds[node.key] not in {"mul", "div"} or (_factor(node) is None and not _fixed(view, node)):
        return False
    return all(view.kinds[key] not in WEIGHTED for key in view.behind(node.key))


def _within_bounds(evidence: Evidence, node: Node) -> bool:
    """Whether a product is with a value of ordinary size: a mask that is nearly all zero, one-hot targets."""
    view = evidence.view
    if view.kinds[node.key] != "mul" or _factor(node) is not None:
        return False
    passing = {edge.producer for edge, _ in view.parts(node.key)}
    others = [view.by_id[e.producer + e.output_position].value for e in view.takes[node.key]
              if e.producer not in passing and e.producer + e.output_position in view.by_id]  # fmt: skip
    largest = max((value.max_abs or 0.0 for value in others if value is not None), default=None)
    return largest is not None and abs(decades(largest)) <= evidence.thresholds.scale_break


def _fixed(view: FlowView, node: Node) -> bool:
    """Whether a node takes a buffer, or a value that depends on no parameter."""
    if any(name not in view.parameters for name in node.parameters):
        return True
    without = {"no_grad_required", "integer", "frozen"}
    values = [edge.producer + edge.output_position for edge in view.takes[node.key]]
    return any(view.blind.get(value) in without for value in values) or len(values) == 1


def _break(evidence: Evidence, node: Node, gain: float) -> Finding:
    view = evidence.view
    severity: Severity = "error" if abs(decades(gain)) > evidence.thresholds.scale_break + _BETWEEN else "warning"
    numbers = {"gain": gain, "decades": decades(gain)}
    found = _factor(node)
    weight = factor(view, node.key)
    cause = "check the scale of its operands"
    if found is not None and found.number is not None and view.kinds[node.key] in {"mul", "div"}:
        numbers["constant"] = found.number
        cause = f"the constant {found.text} does it: drop it, or move it into the loss or the learning rate"
    elif weight is not None and weight.value is not None:
        numbers["weight_rms"] = weight.value.rms
        cause = f"{weight.name} has rms {number(weight.value.rms)}: initialise it like its neighbours"
    message = (
        f"{view.source_words(node.key)} multiplies the gradient by {number(gain)}; {view.kinds[node.key]} operations "
        "of healthy models stay between 0.002 and 8"
    )
    draft = Draft(evidence, "scale_break", severity, message, cause, numbers)
    return draft.at(node, path=view.way_back(node.key))


# ---- saturation --------------------------------------------------------------------------------------------------


def _value(view: FlowView, key: str) -> Statistics | None:
    sites = view.sites[key]
    return sites[0].value if len(sites) == 1 else None


def slope(view: FlowView, key: str) -> float | None:
    """Mean derivative of an activation, from its output y: sigmoid (sum y - sum y^2)/n, tanh 1 - sum y^2/n.

    Of softmax 1 - sum y^2 / sum y (one minus the mean largest share); of a clamp the share strictly between the limits.
    None of ``gumbel_softmax(hard=True)``, whose output is one-hot whatever its derivative.
    """
    value, kind = _value(view, key), view.kinds[key]
    if value is None or not value.numel or value.nonfinite or value.sum is None:
        return None
    squares = value.l2_norm**2
    if kind == "sigmoid":
        return max(0.0, (value.sum - squares) / value.numel)
    if kind == "tanh":
        return max(0.0, 1.0 - squares / value.numel)
    if kind == "softmax":
        return max(0.0, 1.0 - squares / value.sum) if value.sum and not _hard(view, key) else None
    if kind == "clamp":
        activity = view.sites[key][0].activity
        return activity.active / (activity.units * activity.samples) if activity and activity.samples else None
    return None


def _hard(view: FlowView, key: str) -> bool:
    """Whether a softmax returns one-hot vectors by construction, with the gradient of a soft one."""
    hard = constant(view.nodes[key], "hard", "args[2]")
    return "gumbel" in key.rpartition("/")[2] and hard is not None and bool(hard.number)


def saturated(evidence: Evidence) -> Iterator[Finding]:
    """Mean slope at the measured outputs and gain, both below their thresholds.

    Source: saturation as in TheDeepChecker and SageMaker Debugger, but by the slope itself.  False alarms: gates and
    outputs of a fitted classifier that are saturated on purpose pass their gradient by other ways; only activations
    whose own gain is as small are named.
    """
    evidence.need_values()
    limits = evidence.thresholds
    bounds = {
        "sigmoid": (limits.sigmoid_slope, limits.sigmoid_gain), "tanh": (limits.tanh_slope, limits.tanh_gain),
        "softmax": (1 - limits.softmax_mass, limits.softmax_gain), "clamp": (limits.clamp_slope, limits.clamp_gain),
    }  # fmt: skip
    for node in evidence.view.flow.nodes:
        kind = evidence.view.kinds[node.key]
        if kind not in bounds or (kind == "clamp" and one_sided(node)):
            continue
        flat = over_steps(evidence, node.key, slope)
        gain = over_steps(evidence, node.key, lambda view, key: view.gain(key))
        if kind == "softmax" and one_entry(evidence.view, node.key):
            continue  # ``zero`` judges it
        flattest = bounds[kind][0]
        if kind == "softmax" and not is_last(evidence.view, node.key):
            flattest *= _INSIDE
        if flat is not None and gain is not None and flat < flattest and gain < bounds[kind][1]:
            learnt = flat > _FLAT * flattest and _came_to_it(evidence, node)
            yield _saturation(evidence, node, (flat, gain), learnt=learnt)
    evidence.need_parts(bounds)


def _came_to_it(evidence: Evidence, node: Node) -> bool:
    """Whether an activation left its slope while the gradient fell: what has learnt to be sure is no fault."""
    first, last = evidence.views[0], evidence.view
    before = slope(first, node.key) if node.key in first.nodes else None
    now, norm = slope(last, node.key), total_norm(last)
    if before is None or now is None or norm is None:
        return False
    most = max(n for view in evidence.views if (n := total_norm(view)) is not None)
    return now < _LEFT * before and norm < _FELL * most


def one_entry(view: FlowView, key: str) -> bool:
    """Whether a softmax is over single entries, so that it is 1 everywhere."""
    value = _value(view, key)
    return value is not None and value.zero_count == 0 and value.min_abs_nonzero == value.max_abs == 1.0


def is_last(view: FlowView, key: str) -> bool:
    """Whether a value is what the model returns, perhaps rearranged."""
    for _ in range(4):
        users = {edge.consumer.key for edge in view.users[key]}
        if any(view.nodes[user].op == "output" for user in users):
            return True
        if len(users) != 1 or view.kinds[next(iter(users))] not in VIEWS:
            return False
        key = next(iter(users))
    return False


def one_sided(node: Node) -> bool:
    """Whether a clamp has a lower limit only, as a ReLU has."""
    if node.op == "call_module":
        return False
    upper = constant(node, "args[2]", "max")
    return upper is None and not node.key.rpartition("/")[2].startswith("hardtanh")


def _saturation(evidence: Evidence, node: Node, measured: tuple[float, float], *, learnt: bool) -> Finding:
    view, (flat, gain) = evidence.view, measured
    kind = view.kinds[node.key]
    inputs = [view.by_id[e.producer + e.output_position].value for e in view.takes[node.key]
              if e.producer + e.output_position in view.by_id]  # fmt: skip
    numbers = {"slope": flat, "gain": gain}
    if inputs and inputs[0] is not None:
        numbers["input_rms"], numbers["input_max_abs"] = inputs[0].rms, inputs[0].max_abs or 0.0
    mend = {
        "softmax": "scale its input down: in attention divide the scores by sqrt(d), initialise query and key smaller, "
        "or normalise both; at the end of a model drop a softmax that stands before cross_entropy",
        "clamp": "its input lies outside of the limits: rescale it, or widen them",
    }.get(kind, "scale its input down: smaller initialisation, normalised inputs, normalisation before it")
    large = f"its input has rms {number(numbers['input_rms'])}, " if "input_rms" in numbers else ""
    message = (
        f"{view.source_words(node.key)} is saturated: {large}mean slope {number(flat)}, only {number(gain)} of the "
        "gradient passes"
    )
    severity: Severity = "error" if gain == 0 else "warning"
    if learnt or (kind in {"sigmoid", "tanh"} and gain > _SURE and is_last(view, node.key)):
        severity = "info"  # as of a classifier that has learnt to be sure
    return Draft(evidence, "saturated", severity, message, mend, numbers).at(node)


# ---- branches ------------------------------------------------------------------------------------------------------


def starved(evidence: Evidence) -> Iterator[Finding]:
    """l2 norm of a use's part over the largest part of the same value, at a fan-out.

    Information at first: queries and keys, zero-initialised residuals and LayerScale start like that.  A warning after
    ``starved_steps``.
    """
    view = evidence.view
    if view.flow.event.sites != "edge":
        message = "the parts of a fan-out were not measured (sites='edge')"
        raise LackingError(message, give="sites='edge'")
    for value, edges in view.uses.items():
        parts = [(edge, s) for edge in edges if (s := view.part(edge)) is not None and s.nonfinite is False]
        largest = max((s.l2_norm for _, s in parts), default=0.0)
        if len(parts) < 2 or largest <= 0:  # noqa: PLR2004  # a fan-out has two
            continue
        for edge, statistics in parts:
            share = statistics.l2_norm / largest
            if 0 < share < evidence.thresholds.starved and _stays(evidence, value, edge.consumer):
                yield _starving(evidence, value, edge.consumer.key, share)


def _stays(evidence: Evidence, value: str, consumer: Consumer) -> bool:
    """Whether a use has starved in all the recent flows."""
    for view in evidence.recent:
        parts = {
            edge.consumer: part.l2_norm for edge in view.uses.get(value, []) if (part := view.part(edge)) is not None
        }
        largest = max(parts.values(), default=0.0)
        if not largest or not parts.get(consumer, 0.0) < evidence.thresholds.starved * largest:
            return False
    return True


def _starving(evidence: Evidence, value: str, key: str, share: float) -> Finding:
    view = evidence.view
    lasting = len(evidence.views) >= evidence.thresholds.starved_steps
    draft = Draft(
        evidence, "starved", "warning" if lasting else "info",
        f"at {value}, {view.source_words(key)} sends back {number(share)} of what its largest sibling does",
        "rescale the branch or weigh its loss; ignore it where the branch is meant to start at zero (LayerScale, "
        "zero-initialised residual, query and key projections)",
        {"share": share, "steps": len(evidence.views)},
    )  # fmt: skip
    return draft.at(view.nodes[key])


__all__ = ["over_steps", "saturated", "scale_break", "slope", "starved"]
