"""Exact zeros: who got a gradient and passes nothing back, and whether that is by design."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed
from fxgrad.diagnosis.kinds import (
    MARGINS,
    NORMS,
    PIECEWISE_CONSTANT,
    RECTIFIERS,
    SCALING,
    SELECTING,
    WEIGHTED,
    constant,
)
from fxgrad.diagnosis.local import is_last, one_entry
from fxgrad.diagnosis.looks_zero import looks_zero
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import factor, main_weight, taken
from fxgrad.schema import Finding, Node, ParameterRecord, Severity

_ROUNDING = 1e-3  # of what a node received, below which the gradient of what lies before it is none
_ONE_ENTRY = (
    "it normalises over single entries, so that its output is constant",
    "normalise over a dimension with more than one entry",
)


def silent(view: FlowView, key: str) -> tuple[str, ...]:
    """The parameters of and before a node whose gradient is exactly zero."""
    quiet: list[tuple[str, int]] | None = view.memo.get("silent")
    if quiet is None:
        records = [r for r in view.flow.parameters if r.statistics is not None and r.statistics.all_zero]
        quiet = [(r.name, view.bits(view.owners.get(r.name, ()))) for r in records]
        view.memo["silent"] = quiet
    found: tuple[str, ...] | None = view.memo.get(("silent", key))
    if found is None:
        back = view.bits_back(key)
        found = view.memo["silent", key] = tuple(name for name, owners in quiet if owners & back)
    return found


def blockers(view: FlowView) -> list[Node]:
    """The nodes that got a gradient and send exact zeros to every value, nearest to the loss first."""
    known: list[Node] | None = view.memo.get("blockers")
    if known is None:
        known = view.memo["blockers"] = _blockers(view)
    return known


def _blockers(view: FlowView) -> list[Node]:
    found = []
    for node in reversed(view.flow.nodes):
        parts = view.parts(node.key)
        if node.op == "output" or not parts or not all(s.all_zero or not s.numel for _, s in parts):
            continue
        if view.received(node.key):
            found.append(node)
        elif (around := view.function_around(node.key)) is not None and view.received(around):
            found.append(view.nodes[around])
    return list(dict.fromkeys(found))


def zero(evidence: Evidence) -> Iterator[Finding]:
    """A node that got a gradient sends back exact zeros, and parameters before it get nothing else.

    Several steps: in each of the recent flows.  Zero by design is no fault: a zero-initialised weight that itself gets
    a gradient (head, LoRA B, gamma), a gate or mask that was computed from the data (idle expert, padding).
    """
    single = [node for node in evidence.view.flow.nodes if _normalises_one(evidence.view, node)]
    always = set.intersection(*({node.key for node in blockers(view)} for view in evidence.recent))
    for node in single:
        yield from _constant(evidence, node)
    for node in blockers(evidence.view):
        if node in single:
            continue
        hit = silent(evidence.view, node.key) if node.key in always else ()
        if not hit:
            continue
        found = _judge(evidence, node)
        if found is not None:
            culprit = found.node
            draft = Draft(
                evidence, "zero", evidence.at_most(found.severity),
                f"{evidence.view.source_words(culprit.key)} passes nothing back: the gradient of {listed(hit)} is "
                f"exactly zero; {found.cause}",
                found.mend, {"parameters": len(hit), "received": evidence.view.received(node.key) or 0.0},
            )  # fmt: skip
            yield draft.at(culprit, path=evidence.view.way_back(node.key), affected=hit)
    yield from _not_chosen(evidence)
    yield from _cancelled(evidence)
    yield from looks_zero(evidence)
    measured = (*evidence.view.flow.sites, *evidence.view.flow.parameters)
    if any(one.statistics is not None and one.statistics.outside_range for one in measured):
        message = "at statistics='norm' a norm of 0 may be one below float32's range; it is measured in full next time"
        raise LackingError(message, give="statistics='full'")


def _normalises_one(view: FlowView, node: Node) -> bool:
    """Whether a layer or group normalisation is over single entries, read off its settings and shapes."""
    shape = view.sites[node.key][0].shape if view.sites[node.key] else ()
    if view.kinds[node.key] == "layer_norm":
        given = constant(node, "normalized_shape", "args[1]")
        sizes = re.findall(r"\d+", given.text) if given is not None else []
        return bool(sizes) and all(int(size) == 1 for size in sizes)
    if view.kinds[node.key] == "group_norm":
        groups = constant(node, "num_groups", "args[1]")
        return groups is not None and bool(groups.number) and _entries(shape[1:]) == groups.number
    return False


def _entries(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _constant(evidence: Evidence, node: Node) -> Iterator[Finding]:
    """What such a normalisation sends back is zero, or what rounding leaves of it."""
    view = evidence.view
    received, back = view.received(node.key) or 0.0, view.bits_back(node.key) & ~view.bits([node.key])
    hit = tuple(
        r.name for r in view.flow.parameters
        if r.statistics is not None and r.statistics.l2_norm < _ROUNDING * received
        and view.bits(view.owners.get(r.name, ())) & back
    )  # fmt: skip
    if hit:
        cause, mend = _ONE_ENTRY
        draft = Draft(
            evidence, "zero", evidence.at_most("warning"),
            f"{view.source_words(node.key)} passes nothing back: the gradient of {listed(hit)} is zero, or what "
            f"rounding leaves of it; {cause}",
            mend, {"parameters": len(hit), "received": received},
        )  # fmt: skip
        yield draft.at(node, path=view.way_back(node.key), affected=hit)


def _cancelled(evidence: Evidence) -> Iterator[Finding]:
    """A value whose uses send back parts that add up to exact zeros: it is subtracted from itself."""
    view = evidence.view
    for site in reversed(view.flow.sites):
        parts = [(e, p) for e in view.uses.get(site.id, []) if (p := e.statistics) is not None and p.l2_norm > 0]
        if len(parts) < 2 or site.statistics is None or not site.statistics.all_zero:  # noqa: PLR2004  # one can't cancel
            continue
        hit = silent(view, site.key)
        last = meeting(view, {edge.consumer.key for edge, _ in parts})
        if hit:
            draft = Draft(
                evidence, "zero", evidence.at_most("warning"),
                f"the parts that the uses of {site.id} send back cancel exactly, up to {view.source_words(last)}: the "
                f"gradient of {listed(hit)} is exactly zero",
                _of_cancelling(view, site.key, last),
                {"parameters": len(hit), "largest_part": max(part.l2_norm for _, part in parts)},
            )  # fmt: skip
            yield draft.at(view.nodes[last], path=view.way_back(site.key), affected=hit)
            return


def _of_cancelling(view: FlowView, key: str, last: str) -> str:
    """What to try where parts cancel; around a rounding it is a straight-through estimate that lacks its detach."""
    between = [k for k in (*view.before(last), last) if view.kinds[k] in PIECEWISE_CONSTANT and view.depends(k, on=key)]
    if between:
        return f"detach the difference of the straight-through estimate: x + ({view.kinds[between[0]]}(x) - x).detach()"
    return "the value is subtracted from itself, or centred over a single entry: check the operands and the batch"


def meeting(view: FlowView, keys: set[str]) -> str:
    """The first node that all of these lead to: where two ways of one value come together again."""
    for node in view.flow.nodes:
        if all(key == node.key or view.depends(node.key, on=key) for key in keys):
            return node.key
    return max(keys, key=view.order.__getitem__)


def _not_chosen(evidence: Evidence) -> Iterator[Finding]:
    """A selection that sends zeros to one of its inputs, and what it chose to another: information."""
    view = evidence.view
    for node in reversed(view.flow.nodes):
        if view.kinds[node.key] not in SELECTING or not view.received(node.key):
            continue
        parts = view.parts(node.key)
        idle = [edge for edge, part in parts if part.all_zero]
        hit = silent(view, idle[0].producer) if idle and len(idle) < len(parts) else ()
        if hit:
            draft = Draft(
                evidence, "zero", "info",
                f"{view.source_words(node.key)} chose nothing of {idle[0].producer}; zero gradient: {listed(hit)}",
                "nothing, where another step chooses it; otherwise check what selects", {"parameters": len(hit)},
            )  # fmt: skip
            yield draft.at(node, affected=hit)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What to say of a node that blocks."""

    severity: Severity
    node: Node
    cause: str
    mend: str


