"""What is known of the weights that a node works with."""

from __future__ import annotations

import math

from fxgrad.diagnosis.kinds import NORMS, WEIGHTED
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Node, ParameterRecord


def scale(record: ParameterRecord) -> float | None:
    """``rms(weight) * sqrt(fan_in)``, about 1 to 2 at usual initialisations; the rms for a vector or scalar.

    fan_in is the number of entries per unit of the first dimension (LeCun et al., 1998; Glorot and Bengio, 2010).
    None where the values were not measured.
    """
    if record.value is None:
        return None
    numel = math.prod(record.shape)
    fan_in = numel / record.shape[0] if len(record.shape) > 1 and record.shape[0] else 1.0
    return record.value.rms * math.sqrt(fan_in)


def main_weight(view: FlowView, node: Node) -> ParameterRecord | None:
    """The parameter through which a node passes the gradient back: its matrix, or the vector that it scales by."""
    records = view.records(node)
    matrices = [r for r in records if len(r.shape) > 1]
    if matrices:
        return max(matrices, key=lambda r: math.prod(r.shape))
    kind = view.kinds[node.key]
    if kind in WEIGHTED:
        return None
    vectors = [r for r in records if not r.name.rpartition(".")[2].startswith("bias")]
    return vectors[0] if vectors else None


def throttled(view: FlowView, node: Node, limit: float) -> ParameterRecord | None:
    """The learnable weight of a node that is small on purpose, as far as its size tells; else None."""
    record = factor(view, node.key)
    if record is None or not record.requires_grad:
        return None
    size = scale(record)
    if size is None or size >= limit:
        return None
    matrix = len([n for n in record.shape if n > 1]) > 1
    return record if not matrix or size == 0 or _ends_a_branch(view, node.key) else None


def _ends_a_branch(view: FlowView, key: str) -> bool:
    """Whether a node is the last weighted one of the model, or of a branch that is added to another."""
    for _ in range(8):
        users = list({edge.consumer.key for edge in view.users[key]})
        if len(users) != 1:
            return not users
        key = users[0]
        if view.nodes[key].op == "output" or (view.kinds[key] == "add" and len(view.takes[key]) > 1):
            return True
        if view.kinds[key] in WEIGHTED:
            return False
    return False


def factor(view: FlowView, key: str) -> ParameterRecord | None:
    """The parameter that a node multiplies by: its own, or one that comes to a product through views and casts."""
    node = view.nodes[key]
    own = main_weight(view, node)
    if own is not None:
        return own
    if view.kinds[key] not in {"mul", "div", "matmul", *NORMS}:
        return None
    for producer in view.producers(key):
        found = _through_views(view, producer)
        if found is not None:
            return found
    return None


def taken(view: FlowView, key: str) -> list[ParameterRecord]:
    """The parameters that a node takes, also through views and casts."""
    found = view.records(view.nodes[key])
    return found + [r for producer in view.producers(key) if (r := _through_views(view, producer)) is not None]


_VIEWS = frozenset({
    "view", "reshape", "unsqueeze", "squeeze", "expand", "to", "type_as", "float", "half", "bfloat16", "permute", "t",
    "transpose", "getitem", "exp", "tanh", "sigmoid", "expand_as", "contiguous", "abs", "chunk", "unflatten", "add",
})  # fmt: skip


def _through_views(view: FlowView, key: str) -> ParameterRecord | None:
    """The parameter whose values a node only rearranges, if it is one."""
    for _ in range(6):
        node = view.nodes[key]
        records = view.records(node)
        producers = list(view.producers(key))
        if records and not producers and view.kinds[key] in _VIEWS:
            return records[0]
        if len(producers) != 1 or view.kinds[key] not in _VIEWS:
            return None
        key = producers[0]
    return None
