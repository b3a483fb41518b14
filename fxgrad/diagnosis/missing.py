"""Parameters without a gradient: cut off, never used, or frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, listed
from fxgrad.diagnosis.kinds import WEIGHTED
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import BlindSpot, Finding, Node, ParameterRecord

_CHECKPOINT = "reentrant_checkpoint"
_NUMBERED = re.compile(r"^(?P<list>.*?)(?:^|\.)\d+(?:\..*)?$")


def _lost(evidence: Evidence) -> list[ParameterRecord]:
    """Trainable parameters that got no gradient in the latest flow, nor in any other that there is."""
    views = (*evidence.views, *evidence.failed)
    got = {r.name for view in views for r in view.flow.parameters if r.statistics is not None}
    return [
        r for r in evidence.view.flow.parameters if r.reason == "not_reached" and r.registered and r.name not in got
    ]


def _spots(view: FlowView) -> dict[str, list[BlindSpot]]:
    """The blind spots of values, by node."""
    if "spots" not in view.memo:
        found: dict[str, list[BlindSpot]] = {}
        for spot in view.flow.blind_spots:
            if spot.consumer is None:
                found.setdefault(spot.key, []).append(spot)
        view.memo["spots"] = found
    spots: dict[str, list[BlindSpot]] = view.memo["spots"]
    return spots


def _cut(view: FlowView, record: ParameterRecord) -> tuple[str, str] | None:
    """Why a parameter that is used gets nothing: ``"detached"`` or ``"unused"``, and the key of the node to blame.

    None for a parameter that no node takes.
    """
    dropped = None
    for key in view.owners.get(record.name, ()):
        for spot in _spots(view).get(key, ()):
            region = _region(view, spot.cut or key)
            if region is not None:
                return "detached", region
            if spot.cut is not None:
                return "detached", view.function_around(spot.cut) or spot.cut
            if spot.reason in {"no_grad_region", "detached", "integer"}:
                return "detached", view.function_around(key) or key
        dropped = dropped or key
    if dropped is None:
        return None
    lost = _in_a_function(view, dropped)
    if lost is not None:
        return "detached", lost
    return ("detached" if view.flow.capture.asked and _scalar_at_the_end(view, dropped) else "unused"), dropped


def _in_a_function(view: FlowView, key: str) -> str | None:
    """The result of a function of the user's own that got a gradient, and whose backward gave none for this value."""
    taken = {edge.consumer.key for edge in view.users[key]}
    return next(
        (k for k in view.behind(key) if k in taken and view.nodes[k].op == "external" and view.received(k)), None
    )


def cuts(view: FlowView, key: str) -> str | None:
    """The node that takes what comes of ``key`` out of the graph, on a way that ends in what got a gradient.

    What is read as a Python number or an array and put back leaves no way: then it is the node where it was read, or
    where it came back as a tensor.
    """
    read = None
    for other in view.behind(key):
        spots = _spots(view).get(other, ())
        reasons, named = {spot.reason for spot in spots}, next((spot.cut for spot in spots if spot.cut), None)
        apart = reasons & {"detached", "no_grad_region", "integer"} or (
            view.kinds[other] == "tensor" and "no_grad_required" in reasons
        )
        if apart and any(view.received(one) for one in view.behind(other)):
            return named or other
        if not view.users[other] and (apart or ("output_unused" in reasons and _scalar_at_the_end(view, other))):
            read = read or named or other
    if not view.flow.capture.asked:
        return None
    back = [n.key for n in view.flow.nodes if view.order[n.key] > view.order[key] and _from_nowhere(view, n)]
    arrives = next((k for k in back if any(map(view.received, (k, *view.behind(k))))), None)
    numbers = read is not None and "output_unused" in {spot.reason for spot in _spots(view).get(read, ())}
    return read if read is not None and (arrives or numbers) else arrives


def _from_nowhere(view: FlowView, node: Node) -> bool:
    """Whether a node works on what no other node made: a tensor built from Python numbers, or from an array."""
    if view.takes[node.key] or node.op in ("placeholder", "output"):
        return False
    return view.kinds[node.key] == "tensor" or (view.kinds[node.key] in WEIGHTED and bool(view.received(node.key)))


