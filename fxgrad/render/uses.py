"""The uses of values between the boxes of a picture, and their words."""

from __future__ import annotations

from collections.abc import Mapping

from fxgrad.render.words import audit_lines, norm_words, rule_words, way_words
from fxgrad.schema import Edge, GradientFlow, NormWord

__all__ = ["use_words", "uses_between"]


def uses_between(flow: GradientFlow, box_of: Mapping[str, int]) -> dict[tuple[int, int], list[Edge]]:
    """The uses of values from box to box, by the two; ``box_of`` each node key."""
    uses: dict[tuple[int, int], list[Edge]] = {}
    for edge in flow.edges:
        ends = box_of[edge.producer], box_of[edge.consumer.key]
        if ends[0] != ends[1]:
            uses.setdefault(ends, []).append(edge)
    return uses


def use_words(edge: Edge, norm: NormWord) -> str:
    """Which value goes where, what flows back there, and what rules made of it."""
    use = f"{edge.producer}{edge.output_position} -> {edge.consumer.key} {edge.consumer.argument}"
    use += f": {norm} {norm_words(edge.statistics, norm)}" if edge.measured else ""
    if edge.rewritten is None:
        return use
    words = [way_words(edge.rewritten, norm), *audit_lines(edge.rewritten)]
    return f"{use}, rewritten by {rule_words(edge.rewritten)}: {'; '.join(words)}"
