"""Dead units and exact zeros: who passes nothing back, and whether that is by design."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxgrad.diagnosis.kinds import NORMS, PIECEWISE_CONSTANT, SCALING, WEIGHTED, constant
from fxgrad.diagnosis.rule import Draft, Evidence, listed, number
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import factor, main_weight, scale
from fxgrad.schema import Finding, Node, ParameterRecord, Severity, Site, Statistics

_ALONE = 16  # units of which it is no accident that none fires in one step
_RECTIFY = frozenset({"relu", "relu6", "clamp", "maximum", "hardswish", "hardsigmoid", "gelu", "silu", "mish", "elu"})
_PASSING = frozenset({"dropout", *NORMS, "view", "reshape", "flatten", "identity", "contiguous", "add", "max_pool",
                      "avg_pool", "adaptive_avg_pool", "unsqueeze", "squeeze", "permute", "transpose"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Death:
    """Which units of an activation never fired, over how many entries each, and what keeps them from firing."""

    units: tuple[int, ...]
    of: int
    samples: int
    cause: str | None


# ---- dead ------------------------------------------------------------------------------------------------------------


def dead(evidence: Evidence) -> Iterator[Finding]:
    """Share of units without any active entry.

    One step: only with a cause: a bias that lies ``dead_margin`` times below what the weights usually bring (rms of the
    input times the norm of a unit's weights), weights that are all negative on a positive input, or a whole activation
    of at least 16 units.  Several steps: over at least ``dead_samples`` entries per unit.

    Source: "dying ReLU" as in SageMaker Debugger (50 % of the units).  False alarms: in a deep healthy stack a batch
    leaves up to 43 % of the units of one activation silent, hence the cause.
    """
    evidence.need_values()
    for node in evidence.view.flow.nodes:
        sites = evidence.view.sites[node.key]
        if len(sites) != 1 or sites[0].activity is None or evidence.view.kinds[node.key] not in _RECTIFY:
            continue
        death = _death(evidence, sites[0])
        if death.units and death.of and (severity := _severity(evidence, death)) is not None:
            yield _dead(evidence, node, death, severity)


def _death(evidence: Evidence, site: Site) -> Death:
    never, samples, units = None, 0, 0
    for view in evidence.recent:
        now = view.by_id.get(site.id)
        if now is None or now.activity is None:
            continue
        found = set(now.activity.never)
        never = found if never is None or units != now.activity.units else never & found
        samples, units = samples + now.activity.samples, now.activity.units
    silent = tuple(sorted(never or ()))
    return Death(silent, units, samples, _cause(evidence, site.node, len(silent)) if silent else None)


def _severity(evidence: Evidence, death: Death) -> Severity | None:
    limits = evidence.thresholds
    share = len(death.units) / death.of
    if len(death.units) == death.of and (death.cause is not None or death.of >= _ALONE):
        return "error"
    if death.cause is not None and share >= limits.dead_caused:
        return "warning"
    if evidence.several and death.samples >= limits.dead_samples:
        return "warning" if share > limits.dead else "info" if share > limits.dead_info else None
    return "info" if death.cause is not None else None


def _cause(evidence: Evidence, node: Node, count: int) -> str | None:
    """What keeps ``count`` units from firing, if bias or weights of the node before do."""
    view = evidence.view
    key, offset = node.key, None
    for _ in range(6):
        producers = list(view.producers(key))
        if not producers:
            return None
        key = producers[0]
        kind = view.kinds[key]
        if kind in WEIGHTED:
            return _cause_in(evidence, view.nodes[key], count) or offset
        if kind in NORMS:
            offset = offset or _cause_in_norm(evidence, view.nodes[key], count)
        elif kind not in _PASSING and kind not in {"sub", "mul", "matmul"}:
            return offset
        if kind in {"add", "sub"}:
            offset = offset or _cause_in_sum(evidence, view, key, count)
        if kind == "matmul":
            return offset
    return offset


def _cause_in(evidence: Evidence, node: Node, count: int) -> str | None:
    """The bias, or the sign of the weights, of a linear or convolution."""
    view = evidence.view
    weight = main_weight(view, node)
    bias = next((r for r in view.records(node) if len(r.shape) == 1 and r is not weight), None)
    inputs = [view.by_id[e.producer + e.output_position].value for e in view.takes[node.key]
              if e.producer + e.output_position in view.by_id]  # fmt: skip
    if weight is None or weight.value is None or not inputs or inputs[0] is None:
        return None
    reach = (scale(weight) or 0.0) * inputs[0].rms
    if bias is not None and bias.value is not None and _weighs(evidence, bias.value, count, reach):
        return f"{bias.name} is {number((bias.value.sum or 0.0) / max(1, bias.value.numel))} on average"
    signs = all(v.sum is not None and v.abs_sum is not None for v in (weight.value, inputs[0]))
    if signs and _positive(inputs[0]) and _negative(weight.value) and (bias is None or not _positive(bias.value)):
        return f"{weight.name} is negative all over and its input positive"
    return None


def _cause_in_norm(evidence: Evidence, node: Node, count: int) -> str | None:
    """The shift of a normalisation, whose output before it has rms 1."""
    records = evidence.view.records(node)
    if len(records) < 2:  # noqa: PLR2004  # scale and shift
        return None
    gain, shift = records[0], records[1]
    if gain.value is None or shift.value is None or not _weighs(evidence, shift.value, count, gain.value.rms):
        return None
    return f"{shift.name} is {number((shift.value.sum or 0.0) / max(1, shift.value.numel))} on average"


def _cause_in_sum(evidence: Evidence, view: FlowView, key: str, count: int) -> str | None:
    """A constant or parameter that is added to the pre-activation."""
    node = view.nodes[key]
    inputs = [view.by_id[e.producer + e.output_position].value for e in view.takes[key]
              if e.producer + e.output_position in view.by_id]  # fmt: skip
    reach = inputs[0].rms if inputs and inputs[0] is not None else None
    if reach is None:
        return None
    for record in view.records(node):
        if record.value is not None and len(record.shape) <= 1 and _weighs(evidence, record.value, count, reach):
            return f"{record.name} is {number((record.value.sum or 0.0) / max(1, record.value.numel))} on average"
    found = constant(node, "args[1]", "args[0]", "other")
    if found is not None and found.number is not None:
        value = -found.number if view.kinds[key] == "sub" else found.number
        if value < -evidence.thresholds.dead_margin * reach:
            return f"the constant {found.text} lies far below"
    return None


def _weighs(evidence: Evidence, shift: Statistics, count: int, reach: float) -> bool:
    """Whether the negative part of a shift is enough to keep ``count`` units (all, for a scalar) from firing."""
    if shift.sum is None or shift.abs_sum is None:
        return False
    negative = (shift.abs_sum - shift.sum) / 2
    return negative > 0 and negative >= min(count, shift.numel) * evidence.thresholds.dead_margin * reach


def _positive(value: Statistics | None) -> bool:
    return value is not None and value.sum is not None and value.abs_sum is not None and value.sum >= value.abs_sum > 0


def _negative(value: Statistics) -> bool:
    return value.sum is not None and value.abs_sum is not None and -value.sum >= value.abs_sum * (1 - 1e-6) > 0


def _dead(evidence: Evidence, node: Node, death: Death, severity: Severity) -> Finding:
    view = evidence.view
    share = len(death.units) / death.of
    message = (
        f"{len(death.units)} of {death.of} units of {view.source_words(node.key)} never fired in {death.samples} "
        "entries each" + (f"; likely: {death.cause}" if death.cause else "")
    )
    mend = (
        "check the step in which it began (lower the learning rate), set the bias back to 0, use He initialisation, "
        "normalise the inputs, or use LeakyReLU or GELU"
    )
    numbers = {"dead_fraction": share, "dead_units": len(death.units), "units": death.of, "samples": death.samples}
    draft = Draft(evidence, "dead", severity, message, mend, numbers)
    path = (node.key, *sorted(view.before(node.key), key=view.order.__getitem__, reverse=True))
    return draft.at(node, units=death.units, path=path if share == 1 else (), affected=silent(view, node.key))


# ---- zeros -----------------------------------------------------------------------------------------------------------


def silent(view: FlowView, key: str) -> tuple[str, ...]:
    """The parameters of and before a node whose gradient is exactly zero."""
    keys = {key} | view.before(key)
    quiet = (r for r in view.flow.parameters if r.statistics is not None and r.statistics.all_zero)
    names = [r.name for r in quiet if keys.intersection(view.owners.get(r.name, ()))]
    return tuple(names)


def blockers(view: FlowView) -> list[Node]:
    """The nodes that got a gradient and send exact zeros to every value, nearest to the loss first."""
    found = []
    for node in reversed(view.flow.nodes):
        parts = view.parts(node.key)
        if node.op != "output" and view.received(node.key) and parts and all(s.all_zero for _, s in parts):
            found.append(node)
    return found


def zero(evidence: Evidence) -> Iterator[Finding]:
    """A node that got a gradient sends back exact zeros, and parameters before it get nothing else.

    Several steps: in each of the recent flows.  Zero by design is no fault: a zero-initialised weight that itself gets
    a gradient (head, LoRA B, gamma), a gate or mask that was computed from the data (idle expert, padding).
    """
    for node in blockers(evidence.view):
        hit = silent(evidence.view, node.key)
        if not hit or not all(any(n.key == node.key for n in blockers(view)) for view in evidence.recent):
            continue
        found = _judge(evidence, node)
        if found is not None:
            severity, culprit, cause, mend = found
            draft = Draft(
                evidence, "zero", severity,
                f"{evidence.view.source_words(culprit.key)} passes nothing back: the gradient of {listed(hit)} is "
                f"exactly zero; {cause}",
                mend, {"parameters": len(hit), "received": evidence.view.received(node.key) or 0.0},
            )  # fmt: skip
            path = (
                node.key,
                *sorted(evidence.view.before(node.key), key=evidence.view.order.__getitem__, reverse=True),
            )
            yield draft.at(culprit, path=path, affected=hit)


_Verdict = tuple[Severity, Node, str, str]


def _judge(evidence: Evidence, node: Node) -> _Verdict | None:
    """What to say of a node that blocks; None where another rule says it."""
    view = evidence.view
    kind = view.kinds[node.key]
    if kind in PIECEWISE_CONSTANT:
        return (
            "error",
            node,
            f"the derivative of {kind} is zero everywhere",
            ("pass the gradient straight through (x + (f(x) - x).detach()), or use a soft version of the operation"),
        )
    if kind in {"mul", "div", "matmul"}:
        return _zero_factor(evidence, node)
    if kind in SCALING:
        return _zero_weight(evidence, node)
    if kind in NORMS:
        return (
            "warning",
            node,
            "it normalises over single entries, so that its output is constant",
            ("normalise over a dimension with more than one entry"),
        )
    if kind in _RECTIFY or kind in {"softmax", "sigmoid", "tanh"}:
        activity = view.sites[node.key][0].activity if view.sites[node.key] else None
        if view.flow.event.values and (kind not in _RECTIFY or (activity is not None and activity.active == 0)):
            return None  # ``dead`` or ``saturated`` judges it
    return "info", node, "at these values its derivative is zero", "look at its inputs; this may be one odd batch"


def _zero_factor(evidence: Evidence, node: Node) -> _Verdict | None:
    """A product with something that is zero all over."""
    view = evidence.view
    by_design = "info", node, "the other factor is zero all over in this step", (
        "nothing to mend where this is an idle branch, a gate that is shut or padding"
    )  # fmt: skip
    if any(c.number == 0 for c in node.constants if c.argument in {"args[0]", "args[1]", "kwargs['other']"}):
        return "error", node, "it multiplies by the constant 0", "drop the branch, or give it a factor other than 0"
    record = factor(view, node.key)
    if record is not None and record.value is not None and record.value.max_abs == 0:
        return _of_zero_parameter(evidence, node, record)
    fixed = [name for name in node.parameters if _zero_buffer(view, name)]
    for producer in view.producers(node.key):
        site = next(iter(view.sites[producer]), None)
        all_zero = site is not None and site.value is not None and bool(site.value.all_zero)
        if all_zero and not list(view.producers(producer)) and view.nodes[producer].op != "placeholder":
            fixed.append(producer)
    if fixed:
        return (
            "error",
            node,
            f"it multiplies by {fixed[0]}, which is zero all over and never changes",
            ("check the mask: it shuts the branch off for good"),
        )
    return by_design if view.flow.event.values else None


def _zero_buffer(view: FlowView, name: str) -> bool:
    return any(b.name == name and b.value.max_abs == 0 and not b.value.nonfinite for b in view.flow.buffers)


def _zero_weight(evidence: Evidence, node: Node) -> _Verdict | None:
    record = main_weight(evidence.view, node)
    if record is None or record.value is None:
        return None
    if record.value.max_abs == 0:
        return _of_zero_parameter(evidence, node, record)
    return None if _half(evidence.view, node) else (
        "warning", node, "its output gradient is lost in it", "look at the sizes of its weight and of what it receives"
    )  # fmt: skip


def _half(view: FlowView, node: Node) -> bool:
    """Whether half precision takes part, so that ``underflow`` judges it."""
    return any(site.dtype in {"float16", "bfloat16"} for site in view.sites[node.key])


def _of_zero_parameter(evidence: Evidence, node: Node, record: ParameterRecord) -> _Verdict:
    """Zero-initialised: no fault where it gets a gradient itself and so will leave zero."""
    if record.requires_grad and record.statistics is not None and not record.statistics.all_zero:
        return (
            "info",
            node,
            f"{record.name} is zero and gets a gradient itself, as in a zero-initialised branch or head",
            ("nothing: after the first step it passes a gradient on"),
        )
    view = evidence.view
    before = sorted(view.before(node.key), key=view.order.__getitem__, reverse=True)
    zeros = (view.nodes[key] for key in before if _is_zero(view, key))
    culprit = next(zeros, node)
    return (
        "error",
        culprit,
        f"{record.name} is zero and gets no gradient either, so that nothing will ever change",
        ("initialise the weights at random: of two factors in a row only one may begin at zero"),
    )


def _is_zero(view: FlowView, key: str) -> bool:
    record = main_weight(view, view.nodes[key]) if view.kinds[key] in WEIGHTED else None
    return record is not None and record.value is not None and record.value.max_abs == 0
