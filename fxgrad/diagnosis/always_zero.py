"""Trained parameters that get exact zeros in every step: each is named, whatever the other rules made of it.

``zero``, ``dead``, ``saturated`` and others judge nodes and name the parameters that suffer.  Who is left over after
all of them is judged here, by what keeps its gradient at zero, so that no two rules can leave it to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from fxgrad.diagnosis.check import Draft, Evidence, listed
from fxgrad.diagnosis.kinds import RECTIFIERS
from fxgrad.diagnosis.missing import cuts
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight
from fxgrad.schema import Finding, Node, ParameterRecord, Severity

#: The rules whose findings name parameters without a gradient.
_NAMING = frozenset({"zero", "dead", "saturated", "detached", "unused", "underflow", "loss_seed", "nonfinite"})
_GRAVITY = {"error": 0, "warning": 1, "info": 2}
_CREATED = frozenset({"zeros", "zeros_like", "new_zeros", "full", "tensor"})
_ACTIVATIONS = RECTIFIERS | {"relu", "sigmoid", "tanh", "gelu", "silu", "mish", "elu"}


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a parameter gets nothing but zeros; the same in one sentence is the same, wherever it was seen first."""

    rule: str
    severity: Severity
    node: Node | None = field(compare=False)
    cause: str
    mend: str


def completed(evidence: Evidence, found: Sequence[Finding]) -> list[Finding]:
    """The findings, and who has exact zeros in every flow and is named by none of them: one finding for each cause.

    Where the cause is what a finding blames already, that one names them too.
    """
    findings = list(found)
    if any(finding.rule == "nonfinite" and finding.severity != "info" for finding in findings):
        return findings  # once a gradient is NaN, zeros say little
    named = {name for f in findings if f.rule in _NAMING for name in (*f.affected, f.parameter) if name is not None}
    groups: dict[_Reason, list[str]] = {}
    for record in _silent(evidence):
        if record.name not in named:
            groups.setdefault(_reason(evidence, record), []).append(record.name)
    for reason, names in groups.items():
        at = next((n for n, finding in enumerate(findings) if _same(finding, reason)), None)
        if at is None:
            findings.append(_finding(evidence, reason, tuple(names)))
        else:
            findings[at] = replace(findings[at], affected=(*findings[at].affected, *names))
    return findings


def _same(finding: Finding, reason: _Reason) -> bool:
    """Whether a finding blames the node that is the reason, and no less."""
    if finding.rule not in _NAMING or finding.node is None or reason.node is None:
        return False
    return finding.node.key == reason.node.key and _GRAVITY[finding.severity] <= _GRAVITY[reason.severity]


def _finding(evidence: Evidence, reason: _Reason, names: tuple[str, ...]) -> Finding:
    count = len(evidence.views)
    draft = Draft(
        evidence, reason.rule, evidence.at_most(reason.severity),
        f"the gradient of {listed(names)} is exactly zero" + (f" in all {count} backward passes" if count > 1 else "")
        + f": {reason.cause}",
        reason.mend, {"parameters": len(names), "backwards": count},
    )  # fmt: skip
    path = () if reason.node is None else evidence.view.way_back(reason.node.key)
    return draft.at(reason.node, parameter=names[0] if reason.node is None else None, affected=names, path=path)


def _silent(evidence: Evidence) -> list[ParameterRecord]:
    """The trained parameters of the latest flow that got zeros there, and in no other flow anything else."""
    heard = {
        r.name for view in evidence.views for r in view.flow.parameters
        if r.statistics is not None and not r.statistics.all_zero
    }  # fmt: skip
    return [
        r for r in evidence.view.flow.parameters
        if r.requires_grad and r.statistics is not None and r.statistics.all_zero and r.name not in heard
    ]  # fmt: skip


def _reason(evidence: Evidence, record: ParameterRecord) -> _Reason:
    view = evidence.view
    owners = view.owners.get(record.name, [])
    if owners and all(_empty(view, key) for key in owners):
        return _unfed(evidence, view.nodes[owners[-1]])
    arrived = [key for key in owners if view.received(key)]
    if arrived:
        return _at_work(evidence, record, arrived[-1])
    for key in reversed(owners):
        blocker = _blocker(view, key)
        if blocker is not None:
            return _blocked(evidence, blocker)
    return _from_the_loss(evidence, owners)


