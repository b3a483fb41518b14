"""Dead units: activations that never fire, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxgrad.diagnosis.check import Draft, Evidence, number
from fxgrad.diagnosis.kinds import NORMS, WEIGHTED, constant
from fxgrad.diagnosis.local import is_last, one_sided
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight, scale
from fxgrad.diagnosis.zeros import silent
from fxgrad.schema import Finding, Node, Severity, Site, Statistics

_FAINT = 0.2  # rms of an input below which a bias of the usual size outweighs it: no fault of the bias
_FEW = 4  # the same where all of the model goes through it, over as many entries each as ``_ALONE``
_ALONE = 16  # units of which it is no accident that none fires in one step
_RECTIFY = frozenset({"relu", "relu6", "clamp", "hardswish", "hardsigmoid", "gelu", "silu", "mish", "elu"})
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
        if _elsewhere(evidence.view, node) or _nothing_came(evidence.view, node):
            continue
        death = _death(evidence, sites[0])
        if death.units and death.of and (severity := _severity(evidence, node.key, death)) is not None:
            yield _dead(evidence, node, death, severity)


def _nothing_came(view: FlowView, node: Node) -> bool:
    """Whether what an activation took is zero all over: then the zeros come from before it."""
    taken = [view.by_id[e.producer + e.output_position].value for e in view.takes[node.key]
             if e.producer + e.output_position in view.by_id]  # fmt: skip
    return bool(taken) and all(value is not None and value.all_zero for value in taken)


def _elsewhere(view: FlowView, node: Node) -> bool:
    """Whether a clamp lies at a limit other than 0, which is saturation."""
    value = view.sites[node.key][0].value
    return view.kinds[node.key] == "clamp" and not one_sided(node) and value is not None and bool(value.max_abs)


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


def _severity(evidence: Evidence, key: str, death: Death) -> Severity | None:
    limits = evidence.thresholds
    share = len(death.units) / death.of
    if len(death.units) == death.of and (death.cause is not None or death.of >= _ALONE):
        return "error"
    sole = share == 1 and death.of >= _FEW and death.samples >= _ALONE and evidence.view.separates(key)
    if sole or (death.cause is not None and share >= limits.dead_caused):
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
    reach = (scale(weight) or 0.0) * max(inputs[0].rms, _FAINT)
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
    if (shift.max_abs or 0.0) < evidence.thresholds.dead_margin * reach:
        return False  # many small ones don't make a large one
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
    if is_last(view, node.key):
        mend = "drop the activation at the model's output: targets below 0 are out of its reach; otherwise " + mend
    numbers = {"dead_fraction": share, "dead_units": len(death.units), "units": death.of, "samples": death.samples}
    draft = Draft(evidence, "dead", severity, message, mend, numbers)
    if share < 1:  # the others fire: where all before them is exactly zero, something else makes it so
        return draft.at(node, units=death.units)
    return draft.at(node, units=death.units, path=view.way_back(node.key), affected=silent(view, node.key))
