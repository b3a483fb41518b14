"""The flow as a networkx graph, and what is read off it: near sites, drops, module flows.

The only place that knows the names of node and edge attributes.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from fxgrad.errors import SiteNotFoundError
from fxgrad.schema import (
    BlindSpot,
    Edge,
    GradientFlow,
    ModuleCall,
    ModuleFlow,
    Node,
    ParameterRecord,
    Reason,
    Rewritten,
    Site,
    Statistics,
)

if TYPE_CHECKING:
    import networkx as nx

_NODE_FIELDS = ("name", "op", "target", "module_path", "module_type", "call_index", "source")
_UNPLAIN = ("exponent_histogram", "placement")  # no plain attributes
_STATISTICS = ("rms", *(f.name for f in fields(Statistics) if f.name not in _UNPLAIN))
_Plain = dict[str, str | int | float | bool]


def to_networkx(flow: GradientFlow) -> nx.DiGraph[str]:
    """A DiGraph whose nodes are node keys, with plain attributes that ``nx.write_graphml`` takes as they are.

    A node has its names, and of the tensor that it returned the shape, dtype, device and statistics.  Where it
    returned several, theirs are prefixed by their position (``"[0].l2_norm"``) and ``l2_norm`` is the joint one.
    What was not measured is absent; ``blind_spot`` has the reason's word and ``blind_spot_detail`` a sentence (of
    several outputs: prefixed, and ``blind_spot`` has the words of all of them).  Where rewrite rules stand,
    ``rewritten_by`` names them, and statistics of what they passed on are prefixed by ``after``; at edges those of what
    came to them by ``before``.  ``rewritten_changed`` counts entries, ``rewritten_reason`` says why there are no
    statistics.  A node has the same for its parameters, prefixed by ``parameter`` and the name.

    There is one edge per pair of nodes: ``output_position`` and ``arguments`` say which tensors it carries and as which
    arguments, ``uses`` how many there are.  Statistics of a single use stand as they are; those of several are prefixed
    by the argument (``"args[1].l2_norm"``), and ``l2_norm`` is the joint one.  ``blind_spot`` has the words for uses
    whose part was asked for and not measured.
    """
    import networkx as nx  # a fifth of a second, which nothing else here needs

    graph: nx.DiGraph[str] = nx.DiGraph(
        model=flow.capture.model,
        front_end=flow.capture.front_end,
        loss=flow.event.loss,
        level=flow.event.level,
        sites=flow.event.sites,
        backward=flow.event.backward,
    )
    sites, spots = sites_of(flow), _spots_of(flow)
    parameters = {record.name: record for record in flow.parameters}
    for order, node in enumerate(flow.nodes):
        graph.add_node(
            node.key,
            order=order,
            **_present({name: getattr(node, name) for name in _NODE_FIELDS}),
            **_node_attributes(sites.get(node.key, []), spots.get(node.key, [])),
            **_parameter_attributes(parameters[name] for name in node.parameters if name in parameters),
        )
    uses: dict[tuple[str, str], list[Edge]] = {}
    for edge in flow.edges:
        uses.setdefault((edge.producer, edge.consumer.key), []).append(edge)
    blind = {(s.id, s.consumer): s.reason for s in flow.blind_spots if s.consumer is not None}
    for (producer, consumer), edges in uses.items():
        reasons = [blind.get((edge.producer + edge.output_position, edge.consumer)) for edge in edges]
        graph.add_edge(producer, consumer, **_edge_attributes(edges, [r for r in reasons if r is not None]))
    return graph


def _present(values: dict[str, object]) -> _Plain:
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float, bool))}


def _spots_of(flow: GradientFlow) -> dict[str, list[BlindSpot]]:
    found: dict[str, list[BlindSpot]] = {}
    for spot in (spot for spot in flow.blind_spots if spot.consumer is None):
        found.setdefault(spot.key, []).append(spot)
    return found


def _node_attributes(sites: list[Site], spots: list[BlindSpot]) -> _Plain:
    # An integer output is no site but a blind spot, so both are needed to see that there are several outputs.
    several = len({site.output_position for site in sites} | {spot.output_position for spot in spots}) > 1
    found: _Plain = {}
    for site in sites:
        prefix = f"{site.output_position}." if several else ""
        found.update({f"{prefix}{name}": value for name, value in _site_attributes(site).items()})
    for spot in spots:
        prefix = f"{spot.output_position}." if several else ""
        found[f"{prefix}blind_spot"], found[f"{prefix}blind_spot_detail"] = spot.reason, spot.detail
    if several:
        joint = joint_norm(sites)
        if joint is not None:
            found["l2_norm"] = joint
        if spots:
            found["blind_spot"] = ", ".join(dict.fromkeys(spot.reason for spot in spots))
    return found


def _site_attributes(site: Site) -> _Plain:
    shape = "x".join(map(str, site.shape)) or "scalar"
    facts: dict[str, object] = {"shape": shape, "dtype": site.dtype, "device": site.device}
    if site.derived_from is not None:
        facts["derived_from"] = site.derived_from
    after: _Plain = {}
    if site.rewritten is not None:
        after = _rewritten_attributes(site.rewritten, before=False)
    return _present(facts) | _statistics_attributes(site.statistics) | after


def _statistics_attributes(statistics: Statistics | None) -> _Plain:
    return {} if statistics is None else _present({name: getattr(statistics, name) for name in _STATISTICS})


def _rewritten_attributes(rewritten: Rewritten, *, before: bool = True) -> _Plain:
    """What rules did; ``before`` is left out where it stands there anyway."""
    changed = [count for count in rewritten.changed if count is not None]
    found = _present({
        "rewritten_by": ", ".join(rewritten.rules),
        "rewritten_changed": sum(changed) if changed else None,
        "rewritten_reason": rewritten.reason,
    })  # fmt: skip
    for word, statistics in (("before", rewritten.before if before else None), ("after", rewritten.after)):
        found.update({f"{word}.{name}": value for name, value in _statistics_attributes(statistics).items()})
    return found


def _parameter_attributes(records: Iterable[ParameterRecord]) -> _Plain:
    found: _Plain = {}
    for record in records:
        if record.rewritten is not None:
            attributes = _rewritten_attributes(record.rewritten)
            found.update({f"parameter.{record.name}.{name}": value for name, value in attributes.items()})
    return found


def _edge_attributes(edges: list[Edge], reasons: list[Reason]) -> _Plain:
    """The attributes of all uses that one node makes of another's values."""
    words = [
        f"{edge.output_position}->{edge.consumer.argument}" if edge.output_position else edge.consumer.argument
        for edge in edges
    ]
    found: _Plain = {
        "arguments": ", ".join(words),
        "output_position": ", ".join(dict.fromkeys(edge.output_position for edge in edges)),
        "uses": len(edges),
    }
    for edge in edges:
        prefix = f"{edge.consumer.argument}." if len(edges) > 1 else ""
        found.update({f"{prefix}{name}": value for name, value in _statistics_attributes(edge.statistics).items()})
        if edge.rewritten is not None:
            attributes = _rewritten_attributes(edge.rewritten)
            found.update({f"{prefix}{name}": value for name, value in attributes.items()})
    joint = joint_norm(edges)
    if joint is not None:
        found["l2_norm"] = joint
    if reasons:
        found["blind_spot"] = ", ".join(dict.fromkeys(reasons))
    return found