def _region(view: FlowView, key: str) -> str | None:
    """Of a node in a reentrant checkpoint, the first that is in one without a gradient: one cause for all of them."""
    inside = [k for k, spots in _spots(view).items() if any(spot.reason == _CHECKPOINT for spot in spots)]
    return min(inside, key=view.order.__getitem__) if key in inside else None


def _scalar_at_the_end(view: FlowView, key: str) -> bool:
    """Whether all that comes of a node ends in single numbers, as what is read by ``.item()`` does."""
    ends = [k for k in (key, *view.behind(key)) if not view.users[k]]
    sites = [site for k in ends for site in view.sites[k]]
    return bool(sites) and all(math.prod(site.shape) == 1 for site in sites)


def _grouped(evidence: Evidence, wanted: str) -> dict[str | None, list[ParameterRecord]]:
    groups: dict[str | None, list[ParameterRecord]] = {}
    for record in _lost(evidence):
        rule, key = _cut(evidence.view, record) or ("unused", None)
        if rule == wanted:
            groups.setdefault(key, []).append(record)
    return groups


def detached(evidence: Evidence) -> Iterator[Finding]:
    """A trainable parameter is used, and all that depends on it goes through a node that carries no gradient.

    Exact: read off the graph.  A detach is no fault where every trainable parameter gets a gradient by another way
    (straight-through estimate, teacher).  Information where an optimizer was given that has none of them.
    """
    view = evidence.view
    for key, records in _grouped(evidence, "detached").items():
        node = view.nodes[str(key)]
        names = tuple(record.name for record in records)
        how, mend = _how(view, node)
        untrained = _left_out(view, names)
        if untrained:
            how, mend = f"{how}; no optimizer has them", "nothing for a teacher; requires_grad_(False) says so"
        draft = Draft(
            evidence, "detached", "info" if untrained else "error",
            f"no gradient reaches {listed(names)}: {view.source_words(node.key)} cuts it off; {how}", mend,
            {"parameters": len(names)},
        )  # fmt: skip
        path = view.way_back(node.key)
        yield draft.at(node, affected=names, path=path, confidence="exact")


def unreached(why: str) -> Finding:
    """The loss of the whole series is cut off from the model, so that there is no flow to judge."""
    return Finding(
        "detached", "error", why,
        "keep the loss a tensor that is computed from what the model returned, and call backward() on it before "
        "optimizer.step(); look for .item(), .detach(), .data, float() or torch.tensor(loss)",
        docs="findings/detached.md", confidence="exact",
    )  # fmt: skip


def _left_out(view: FlowView, names: tuple[str, ...]) -> bool:
    """Whether no optimizer of the watch has these parameters, while it has others: a teacher, a moving average."""
    facts = view.flow.optimizer
    if facts is None or not set(names) <= set(facts.missing):
        return False
    return any(r.requires_grad and r.name not in facts.missing for r in view.flow.parameters)


def _how(view: FlowView, node: Node) -> tuple[str, str]:  # noqa: PLR0911  # one return a reason
    kind = view.kinds[node.key]
    reasons = {spot.reason for spot in _spots(view).get(node.key, ())}
    if kind in {"detach", "data"}:
        return f"{kind} takes the value out of the graph", (
            "remove it, or freeze what lies before it (requires_grad_(False)) if that is meant"
        )
    if node.op == "external":
        return "its backward returns no gradient for it", "return a gradient from the backward of this function"
    if reasons <= {"output_unused", "not_reached"}:
        return "what comes of it is read as a Python number (.item(), float())", "keep it a tensor until the loss"
    if _CHECKPOINT in reasons:
        return (
            "it ran in a reentrant checkpoint none of whose inputs requires a gradient, so that nothing comes back",
            (
                "use checkpoint(..., use_reentrant=False), or let an input require a gradient "
                "(model.enable_input_require_grads() in transformers)"
            ),
        )
    if "no_grad_region" in reasons:
        return "it ran where gradients are switched off", "move it out of torch.no_grad() or inference_mode()"
    if "integer" in reasons:
        return f"{kind} returns integers or booleans", (
            "use a soft version (softmax, sigmoid), Gumbel-softmax, or a straight-through estimate"
        )
    return "its output requires no gradient", "use an operation that torch can differentiate"


