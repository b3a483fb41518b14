"""Colours and looks.

The scale runs from dark blue to light yellow through grey-green, monotone in luminance, so that it reads the same to
colour-blind eyes and in grey print.  The anchors follow the idea of cividis (Nunez, Anderton and Renslow, 2018): only
the blue-yellow axis carries hue.  What is no ordinary number has a border or shape of its own as well.
"""

from __future__ import annotations

import math

_ANCHORS = (
    (0, 32, 76),
    (45, 62, 107),
    (87, 92, 109),
    (124, 123, 120),
    (166, 157, 117),
    (211, 193, 100),
    (255, 233, 69),
)
_LINEAR = 0.04045  # below it sRGB is linear (IEC 61966-2-1)
DECADES = 2.0  # a scale shorter than this is stretched to it, or round-off would look like a fault

#: DOT attributes of each look; colour never stands alone.
LOOKS: dict[str, dict[str, str]] = {
    "measured": {"style": "filled", "color": "#333333"},
    "not_measured": {"style": "dashed", "color": "#888888", "fillcolor": "#ffffff", "fontcolor": "#555555"},
    "zero": {"style": "filled", "color": "#000000", "fillcolor": "#ffffff", "peripheries": "2", "fontcolor": "#000000"},
    "nonfinite": {
        "style": "filled,bold", "shape": "octagon", "color": "#b30000", "fillcolor": "#ffd9d9", "penwidth": "3",
        "fontcolor": "#7a0000",
    },
    "outside_range": {
        "style": "filled,dotted", "color": "#000000", "fillcolor": "#eeeeee", "penwidth": "2", "fontcolor": "#000000",
    },
}  # fmt: skip
#: What marks one of the biggest drops, and the edges through which the larger gradient came; width tells it in grey.
DROP = {"color": "#d55e00", "penwidth": "4"}
#: What marks a site where rewrite rules stand.
REWRITTEN = {"color": "#0072b2", "penwidth": "3"}
DROP_EDGE = {"color": "#d55e00", "penwidth": "4"}
#: What marks the culprit of a finding; a single node has the shape as well, and the words stand in the label.
CULPRIT = {"color": "#a3007c", "penwidth": "3"}
CULPRIT_SHAPE = {"shape": "doubleoctagon"}
#: The path of a finding: two lines side by side, which nothing else has.
WAY = {"color": "#a3007c:white:#a3007c", "penwidth": "2.5", "style": "solid"}

#: Lines over which something else than an ordinary number flows back.
EDGES = {
    "nonfinite": {"color": "#b30000", "penwidth": "4"},
    "zero": {"color": "#000000", "style": "dotted"},
    "not_measured": {"color": "#999999", "style": "dashed"},
}
_LIGHTEST = 0.75  # of the scale, for lines: the light end is no colour for a line on white


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= _LINEAR else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def colour(share: float) -> str:
    """The colour at ``share`` of the scale, 0 (dark) to 1 (light)."""
    place = min(max(share, 0.0), 1.0) * (len(_ANCHORS) - 1)
    index = min(int(place), len(_ANCHORS) - 2)
    part = place - index
    mixed = (round(a + (b - a) * part) for a, b in zip(_ANCHORS[index], _ANCHORS[index + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def text_colour(background: str) -> str:
    """Black or white, whichever reads better on ``background``."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, background))


class Scale:
    """Norms to colours, by log10 between the smallest and the largest positive finite norm of a flow."""

    def __init__(self, values: list[float]) -> None:
        logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
        low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
        missing = max(0.0, DECADES - (high - low))
        self.low, self.high = low - missing, high

    def share(self, value: float) -> float:
        """Where ``value`` lies on the scale, 0 to 1."""
        if value <= 0:
            return 0.0
        return (math.log10(value) - self.low) / (self.high - self.low)

    def colour(self, value: float) -> str:
        """The colour of a positive finite norm."""
        return colour(self.share(value))

    def edge(self, value: float) -> dict[str, str]:
        """Width and colour of a line over which this positive finite norm flows back; wider is larger."""
        share = min(max(self.share(value), 0.0), 1.0)
        return {"color": colour(_LIGHTEST * share), "penwidth": f"{0.6 + 5 * share:.1f}"}

    def steps(self, count: int = 5) -> list[float]:
        """Evenly spread norms from largest to smallest, for the legend."""
        return [10 ** (self.high - (self.high - self.low) * i / (count - 1)) for i in range(count)]