def _judge(evidence: Evidence, node: Node) -> _Verdict | None:  # noqa: PLR0911  # one return a reason
    """What to say of a node that blocks; None where another check says it."""
    view = evidence.view
    kind = view.kinds[node.key]
    if kind in PIECEWISE_CONSTANT:
        mend = "pass the gradient straight through (x + (f(x) - x).detach()), or use a soft version of the operation"
        return _Verdict("error", node, f"the derivative of {kind} is zero everywhere", mend)
    for kinds, judge in (
        ({"mul", "div", "matmul"}, _zero_factor),
        (SCALING - {"external"}, _zero_weight),
        (NORMS, _zero_scale),
        ({"softmax"}, _single),
        (MARGINS, _met),
    ):
        if kind in kinds:
            return judge(evidence, node)
    if kind in RECTIFIERS | {"relu", "sigmoid", "tanh", "gelu", "silu", "mish", "elu"} and view.flow.event.values:
        return None  # ``dead`` or ``saturated`` judges it
    if kind == "dropout" and (share := constant(node, "p", "args[1]")) is not None and share.number == 1:
        mend = "p is the share that is dropped: give 1 - keep_prob (0.1 to 0.5 is usual)"
        return _Verdict("error", node, "with p=1 it drops every entry", mend)
    if kind in SELECTING:
        mend = "nothing, where that branch was not chosen in this step; otherwise check what selects"
        return _Verdict("warning" if view.separates(node.key) else "info", node, "it selected nothing of it", mend)
    record = next((r for r in taken(view, node.key) if r.value is not None and r.value.max_abs == 0), None)
    if record is not None:
        return _of_zero_parameter(evidence, node, record)
    mend = "look at its inputs and settings, and at its backward where it is a function of your own"
    return _Verdict("warning", node, "at these values its derivative is zero", mend)


