"""One cause, one finding: what another finding explains becomes its consequence."""

from __future__ import annotations

from dataclasses import replace

from fxgrad.diagnosis.check import Evidence
from fxgrad.diagnosis.kinds import kind_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import RULES, Finding

#: What numbers say little about once a gradient is non-finite.
_NUMERIC = frozenset({
    "vanishing", "exploding", "scale_break", "dead", "zero", "saturated", "starved", "underflow", "overflow_risk",
    "spike", "symmetry", "loss_seed", "optimizer_epsilon",
})  # fmt: skip
_GRAVITY = {"error": 0, "warning": 1, "info": 2}
#: What the rules about the optimizer explain, once they are errors or warnings.
_TRAINING = {
    "optimizer_idle": frozenset({"update_size", "optimizer_epsilon", "weight_decay"}),
    "zero_grad_missing": frozenset({"update_size", "spike", "exploding", "loss_seed", "overflow_risk", "nonfinite"}),
    "weight_decay": frozenset({"update_size", "vanishing", "zero", "underflow", "optimizer_epsilon"}),
    "update_lost": frozenset({"update_size"}),
}
_LOCAL = frozenset({"scale_break", "saturated", "dead", "zero", "underflow", "symmetry"})
#: What is read off the graph or the loss.
_BY_STRUCTURE = frozenset({"target_range", "double_activation", "cancelled"})
#: The checks whose findings may explain another one.
_CAUSES = frozenset({
    *_TRAINING, "spike", "nonfinite", "update_size", "vanishing", "exploding", "starved", *_BY_STRUCTURE, *_LOCAL,
})  # fmt: skip
#: Operations that have no value, or no derivative, for some numbers of an ordinary size.
_BOUNDED = frozenset({"log", "sqrt", "rsqrt", "pow", "div", "acos", "asin", "acosh", "atanh", "logit", "erfinv"})
_LEAP = 10.0  # by which the gain of a node rises out of the blue, where steps that overshoot let it grow
_ORDINARY = 1e3  # of what an operation takes: above it the values have run away
_MANY = 3  # findings of one check and severity that are shown side by side; the others stand inside of the first
_GROUPED = frozenset({"saturated", "starved", "scale_break"})


def joined(evidence: Evidence, findings: list[Finding]) -> list[Finding]:
    """The findings that are causes, each with those that it explains."""
    causes: dict[int, int] = {}
    able = [(n, f) for n, f in enumerate(findings) if f.rule in _CAUSES]
    for number, finding in enumerate(findings):
        for other, cause in able:
            if number != other and explains(evidence, cause, finding) and _root(causes, other) != number:
                causes[number] = other
                break
    result = []
    for number, finding in enumerate(findings):
        if number not in causes:
            own = tuple(f for n, f in enumerate(findings) if n in causes and _root(causes, n) == number)
            grave = min((finding, *own), key=lambda f: _GRAVITY[f.severity]).severity
            result.append(replace(finding, consequences=own, severity=grave) if own else finding)
    return _folded(result)