# ---- nothing comes in ----------------------------------------------------------------------------------------------


def _empty(view: FlowView, key: str) -> bool:
    """Whether a node returned no entries: nothing was selected for it."""
    return bool(view.sites[key]) and all(0 in site.shape for site in view.sites[key])


def _unfed(evidence: Evidence, node: Node) -> _Reason:
    """A member of a list that nothing was routed to; in some steps that is no fault."""
    long = len(evidence.views) >= evidence.thresholds.idle
    return _Reason(
        "zero", "warning" if long else "info", node, "nothing is selected for it, its input has no entries",
        "balance the routing (a load-balancing loss, noise on the router), or check its bias" if long
        else "nothing, where another step selects something",
    )  # fmt: skip


# ---- a gradient arrives, and the parameter gets none of it ---------------------------------------------------------


def _at_work(evidence: Evidence, record: ParameterRecord, key: str) -> _Reason:
    """The node got a gradient: what it takes is zero, or what it does with the parameter has no derivative here."""
    view = evidence.view
    taken = [view.by_id[e.producer + e.output_position] for e in view.takes[key]
             if e.producer + e.output_position in view.by_id]  # fmt: skip
    zeros = [site.key for site in taken if site.value is not None and site.value.all_zero and site.value.numel]
    if zeros and len(zeros) == len(taken):
        return _of_zeros(evidence, zeros[0])
    matrix = len([n for n in record.shape if n > 1]) > 1
    return _Reason(
        "zero", "warning" if evidence.several and matrix else "info", view.nodes[key],
        f"at the values that {view.source_words(key)} works with, the derivative for it is zero",
        "nothing, where other inputs bring other values; otherwise look at the inputs and settings of this operation",
    )  # fmt: skip


def _of_zeros(evidence: Evidence, key: str) -> _Reason:
    """What is multiplied with is zero all over: who made the zeros."""
    view = evidence.view
    source = view.nodes[_source(view, key)]
    kind, words = view.kinds[source.key], view.source_words(source.key)
    weight = _zero_weight(view, source)
    if weight is not None:
        return _stuck(view, source, weight)
    lasting: Severity = "warning" if evidence.several else "info"
    if source.op == "placeholder":
        alone = all(
            site.value is not None and site.value.all_zero
            for n in view.flow.nodes if n.op == "placeholder" for site in view.sites[n.key]
        )  # fmt: skip
        return _Reason(
            "zero", "warning" if alone else lasting, source, f"the model's input {source.target} is zero all over",
            "look at the data: normalisation, a cast to integers, a mask",
        )  # fmt: skip
    if kind in {"mul", "div"} and any(c.number == 0 for c in source.constants):
        return _Reason(
            "zero", "error", source, f"{words} multiplies what it takes by 0", "drop the branch, or the factor of 0"
        )
    if kind in _CREATED or not list(view.producers(source.key)):
        return _Reason(
            "zero", lasting, source, f"what it is multiplied with, {words}, is made of zeros",
            "nothing for an initial state that later steps replace; otherwise fill it, or freeze the parameter",
        )  # fmt: skip
    return _Reason(
        "zero", lasting, source, f"what it is multiplied with is zero all over, from {words} on",
        "look at the inputs and settings of that operation",
    )  # fmt: skip


def _source(view: FlowView, key: str) -> str:
    """The first node of those that made the zeros: its own inputs are not all zero, or it has none."""
    for _ in range(len(view.flow.nodes)):
        zeros = [
            e.producer for e in view.takes[key]
            if (site := view.by_id.get(e.producer + e.output_position)) is not None
            and site.value is not None and site.value.all_zero and site.value.numel
        ]  # fmt: skip
        if not zeros or _zero_weight(view, view.nodes[key]) is not None:
            return key
        key = zeros[0]
    return key


def _zero_weight(view: FlowView, node: Node) -> ParameterRecord | None:
    """The weight of a node, where it is zero all over."""
    weight = main_weight(view, node)
    return weight if weight is not None and weight.value is not None and weight.value.max_abs == 0 else None


