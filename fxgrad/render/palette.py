"""Looks of whatever is no ordinary number, or marked: each has a border or shape of its own as well as a colour.

The colours of ordinary numbers are in ``fxgrad.render.scale``.
"""

from __future__ import annotations

_LINEAR = 0.04045  # below it sRGB is linear (IEC 61966-2-1)

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


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= _LINEAR else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def text_colour(background: str) -> str:
    """Black or white, whichever reads better on ``background``."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, background))


def mixed(one: str, two: str, share: float) -> str:
    """``one`` with this ``share`` of ``two`` in it."""
    parts = ((int(one[i : i + 2], 16), int(two[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)