# ---- sites ---------------------------------------------------------------------------------------------------------


def sites_of(flow: GradientFlow) -> dict[str, list[Site]]:
    """The sites by node key."""
    found: dict[str, list[Site]] = {}
    for site in flow.sites:
        found.setdefault(site.key, []).append(site)
    return found


def backward_order(flow: GradientFlow) -> tuple[Site, ...]:
    """All sites from the loss to the inputs, the order in which autograd comes to them."""
    return tuple(reversed(flow.sites))


def joint_norm(measured: Iterable[Site | Edge]) -> float | None:
    """l2 norm over all measured sites or edges together (finite entries at ``full``); None where none was measured."""
    norms = [one.statistics.l2_norm for one in measured if one.statistics is not None]
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    return math.hypot(*norms) if norms else None


def after_rules(site: Site) -> Site:
    """The site with the statistics of what went on from it: what lies below it got that, after the rewrite rules."""
    return site if site.passed_on is site.statistics else replace(site, statistics=site.passed_on)


def find_site(flow: GradientFlow, name: str) -> Site:
    """The site with this id, or else this key or torch.fx name.

    Raises:
        SiteNotFoundError: there is none; the message lists near names.
    """
    if not isinstance(name, str):
        example = repr(flow.sites[0].key) if flow.sites else "'layer1.0/relu'"
        message = (
            f"a value is found by its key, a string such as {example} (module path, '/', what was called), but not by "
            f"{name!r}; flow.sites[n] is the value at place n"
        )
        raise SiteNotFoundError(message)
    for attribute in ("id", "key", "name"):
        for site in flow.sites:
            if getattr(site, attribute) == name:
                return site
    known = list(dict.fromkeys(word for site in flow.sites for word in (site.id, site.name)))
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    hint = f"near names are {', '.join(map(repr, near))}" if near else f"its {len(flow.sites)} sites are in flow.sites"
    message = f"no site {name!r} in the flow of {flow.capture.model}; {hint}"
    raise SiteNotFoundError(message)