def unused(evidence: Evidence) -> Iterator[Finding]:
    """A trainable parameter takes no part in what the loss is made of.

    Exact.  Information only where other members of the same list got a gradient (an expert that was not routed to),
    and for no more than ``idle`` backward passes.
    """
    view = evidence.view
    for key, records in _grouped(evidence, "unused").items():
        # Where the forward asked for a value, another input may take the other way.
        idle = [r for r in records if view.flow.capture.asked or _idle(view, r.name)] if key is None else []
        busy = [r for r in records if r not in idle]
        if busy:
            yield _unused(evidence, key, busy, idle=False)
        if idle:
            yield _unused(evidence, key, idle, idle=True)


def _idle(view: FlowView, name: str) -> bool:
    """Whether a parameter belongs to a numbered member of a list of which other members got a gradient."""
    match = _NUMBERED.match(name.rpartition(".")[0])
    if match is None:
        return False
    prefix = f"{match['list']}." if match["list"] else ""
    used: dict[int, set[str]] = {}
    for record in view.flow.parameters:
        numbered = record.name.startswith(prefix) and record.name[len(prefix) :][:1].isdigit()
        if numbered and record.statistics is not None:
            used.setdefault(_number(record.name, prefix), set()).update(view.owners.get(record.name, ()))
    if not used:
        return False
    # Members that run one behind the other, all up to a number, are a loop that ends too early.
    return _number(name, prefix) < max(used) or not _in_sequence(view, used)


def _number(name: str, prefix: str) -> int:
    return int(name[len(prefix) :].partition(".")[0])


def _in_sequence(view: FlowView, used: dict[int, set[str]]) -> bool:
    """Whether a later member takes what an earlier one made."""
    first, last = used[min(used)], used[max(used)]
    return min(used) != max(used) and any(view.depends(key, on=other) for key in last for other in first)


def _unused(evidence: Evidence, key: str | None, records: list[ParameterRecord], *, idle: bool) -> Finding:
    view = evidence.view
    names = tuple(record.name for record in records)
    long = idle and len(evidence.views) >= evidence.thresholds.idle
    node = None if key is None else view.nodes[key]
    if node is None:
        message = f"{listed(names)} took no part in this forward"
        message += "; another input may use it (an idle member of a list, a branch that was not taken)" if idle else ""
        message += f", but none of {len(evidence.views)} did" if long else ""
        mend = "use the module, delete it, or freeze it (requires_grad_(False)); under data parallelism it is an error"
    elif any(site.measured for site in view.sites[node.key]):
        message = f"{view.source_words(node.key)} got a gradient, but doesn't use {listed(names)}"
        mend = "delete the parameter, or freeze it (requires_grad_(False))"
    else:
        message = f"what comes of {view.source_words(node.key)} is dropped or copied: {listed(names)} get no gradient"
        mend = "use the result in the loss, delete the module, or freeze it (requires_grad_(False))"
    severity = "info" if idle and not long else evidence.at_most("warning")
    draft = Draft(evidence, "unused", severity, message, mend, {"parameters": len(names)})
    return draft.at(node, parameter=names[0], affected=names, confidence="exact")


def frozen(evidence: Evidence) -> Iterator[Finding]:
    """Parameters with ``requires_grad=False``: information, no fault."""
    names = tuple(r.name for r in evidence.view.flow.parameters if not r.requires_grad and r.registered)
    if names:
        draft = Draft(
            evidence, "frozen", "info", f"frozen (requires_grad=False): {listed(names)}",
            "nothing, if that is meant; otherwise requires_grad_(True)", {"parameters": len(names)},
        )  # fmt: skip
        yield draft.at(None, parameter=names[0], affected=names, confidence="exact")