def _folded(findings: list[Finding]) -> list[Finding]:
    """Of many findings of one check and severity a few, the others inside of the first: "12 more of this kind"."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.rule, finding.severity), []).append(finding)
    result = []
    for finding in findings:
        group = alike[finding.rule, finding.severity]
        if finding.rule not in RULES:  # a check of the user's own is shown as it is
            result.append(finding)
        elif finding is group[0] and len(group) > _MANY:
            result.append(replace(finding, consequences=(*finding.consequences, *group[_MANY:])))
        elif any(finding is one for one in group[:_MANY]):
            result.append(finding)
    return result


def _root(causes: dict[int, int], number: int) -> int:
    while number in causes:
        number = causes[number]
    return number


def explains(evidence: Evidence, cause: Finding, finding: Finding) -> bool:  # noqa: PLR0911  # one return a reason
    """Whether ``cause`` is why ``finding`` was made."""
    if finding.severity == "info" and cause.severity == "info":
        return cause.rule == finding.rule and finding.rule in _GROUPED and _earlier(evidence, cause, finding)
    if cause.severity == "info":
        return False
    if finding.rule == "optimizer_idle" and finding.evidence.keys() & {"left", "learning_rate"}:
        # What exploded had to be clipped, and what vanished moves nothing.
        return cause.rule in {"exploding", "scale_break", "vanishing", *_LOCAL}
    if cause.rule in _TRAINING:
        return finding.rule in _TRAINING[cause.rule]
    if cause.rule == "nonfinite":
        return _follows_nonfinite(cause, finding) or _same_line(evidence, cause, finding)
    if _ruins(cause, finding):
        return True
    if cause.rule == "update_size" and cause.severity == "error":
        later = (finding.backward or 0) > (cause.backward or 0)
        return later and finding.rule in _NUMERIC | {"nonfinite"} and not _by_itself(finding)
    if cause.rule in _BY_STRUCTURE or _shows_at_steps(cause, finding):
        return _explains_there(cause, finding)
    if cause.rule == finding.rule and finding.rule in _GROUPED:
        return _earlier(evidence, cause, finding)
    return _explains_locally(evidence, cause, finding)


def _ruins(cause: Finding, finding: Finding) -> bool:
    """Whether an explosion, or one flow that was odd, is why a step was too large or made the weights non-finite."""
    exploded = cause.rule in {"exploding", "scale_break"} and cause.evidence.get("decades", 0.0) > 0
    odd = "batch_factor" in cause.evidence or cause.evidence.get("gain_factor", 0.0) > _LEAP
    if not exploded and not (cause.rule == "spike" and odd):
        return False
    stepped = finding.rule == "update_size" and finding.severity == "error"
    return (stepped or _spoilt_weights(finding)) and (finding.backward or 0) >= (cause.backward or 0)


def _by_itself(finding: Finding) -> bool:
    """Whether an operation left its domain at values of an ordinary size: no step before is to blame for that."""
    if finding.rule != "nonfinite" or finding.node is None or kind_of(finding.node) not in _BOUNDED:
        return False
    sizes = [size for name, size in finding.evidence.items() if name.startswith("input") and name.endswith("max_abs")]
    return bool(sizes) and max(sizes) < _ORDINARY


def _same_line(evidence: Evidence, cause: Finding, finding: Finding) -> bool:
    """Whether both are of one operation and one line of the source, as of a function that is called again."""
    if cause.node is None or finding.node is None or cause.node.source is None or finding.rule != "nonfinite":
        return False
    order = evidence.view.order
    here, there = (order.get(one.node.key, 0) for one in (cause, finding) if one.node is not None)
    alike = kind_of(cause.node) == kind_of(finding.node) and cause.node.source == finding.node.source
    return alike and here < there


def _follows_nonfinite(cause: Finding, finding: Finding) -> bool:
    if finding.rule == "update_size":  # a step that a scaler skipped, as after a mere warning, moves nothing
        if cause.severity != "error":
            return False
        return (finding.backward or 0) >= (cause.backward or 0) and cause.parameter is None
    return finding.rule in _NUMERIC and "running_var" not in finding.evidence


def _large_scores(view: FlowView, softmax: str, product: str) -> bool:
    """Whether the scores of an attention are what is large, to its softmax and to the products around it.

    So from the first softmax on: scores that grow on the way through the model are a consequence.
    """
    first = next((key for key, kind in view.kinds.items() if kind == "softmax"), None)
    return softmax == first and view.kinds[product] in {"matmul", "attention"}


def _shows_at_steps(cause: Finding, finding: Finding) -> bool:
    """Whether a normalisation by a variance of zero is why steps are too large."""
    return "running_var" in cause.evidence and finding.rule in {"update_size", "exploding", "spike", "nonfinite"}


def _explains_there(cause: Finding, finding: Finding) -> bool:
    """Whether a cause that is read off the graph or the loss shows in what was measured."""
    if cause.rule == "target_range":
        return finding.rule in {"update_size", "exploding", "spike", "loss_seed"} or _spoilt_weights(finding)
    if "running_var" in cause.evidence:
        return True
    if cause.node is None or finding.node is None:
        return False
    if cause.rule == "double_activation":
        return finding.rule in {"saturated", "vanishing", "scale_break"} and cause.node.key == finding.node.key
    near = finding.node.key in cause.path or cause.path[1] in finding.path
    return finding.rule in {"vanishing", "starved", "scale_break", "optimizer_epsilon", "zero"} and near


def _spoilt_weights(finding: Finding) -> bool:
    """Whether it says that weights were non-finite before their step: an earlier one did it."""
    return finding.rule == "nonfinite" and finding.node is None and finding.parameter is not None


def _earlier(evidence: Evidence, cause: Finding, finding: Finding) -> bool:
    """Of several findings of one kind the first in forward order stands for all; the graver first."""
    order = evidence.view.order
    if cause.node is None or finding.node is None:
        return False
    if evidence.view.kinds.get(cause.node.key) != evidence.view.kinds.get(finding.node.key):
        return False
    return (_GRAVITY[cause.severity], order[cause.node.key]) < (
        _GRAVITY[finding.severity],
        order[finding.node.key],
    )


def _explains_locally(evidence: Evidence, cause: Finding, finding: Finding) -> bool:  # noqa: C901, PLR0911  # the same
    if cause.node is None or finding.node is None:
        return False
    here, there = cause.node.key, finding.node.key
    if cause.rule == "saturated" and finding.rule in {"exploding", "scale_break"}:
        return _large_scores(evidence.view, here, there)
    if cause.rule in {"vanishing", "exploding"}:
        # Where no constant does it, the weight does: its consequence is what one operation shows of it.
        if finding.rule == "scale_break":
            return there in cause.path and "constant" not in finding.evidence
        scores = cause.rule == "exploding" and _large_scores(evidence.view, there, here)
        if finding.rule == "saturated" and here == there and cause.evidence.get("alone"):
            return False  # that is why
        return finding.rule in {"starved", "optimizer_epsilon", "symmetry", "saturated"} and not scores
    if cause.rule not in _LOCAL:
        return False
    if cause.rule == "scale_break" and "constant" not in cause.evidence and here == there:
        return finding.rule == "starved"
    before = here == there or evidence.view.depends(here, on=there)
    if finding.rule in {"vanishing", "exploding"}:
        return here == there or (here in finding.path and cause.severity == "error")
    if finding.rule == "zero":
        return before
    if finding.rule == "dead" and cause.rule == "dead":
        # Behind a dead activation all is constant, so that half of the units have the wrong sign.
        return cause.evidence.get("dead_fraction") == 1 and evidence.view.depends(there, on=here)
    if finding.rule == "saturated":
        return cause.rule == "scale_break" and evidence.view.depends(there, on=here)
    return finding.rule in {"starved", "underflow", "optimizer_epsilon"} and before