@dataclass(frozen=True, slots=True)
class Drop:
    """A measured site whose gradient is smaller than that of the sites it came from.

    Attributes:
        site: the site.
        ratio: its l2 norm over the joint l2 norm of the nearest measured sites nearer to the loss.
    """

    site: Site
    ratio: float


def ratios(flow: GradientFlow) -> dict[str, float]:
    """By site id: the l2 norm over the joint l2 norm of the nearest measured sites nearer to the loss.

    Left out are sites without any such site (the model's outputs) or without a positive norm before them, and
    wherever NaN or Inf takes part: the norm of the finite rest is no norm of the gradient.  0.0 at level ``norm`` may
    mean a gradient below the accumulator's range.
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
            before = joint_norm(map(after_rules, beyond.values()))
            sources = [site.statistics, *(s.passed_on for s in beyond.values())]
            bad = any(s is not None and s.nonfinite for s in sources)
            if before and math.isfinite(before) and math.isfinite(site.statistics.l2_norm) and not bad:
                found[site.id] = site.statistics.l2_norm / before
            reached[site.id] = site
        nearest[node.key] = reached
    return found


def biggest_drops(
    flow: GradientFlow, count: int = 3, below: float = 0.5, among: Container[str] | None = None
) -> list[Drop]:  # fmt: skip
    """The sites with the smallest ratio (see ``ratios``), smallest first; at most ``count``, all below ``below``.

    Only those whose ids are ``among`` the given ones, where they are given.
    """
    known = ratios(flow)
    drops = [
        Drop(site, known[site.id])
        for site in flow.sites
        if known.get(site.id, 1.0) < below and (among is None or site.id in among)
    ]
    return sorted(drops, key=lambda drop: drop.ratio)[:count]


# ---- modules -------------------------------------------------------------------------------------------------------


def module_flows(flow: GradientFlow) -> tuple[ModuleFlow, ...]:
    """Gradient in, gradient out and gain of each module call, in the order in which the calls returned.

    All are l2 norms; NaN or Inf where a gradient that takes part has such an entry.
    """
    sites = {site.id: site for site in flow.sites}
    nodes = {node.key: node for node in flow.nodes}
    users: dict[str, list[Node]] = {}
    for edge in flow.edges:
        users.setdefault(edge.producer + edge.output_position, []).append(nodes[edge.consumer.key])
    takers = Counter((call.path, name) for call in flow.calls for name in dict.fromkeys(call.inputs))

    def own(call: ModuleCall, name: str) -> bool:
        alone = takers[call.path, name] == 1
        return all(_inside(user, call, alone=alone) for user in users.get(name, []))

    found = []
    for call in flow.calls:
        arrived = _whole_norm(after_rules(sites[name]) for name in dict.fromkeys(call.outputs) if name in sites)
        passed = _whole_norm(sites[name] for name in dict.fromkeys(call.inputs) if name in sites)
        if not all(own(call, name) for name in call.inputs):
            passed = None
        gain = passed / arrived if passed is not None and arrived else None
        found.append(ModuleFlow(call.path, call.type, call.call_index, arrived, passed, gain))
    return tuple(found)


def _whole_norm(sites: Iterable[Site]) -> float | None:
    """The joint norm with NaN and Inf: the norm of the finite rest would pass for that of a healthy gradient."""
    measured = [site for site in sites if site.statistics is not None]
    if any(site.nan_count for site in measured):
        return math.nan
    norm = joint_norm(measured)
    return math.inf if any(site.inf_count for site in measured) and not math.isnan(norm or 0.0) else norm


def _inside(node: Node, call: ModuleCall, *, alone: bool) -> bool:
    """Whether a node belongs to a module call, as far as names tell.

    A leaf module's own node has its path as key, so the very call is known.  Other nodes name only the module, and are
    taken for nodes of this call if it is the only one of its module that was given the value (``alone``).
    """
    stem = node.key.removesuffix(f"#{node.call_index}")
    if stem == call.path and node.module_path == call.path:
        return node.call_index == call.call_index
    return alone and (not call.path or node.module_path == call.path or node.module_path.startswith(f"{call.path}."))
