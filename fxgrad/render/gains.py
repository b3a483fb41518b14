"""The gain of whatever a box holds: what it passes back to its inputs over what it received at its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxgrad.graph import after_rules, joint_norm
from fxgrad.schema import Edge, GradientFlow, Site


class Gains:
    """Gains of groups of nodes: a node, a module call, a run of repeated blocks.  All are quotients of l2 norms."""

    def __init__(self, flow: GradientFlow) -> None:
        self._sites = {site.id: site for site in flow.sites}
        self._into: dict[str, list[Edge]] = {}
        self._uses: dict[str, list[Edge]] = {}
        for edge in flow.edges:
            self._into.setdefault(edge.consumer.key, []).append(edge)
            self._uses.setdefault(edge.producer + edge.output_position, []).append(edge)

    def of(self, keys: set[str], outputs: Iterable[Site]) -> float | None:
        """Joint l2 norm passed back to the inputs of the nodes ``keys`` over that received at their ``outputs``.

        None where no input or no output was measured, where NaN or Inf takes part or the norm received is 0 (at level
        ``norm`` also where one is outside of the accumulator's range), and where an input has other users as well, so
        that the part of these nodes cannot be told from the rest.  Parts measured at the edges are told apart.
        """
        received = [after_rules(site) for site in outputs]
        passed: dict[str, Site | Edge] = {}
        for edge in (edge for key in keys for edge in self._into.get(key, [])):
            name = edge.producer + edge.output_position
            site = self._sites.get(name)
            if edge.producer in keys or name in passed or site is None or not site.measured:
                continue
            own = [use for use in self._uses[name] if use.consumer.key in keys]
            if len(own) == len(self._uses[name]):
                passed[name] = site
            elif len(own) == 1 and own[0].measured:
                passed[name] = own[0]
            else:
                return None
        above, below = _norm(passed.values()), _norm(received)
        return above / below if above is not None and below else None


def _norm(measured: Iterable[Site | Edge]) -> float | None:
    """The joint l2 norm where it is a number that can be divided, else None."""
    found = [one for one in measured if one.statistics is not None]
    if any(one.statistics.nonfinite or one.statistics.outside_range for one in found if one.statistics is not None):
        return None
    norm = joint_norm(found)
    return norm if norm is not None and math.isfinite(norm) else None