def _stuck(view: FlowView, node: Node, weight: ParameterRecord) -> _Reason:
    """A weight that began at zero, and whose own gradient is zero: it never leaves."""
    if weight.statistics is not None and not weight.statistics.all_zero:
        return _Reason(
            "zero", "info", node, f"{weight.name} is zero and gets a gradient itself",
            "nothing: after the first step it passes a gradient on",
        )  # fmt: skip
    frozen = "it is frozen" if not weight.requires_grad else "its own gradient is zero as well"
    behind = next((k for k in view.behind(node.key) if view.kinds[k] in _ACTIVATIONS), None)
    why = f"; {view.source_words(behind)} has derivative 0 at 0" if behind and view.kinds[behind] in RECTIFIERS else ""
    return _Reason(
        "zero", "error", node, f"{weight.name} is zero all over and never leaves it: {frozen}{why}",
        "initialise it at random; a gate may begin near zero with a bias, or with an activation whose derivative at 0 "
        "is not 0 (tanh, sigmoid, GELU)",
    )  # fmt: skip


# ---- the gradient is stopped on its way ----------------------------------------------------------------------------


def _blocker(view: FlowView, key: str) -> Node | None:
    """The node behind ``key``, nearest to it, that got a gradient and sends exact zeros this way."""
    queue, seen = [key], {key}
    while queue:
        users = [edge.consumer.key for edge in view.users[queue.pop(0)]]
        for user in users:
            if view.received(user):
                return view.nodes[user]
            if user not in seen and view.received(user) is not None:  # what got no gradient at all is another way
                seen.add(user)
                queue.append(user)
    return None


def _shut(evidence: Evidence, node: Node) -> _Reason | None:
    """A product with something that is zero all over: a gate or a mask that lets nothing through in this step."""
    view = evidence.view
    zeros = [
        e.producer for e in view.takes[node.key]
        if (site := view.by_id.get(e.producer + e.output_position)) is not None
        and site.value is not None and site.value.all_zero
    ]  # fmt: skip
    if view.kinds[node.key] not in {"mul", "matmul"} or not zeros:
        return None
    source = view.nodes[_source(view, zeros[0])]
    weight = _zero_weight(view, source)
    if weight is not None:
        return _stuck(view, source, weight)
    long = len(evidence.views) >= evidence.thresholds.idle
    return _Reason(
        "zero", "warning" if long else "info", node,
        "what comes of it is multiplied by zeros, a gate or mask that is shut",
        "check what shuts it (of experts: balance the routing)" if long
        else "nothing, where another step lets something through",
    )  # fmt: skip


def _blocked(evidence: Evidence, node: Node) -> _Reason:
    view = evidence.view
    shut = _shut(evidence, node)
    if shut is not None:
        return shut
    kind, words = view.kinds[node.key], view.source_words(node.key)
    taken = [view.by_id[e.producer + e.output_position] for e in view.takes[node.key]
             if e.producer + e.output_position in view.by_id]  # fmt: skip
    values = [site.value for site in taken]
    if kind in _ACTIVATIONS and values and all(v is not None and v.all_zero for v in values):
        return _of_zeros(evidence, taken[0].key)
    lasting: Severity = "warning" if evidence.several else "info"
    if kind in _ACTIVATIONS:
        return _Reason(
            "zero", lasting, node, f"{words} passes nothing back: all of its inputs lie where its derivative is 0",
            "look at the bias and the size of what it takes; He initialisation, a smaller learning rate, or LeakyReLU",
        )  # fmt: skip
    return _Reason(
        "zero", lasting, node, f"{words} passes nothing back at these values",
        "nothing, where other inputs bring other values; otherwise look at its inputs and settings",
    )  # fmt: skip


def _from_the_loss(evidence: Evidence, owners: Collection[str]) -> _Reason:
    """No node stops it, the loss sends zeros.  Where the other way to the loss is cut, that is the fault."""
    view = evidence.view
    for key in owners:
        cut = cuts(view, key)
        if cut is not None:
            return _Reason(
                "detached", "error", view.nodes[cut],
                f"{view.source_words(cut)} cuts off the way to the loss, and the only other way brings zeros",
                "keep it a tensor of the graph: no detach, .data, .item(), torch.tensor() or no_grad on this way; a "
                "sample needs the reparameterisation trick (mean + std * noise)",
            )  # fmt: skip
    node = view.nodes[next(iter(owners))] if owners else None
    return _Reason(
        "zero", "info", node, "the loss sends nothing but zeros to what it is used for",
        "nothing, where the loss leaves it out on purpose in these steps (a weight of 0, advantages of 0)",
    )  # fmt: skip
