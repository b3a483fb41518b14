"""One scale for every picture, table and page: how many decades a gradient lies below or above the loss side.

The colours are fixed.  The size at which the gradient enters the model is neutral and bright; from there each decade
has a colour of its own, six down to dark blue (vanishing) and six up to dark red (exploding).  Colour-blind eyes tell
blue from orange and red.  In grey print, what lies above is striped in pictures and has a taller bar in text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxgrad.graph import joint_norm
from fxgrad.schema import Edge, GradientFlow, NormWord, ScaleWord, Site

__all__ = ["COLOURS", "DECADES", "STRIPED", "Size", "colour", "joint", "scale_of"]

#: Decades on either side of the neutral size; what lies beyond has the colour of the end.
DECADES = 6
#: From six decades below to six above.
COLOURS = (
    "#08306b", "#1b4f94", "#2f76b8", "#5a9fcf", "#93c4e0", "#c9e3ef",
    "#fff6cf",
    "#fedcab", "#fdb675", "#f48645", "#dd5127", "#b2241b", "#740a12",
)  # fmt: skip
#: Decades above the neutral size from which a fill is striped.
STRIPED = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_NEUTRAL_BAR = 4  # place in _BARS of a gradient as large as at the loss


@dataclass(frozen=True, slots=True)
class Size:
    """What is neutral.

    Attributes:
        reference: norm that the neutral colour stands for; above 0.
        relative: whether it was measured at the loss side of this flow; else it is 1.
    """

    reference: float = 1.0
    relative: bool = False

    def decades(self, value: float) -> float:
        """log10 of a norm over the reference; minus infinity for 0."""
        if math.isnan(value) or value < 0:
            return math.nan
        return math.log10(value) - math.log10(self.reference) if 0 < value < math.inf else math.inf * (value or -1)

    def colour(self, value: float) -> str:
        """The colour of a norm, as ``#rrggbb``."""
        return colour(self.decades(value))

    def striped(self, value: float) -> bool:
        """Whether a fill is striped, so that grey print tells above from below."""
        return self.decades(value) > STRIPED

    def bar(self, value: float) -> str:
        """One of eight bars, ``▅`` for the neutral size, lower for less and taller for more."""
        decades = min(max(self.decades(value), -DECADES), DECADES)
        steps = _NEUTRAL_BAR if decades < 0 else len(_BARS) - 1 - _NEUTRAL_BAR
        return _BARS[_NEUTRAL_BAR + round(decades / DECADES * steps)]

    def words(self, value: float) -> str:
        """``x0.031`` of the reference; nothing on the absolute scale."""
        return f"x{value / self.reference:.3g}" if self.relative else ""


def colour(decades: float) -> str:
    """The colour of a decade: that of the nearest whole number of decades from the neutral size."""
    return COLOURS[round(min(max(decades, -DECADES), DECADES)) + DECADES]


def scale_of(flow: GradientFlow, norm: NormWord = "l2_norm", scale: ScaleWord = "relative") -> Size:
    """The scale of a flow: neutral is the norm of what the loss sent into the model.

    That is the gradient of the values that nothing but the model's output takes, together; where none of them has an
    ordinary one, that of the last value that has.  Without any, the absolute scale.
    """
    if scale == "absolute":
        return Size()
    users: dict[str, set[str]] = {}
    outputs = {node.key for node in flow.nodes if node.op == "output"}
    for edge in flow.edges:
        users.setdefault(edge.producer + edge.output_position, set()).add(edge.consumer.key)
    fine = [site for site in flow.sites if _ordinary(site, norm)]
    last = [site for site in fine if users.get(site.id) and users[site.id] <= outputs] or fine[-1:]
    reference = joint(last, norm)
    return Size(reference, relative=True) if reference and math.isfinite(reference) else Size()


def _ordinary(site: Site, norm: NormWord) -> bool:
    if site.statistics is None or site.statistics.nonfinite:
        return False
    value = site.statistics.norm(norm)
    return value is not None and 0 < value < math.inf


def joint(sites: Iterable[Site | Edge], norm: NormWord) -> float | None:
    """One number for several sites or edges: l2 norm and rms over all entries, the largest of the ``max_abs``."""
    found = [site for site in sites if site.statistics is not None]
    if not found:
        return None
    if norm == "max_abs":
        return max(site.max_abs or 0.0 for site in found)
    value = joint_norm(found)
    entries = sum(site.statistics.numel for site in found if site.statistics is not None)
    if value is None or norm == "l2_norm":
        return value
    return value / math.sqrt(entries) if entries else 0.0
