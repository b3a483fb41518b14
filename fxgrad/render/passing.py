"""Values that pass their gradient on as it is: they fold into the value that they were made of."""

from __future__ import annotations

from fxgrad.graph import sites_of
from fxgrad.render.gains import Gains
from fxgrad.schema import Edge, GradientFlow, Node, Site

__all__ = ["pass_through"]

_SAME = 1e-5  # relative difference of norms that float32 sums in another order may have
_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "permute",
        "transpose",
        "swapaxes",
        "movedim",
        "t",
        "mT",
        "contiguous",
        "clone",
        "getitem",
        "__getitem__",
        "select",
        "narrow",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "unbind",
        "tensor_split",
        "view_as",
        "reshape_as",
        "to",
        "type_as",
        "float",
        "expand_as",
        "dropout",
        "dropout_",
        "alpha_dropout",
        "feature_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "identity",
        "size",
        "unfold_copy",
    ]
)
_MODULES = frozenset(
    [
        "Identity",
        "Flatten",
        "Unflatten",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "AlphaDropout",
        "FeatureAlphaDropout",
        "DropPath",
        "StochasticDepth",
        "PatchDropout",
    ]
)


def pass_through(flow: GradientFlow) -> frozenset[str]:
    """Keys of the nodes that hand on what they receive to the one value that they take, entry by entry.

    Views, item access, and modules that do nothing count where the norm stays the same or cannot be told; any other
    function counts where all the statistics stay the same.  A node with parameters never counts.
    """
    sites, gains = sites_of(flow), Gains(flow)
    into: dict[str, list[Edge]] = {}
    for edge in flow.edges:
        into.setdefault(edge.consumer.key, []).append(edge)
    by_id = {site.id: site for site in flow.sites}
    found = set()
    for node in flow.nodes:
        edges = into.get(node.key, [])
        sources = {edge.producer for edge in edges}
        if node.op in ("placeholder", "output") or node.parameters or len(sources) != 1:
            continue
        gain = gains.of({node.key}, sites.get(node.key, []))
        known = _name(node) in (_MODULES if node.op == "call_module" else _VIEWS)
        if known:
            if gain is None or abs(gain - 1) < _SAME:
                found.add(node.key)
        elif node.op != "call_module" and gain is not None and abs(gain - 1) < _SAME:
            source = by_id.get(edges[0].producer + edges[0].output_position)
            if len(edges) == 1 and _equal(source, edges[0], sites.get(node.key, [])):
                found.add(node.key)
    return frozenset(found)


def _name(node: Node) -> str:
    return node.module_type if node.op == "call_module" else node.target.rpartition(".")[2]


def _equal(source: Site | None, edge: Edge, own: list[Site]) -> bool:
    """Whether one tensor has come and gone with the same entries, as far as the statistics tell."""
    came = edge.statistics or (source.statistics if source is not None else None)
    went = own[0].statistics if len(own) == 1 else None
    if came is None or went is None or source is None or source.shape != own[0].shape:
        return False
    return (came.numel, came.zero_count, came.max_abs) == (went.numel, went.zero_count, went.max_abs)