_MET = (
    "every margin is met, so that the loss is 0 for these samples",
    "nothing to mend: harder samples (mining) or a larger margin bring a gradient again",
)


def _met(evidence: Evidence, node: Node) -> _Verdict:
    """A loss whose every margin is met: there is nothing left to learn from these samples."""
    del evidence
    return _Verdict("info", node, *_MET)


def _is_hinge(view: FlowView, node: Node) -> bool:
    """Whether a rectifier is part of a loss: no weights behind it, and all that comes of it are single numbers."""
    behind = view.behind(node.key)
    kind = view.kinds[node.key]
    if kind not in {"relu", "clamp", "maximum", "max"} or any(view.kinds[k] in WEIGHTED for k in behind):
        return False
    ends = [site for key in behind if is_last(view, key) for site in view.sites[key]]
    return bool(ends) and all(math.prod(site.shape) == 1 for site in ends)


def _single(evidence: Evidence, node: Node) -> _Verdict | None:
    """A softmax over single entries; by the shape of a weight always so, else it may be one short sequence."""
    view = evidence.view
    if view.flow.event.values and not one_entry(view, node.key):
        return None  # ``saturated`` judges it
    weights = [main_weight(view, view.nodes[key]) for key in view.producers(node.key) if view.kinds[key] in WEIGHTED]
    always = is_last(view, node.key) or any(w is not None and w.shape[0] == 1 for w in weights)
    cause = "a softmax over single entries is 1, whatever its input"
    lasting: Severity = "warning" if evidence.several else "info"
    mend = "use sigmoid for a single score, or check the dimension of the softmax"
    if any(view.kinds[key] == "topk" and _is_one(view.nodes[key]) for key in view.before(node.key)):
        cause = "a softmax over the single score that topk(1) leaves is 1, whatever the scores"
        mend = "take the softmax over all scores first, then topk of it, so that the router gets a gradient"
        return _Verdict(lasting, node, cause, mend)
    if not always:
        mend = "nothing, where this was a sequence of one entry; otherwise check the dimension of the softmax"
    return _Verdict("error" if always else lasting, node, cause, mend)


def _is_one(topk: Node) -> bool:
    """Whether a topk leaves one entry."""
    count = constant(topk, "k", "args[1]")
    return count is not None and count.number == 1


def _zero_scale(evidence: Evidence, node: Node) -> _Verdict | None:
    """A normalisation: by a scale that begins at zero, or over single entries."""
    gain = main_weight(evidence.view, node)
    if gain is not None and (gain.value is None or gain.value.max_abs == 0):
        return None if gain.value is None else _of_zero_parameter(evidence, node, gain)
    return _Verdict("warning", node, *_ONE_ENTRY)


