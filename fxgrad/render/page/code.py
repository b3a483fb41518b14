"""The lines of the user's files around the calls that a page shows, for those who ask for them."""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from fxgrad.schema import GradientFlow

__all__ = ["code_of"]

_AROUND = 6  # lines above and below a call


def code_of(flow: GradientFlow, shown: Iterable[str]) -> dict[str, dict[int, str]]:
    """By file as the page shows it: the lines around each call, by their number from 1.

    What cannot be read is left out.  ``shown`` has a file for each node of the flow.
    """
    found: dict[str, dict[int, str]] = {}
    for node, name in zip(flow.nodes, shown, strict=True):
        file, _, line = (node.source or "").rpartition(":")
        if not line.isdigit():
            continue
        lines = linecache.getlines(file)
        first, last = max(1, int(line) - _AROUND), min(len(lines), int(line) + _AROUND)
        known = found.setdefault(name, {})
        known.update({n: lines[n - 1].rstrip("\n") for n in range(first, last + 1)})
    return {name: dict(sorted(lines.items())) for name, lines in found.items() if lines}
