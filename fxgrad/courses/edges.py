"""The autograd edges of edge sites, as places that a later forward call on the same course has as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import Node

from fxgrad.probes.edges import Unmeasured, found_edges

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord

_DEEPEST = 64  # autograd nodes between what a call returned and the edge; found in stock models: 9


def pieces_of(
    forward_record: ForwardRecord, noted: Sequence[tuple[int, int]], piece: Callable[..., Any]
) -> tuple[list[Any], dict[int, Unmeasured]]:
    """The pieces of all edge sites of a recorded call, and why an edge has none.

    ``noted``: pairs of value (or parameter) and site, by the native observer beside it; ``piece`` makes one.
    """
    value_at = {site: value for value, site in noted}
    for site, earlier in forward_record.same.items():
        if earlier in value_at:  # a parameter's node has no name
            value_at[site] = value_at[earlier]
    pieces: list[Any] = []
    lost: dict[int, Unmeasured] = {}
    for edge, source, starts, nodes in found_edges(forward_record):
        made = []
        for node, position in nodes:
            found = _path(starts, node)
            start = None if found is None else value_at.get(found[0])
            if found is None or start is None or start < 0 or source not in value_at:
                break
            made.append(piece(edge, len(nodes), start, found[1], position, value_at[source]))
        if len(made) == len(nodes):
            pieces += made
        else:
            lost[edge] = ("untraceable_use", "its place in the autograd graph has no name")
    return pieces, {**forward_record.notes.unmeasured, **lost}


def _path(starts: Sequence[tuple[int, Node]], node: Node) -> tuple[int, list[int]] | None:
    """How to come to ``node``: from which site, and through which inputs."""
    queue: list[tuple[int, Node, list[int]]] = [(site, start, []) for site, start in starts]
    seen: set[Node] = set()
    while queue:
        site, here, path = queue.pop(0)
        if here is node:
            return site, path
        if here in seen or len(path) > _DEEPEST:
            continue
        seen.add(here)
        queue += [(site, below, [*path, n]) for n, (below, _) in enumerate(here.next_functions) if below is not None]
    return None
