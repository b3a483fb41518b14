"""The flow as a networkx graph, and what is read off it: near sites, drops, module flows.

The only place that knows the names of node and edge attributes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import networkx as nx

from fxgrad.errors import SiteNotFoundError
from fxgrad.schema import Edge, GradientFlow, ModuleCall, ModuleFlow, Node, Site, Statistics

_NODE_FIELDS = ("name", "op", "target", "module_path", "module_type", "call_index", "source")
_STATISTICS = ("rms", *(f.name for f in fields(Statistics)))


def to_networkx(flow: GradientFlow) -> nx.DiGraph[str]:
    """A DiGraph whose nodes are node keys, with plain attributes that every networkx writer takes.

    A node has its names, and per site its shape, dtype, device and statistics; those of a node that returned several
    tensors are prefixed by their position (``"[0].l2_norm"``), beside the joint ``l2_norm``.  What was not measured is
    absent, and ``blind_spot`` says why.  An edge has the argument paths and output positions that it carries.
    """
    graph: nx.DiGraph[str] = nx.DiGraph(
        model=flow.capture.model,
        front_end=flow.capture.front_end,
        loss=flow.event.loss,
        level=flow.event.level,
        backward=flow.event.backward,
    )
    for order, node in enumerate(flow.nodes):
        graph.add_node(node.key, order=order, **_present({name: getattr(node, name) for name in _NODE_FIELDS}))
    for key, sites in sites_of(flow).items():
        for site in sites:
            prefix = f"{site.output_position}." if len(sites) > 1 else ""
            graph.nodes[key].update({f"{prefix}{name}": value for name, value in _site_attributes(site).items()})
        joint = joint_norm(sites)
        if joint is not None:
            graph.nodes[key]["l2_norm"] = joint
    for spot in flow.blind_spots:
        graph.nodes[spot.key]["blind_spot"] = spot.reason
    for edge in flow.edges:
        _add_edge(graph, edge)
    return graph


def _present(values: dict[str, object]) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float, bool))}


def _site_attributes(site: Site) -> dict[str, str | int | float | bool]:
    shape = "x".join(map(str, site.shape)) or "scalar"
    facts: dict[str, object] = {"shape": shape, "dtype": site.dtype, "device": site.device}
    if site.derived_from is not None:
        facts["derived_from"] = site.derived_from
    if site.statistics is not None:
        facts |= {name: getattr(site.statistics, name) for name in _STATISTICS}
    return _present(facts)


def _add_edge(graph: nx.DiGraph[str], edge: Edge) -> None:
    """One edge per pair of nodes; a value that is used twice has both argument paths."""
    use = f"{edge.output_position}->{edge.consumer.argument}" if edge.output_position else edge.consumer.argument
    if graph.has_edge(edge.producer, edge.consumer.key):
        found = graph.edges[edge.producer, edge.consumer.key]
        found["arguments"] += f", {use}"
        found["uses"] += 1
    else:
        graph.add_edge(edge.producer, edge.consumer.key, arguments=use, uses=1)
    if edge.statistics is not None:
        norms = (graph.edges[edge.producer, edge.consumer.key].get("l2_norm", 0.0), edge.statistics.l2_norm)
        graph.edges[edge.producer, edge.consumer.key]["l2_norm"] = math.hypot(*norms)


# ---- sites ---------------------------------------------------------------------------------------------------------


def sites_of(flow: GradientFlow) -> dict[str, list[Site]]:
    """The sites by node key."""
    found: dict[str, list[Site]] = {}
    for site in flow.sites:
        found.setdefault(site.key, []).append(site)
    return found


def joint_norm(sites: Iterable[Site]) -> float | None:
    """l2 norm over all measured sites together; None where none was measured."""
    norms = [site.statistics.l2_norm for site in sites if site.statistics is not None]
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    return math.hypot(*norms) if norms else None


def find_site(flow: GradientFlow, name: str) -> Site:
    """The site with this id, or else this key or torch.fx name.

    Raises:
        SiteNotFoundError: there is none; the message lists near names.
    """
    for attribute in ("id", "key", "name"):
        for site in flow.sites:
            if getattr(site, attribute) == name:
                return site
    known = list(dict.fromkeys(word for site in flow.sites for word in (site.id, site.name)))
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:5]
    message = f"no site {name!r} in the flow of {flow.capture.model}; near names are {', '.join(map(repr, near))}"
    raise SiteNotFoundError(message)


@dataclass(frozen=True, slots=True)
class Drop:
    """A measured site whose gradient is smaller (or larger) than that of the sites it came from.

    Attributes:
        site: the site.
        ratio: its l2 norm over the joint l2 norm of the nearest measured sites nearer to the loss.
    """

    site: Site
    ratio: float


def ratios(flow: GradientFlow) -> dict[str, float]:
    """By site id: the l2 norm over the joint l2 norm of the nearest measured sites nearer to the loss.

    Sites without any such site (the model's outputs) and without a positive finite norm before them are left out.
    """
    by_key = sites_of(flow)
    users: dict[tuple[str, str], list[str]] = {}
    for edge in flow.edges:
        users.setdefault((edge.producer, edge.output_position), []).append(edge.consumer.key)
    nearest: dict[str, dict[str, Site]] = {}  # node key -> the measured sites that a value reaches through it
    found: dict[str, float] = {}
    for node in reversed(flow.nodes):
        reached: dict[str, Site] = {}
        for site in by_key.get(node.key, []):
            beyond: dict[str, Site] = {}
            for user in users.get((node.key, site.output_position), []):
                beyond |= nearest.get(user, {})
            if site.statistics is None:
                reached |= beyond
                continue
            before = joint_norm(beyond.values())
            bad = any(s.statistics is not None and s.statistics.nonfinite for s in (site, *beyond.values()))
            if before is not None and 0 < before < math.inf and not bad:
                found[site.id] = site.statistics.l2_norm / before
            reached[site.id] = site
        nearest[node.key] = reached
    return found


def biggest_drops(flow: GradientFlow, count: int = 3, below: float = 0.5) -> list[Drop]:
    """The sites with the smallest ratio (see ``ratios``), smallest first; at most ``count``, all below ``below``."""
    known = ratios(flow)
    drops = [Drop(site, known[site.id]) for site in flow.sites if known.get(site.id, 1.0) < below]
    return sorted(drops, key=lambda drop: drop.ratio)[:count]


# ---- modules -------------------------------------------------------------------------------------------------------


def module_flows(flow: GradientFlow) -> tuple[ModuleFlow, ...]:
    """Gradient in, gradient out and gain of each module call, in the order in which the calls returned."""
    sites = {site.id: site for site in flow.sites}
    nodes = {node.key: node for node in flow.nodes}
    users: dict[str, list[Node]] = {}
    for edge in flow.edges:
        users.setdefault(edge.producer + edge.output_position, []).append(nodes[edge.consumer.key])
    return tuple(_module_flow(call, sites, users) for call in flow.calls)


def _module_flow(call: ModuleCall, sites: dict[str, Site], users: dict[str, list[Node]]) -> ModuleFlow:
    arrived = joint_norm(sites[name] for name in dict.fromkeys(call.outputs) if name in sites)
    inputs = list(dict.fromkeys(call.inputs))
    own = all(_inside(user, call) for name in inputs for user in users.get(name, []))
    passed = joint_norm(sites[name] for name in inputs if name in sites) if own else None
    gain = passed / arrived if passed is not None and arrived else None
    return ModuleFlow(call.path, call.type, call.call_index, arrived, passed, gain)


def _inside(node: Node, call: ModuleCall) -> bool:
    """Whether a node belongs to a module call, as far as paths tell: of a leaf, the very call; else at or below it."""
    if node.op in ("call_module", "external") and node.module_path == call.path:
        return node.call_index == call.call_index
    return not call.path or node.module_path == call.path or node.module_path.startswith(call.path + ".")
