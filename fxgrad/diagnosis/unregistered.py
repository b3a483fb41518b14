"""Parameters that take part and that the model does not know of, so that nobody moves, saves or trains them."""

from __future__ import annotations

from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, listed
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Finding, Node


def unregistered(evidence: Evidence) -> Iterator[Finding]:
    """Parameters that get a gradient and belong to no registered module.

    Exact: read off the forward.  Information where the optimizer that the watch was given has as many parameters that
    are none of the model's.
    """
    view = evidence.view
    users: dict[str, str] = {}
    for node in view.flow.nodes:
        if any(site.statistics is not None for site in view.sites[node.key]):
            for name in node.unregistered:
                users.setdefault(name, node.key)
    for record in view.flow.parameters:
        if not record.registered and record.statistics is not None and view.owners.get(record.name):
            users.setdefault(record.name, view.owners[record.name][0])
    if not users:
        return
    first = _user(view, next(iter(users.values())))
    names = tuple(users)
    held = [name for name in names if " " not in name or "[" in name]
    optimizer = view.flow.optimizer
    moved = optimizer is not None and optimizer.others >= len(names)
    word = "parameters get" if len(names) > 1 else "parameter gets"
    message = f"{len(names)} {word} a gradient, but no registered module has {'them' if len(names) > 1 else 'it'}: "
    message += f"{listed(names)}, first used at {view.source_words(first.key)}; "
    if moved:
        message += "the optimizer has as many others, but state_dict() and to(device) leave them out"
    else:
        message += "model.parameters() leaves them out, so no optimizer built from it moves them, nor does to(device)"
    mend = []
    if held:
        mend.append("hold modules in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList, a single tensor "
                    "as nn.Parameter")  # fmt: skip
    if len(held) < len(names):
        mend.append("make a parameter once, in __init__, and assign it to an attribute: one made in forward is new in "
                    "each call")  # fmt: skip
    draft = Draft(
        evidence, "unregistered", "info" if moved else "warning", message, "; ".join(mend), {"parameters": len(names)}
    )
    yield draft.at(first, affected=names, confidence="exact")


def _user(view: FlowView, key: str) -> Node:
    """The node itself, or the first that uses a parameter which the node only fills: an initialiser in forward."""
    while key.rpartition("/")[2].partition("#")[0].endswith("_") and view.users[key]:
        key = view.users[key][0].consumer.key
    return view.nodes[key]


__all__ = ["unregistered"]