def _zero_factor(evidence: Evidence, node: Node) -> _Verdict | None:
    """A product with something that is zero all over."""
    view = evidence.view
    if any(c.number == 0 for c in node.constants if c.argument in {"args[0]", "args[1]", "kwargs['other']"}):
        mend = "drop the branch, or give it a factor other than 0"
        return _Verdict("error", node, "it multiplies by the constant 0", mend)
    record = factor(view, node.key)
    if record is not None and record.value is not None and record.value.max_abs == 0:
        return _of_zero_parameter(evidence, node, record)
    fixed = [name for name in node.parameters if _zero_buffer(view, name)]
    for producer in view.producers(node.key):
        site = next(iter(view.sites[producer]), None)
        all_zero = site is not None and site.value is not None and bool(site.value.all_zero)
        created = view.kinds[producer] in {"zeros", "zeros_like", "new_zeros"}  # an initial state
        if all_zero and not created and not list(view.producers(producer)) and view.nodes[producer].op != "placeholder":
            fixed.append(producer)
    if not fixed and not node.parameters and len(view.takes[node.key]) == 1 and not node.constants:
        fixed.append("a tensor from outside of the model's buffers")
    if fixed:
        cause = f"it multiplies by {fixed[0]}, which is zero all over and never changes"
        return _Verdict("error", node, cause, "check the mask: it shuts the branch off for good")
    mend = "nothing to mend where this is an idle branch, a gate that is shut or padding"
    sole, long = view.separates(node.key), _shut(evidence, node)
    mend = f"check what shuts it: it was so in all {len(evidence.views)} backward passes" if long else mend
    verdict = _Verdict("warning" if sole or long else "info", node, "the other factor is zero all over in this step",
                       "check the mask: all that the model computes goes through it" if sole else mend)  # fmt: skip
    return verdict if view.flow.event.values else None


def _shut(evidence: Evidence, node: Node) -> bool:
    """Whether a node let nothing through in any of many flows."""
    views = evidence.views
    return len(views) >= evidence.thresholds.idle and all(node in blockers(view) for view in views)


def _zero_buffer(view: FlowView, name: str) -> bool:
    return any(b.name == name and b.value.max_abs == 0 and not b.value.nonfinite for b in view.flow.buffers)


def _zero_weight(evidence: Evidence, node: Node) -> _Verdict | None:
    record = main_weight(evidence.view, node)
    if record is None or record.value is None:
        return None
    if record.value.max_abs == 0:
        return _of_zero_parameter(evidence, node, record)
    if _half(evidence.view, node):
        return None
    mend = "look at the sizes of its weight and of what it receives"
    return _Verdict("warning", node, "its output gradient is lost in it", mend)


def _half(view: FlowView, node: Node) -> bool:
    """Whether half precision takes part, so that ``underflow`` judges it."""
    return any(site.dtype in {"float16", "bfloat16"} for site in view.sites[node.key])


def _of_zero_parameter(evidence: Evidence, node: Node, record: ParameterRecord) -> _Verdict:
    """Zero-initialised: no fault where it gets a gradient itself and so will leave zero."""
    if record.requires_grad and record.statistics is not None and not record.statistics.all_zero:
        cause = f"{record.name} is zero and gets a gradient itself, as in a zero-initialised branch or head"
        return _Verdict("info", node, cause, "nothing: after the first step it passes a gradient on")
    view = evidence.view
    before = view.before(node.key)
    zeros = (view.nodes[key] for key in before if _is_zero(view, key))
    culprit = next(zeros, node)
    cause = f"{record.name} is zero and gets no gradient either, so that nothing will ever change"
    mend = "initialise the weights at random: of two factors in a row only one may begin at zero"
    return _Verdict("error", culprit, cause, mend)


def _is_zero(view: FlowView, key: str) -> bool:
    record = main_weight(view, view.nodes[key]) if view.kinds[key] in WEIGHTED else None
    return record is not None and record.value is not None and record.value.max_abs == 0


def nothing_learnt(evidence: Evidence) -> Iterator[Finding]:
    """Where no other check raised an alarm: the loss sends a gradient, and every parameter gets exact zeros."""
    view = evidence.view
    trained = [r for r in view.flow.parameters if r.statistics is not None]
    arrived = any(view.received(node.key) for node in view.flow.nodes)
    if any(view.kinds[node.key] in MARGINS for node in blockers(view)[:1]):
        return  # told already
    if not trained or not arrived or not all(r.statistics is not None and r.statistics.all_zero for r in trained):
        return
    node = next(iter(blockers(view)), None)
    where = "before it reaches a parameter" if node is None else f"at {view.source_words(node.key)}"
    why, mend = (
        "",
        ("look at the inputs of that operation: all of them lie where its derivative is zero, in this batch at least"),
    )
    hinge = node is not None and _is_hinge(view, node)
    if hinge:
        why, mend = f"; {_MET[0]}", _MET[1]
    draft = Draft(
        evidence, "zero", "info" if hinge else evidence.at_most("warning"),
        f"every parameter's gradient is exactly zero: it ends {where}{why}", mend, {"parameters": len(trained)},
    )  # fmt: skip
    path = () if node is None else view.way_back(node.key)
    yield draft.at(node, path=path, affected=tuple(r.name for r in trained))
