"""The picture as Graphviz DOT: nodes coloured by gradient norm, clusters by module path, a legend with numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphviz

from fxgrad.render.boxes import boxes_of
from fxgrad.render.labels import Labels, short
from fxgrad.render.marks import Marks, drops_to_mark
from fxgrad.render.options import PictureOptions, options_from
from fxgrad.render.palette import (
    CULPRIT,
    CULPRIT_SHAPE,
    DROP,
    DROP_EDGE,
    EDGES,
    LOOKS,
    REWRITTEN,
    WAY,
    text_colour,
)
from fxgrad.render.scale import DECADES, Size, colour, joint, scale_of
from fxgrad.render.themes import THEMES
from fxgrad.render.uses import use_words, uses_between
from fxgrad.render.words import (
    Look,
    number,
    rewritten_counts,
)
from fxgrad.schema import Edge, GradientFlow
from fxgrad.store import write_whole

_LARGE = 200  # boxes, or a third of the edges, from which layout speed comes before looks
_FAR = 40  # ranks; in a large graph a longer edge is cut in two
_CROSSED = 8000  # ranks that all edges of a large graph may cross together; the longest are cut until they do
_CROSSED_PER_BOX = 4  # the same for each box, where that is more
_STEP = 3  # decades between two swatches of the legend
_PLAIN = 0.7  # decades around the neutral size within which a line has no colour
_USES = 10  # uses that the tooltip of one edge lists
_WORDS: dict[Look, tuple[str, ...]] = {
    "zero": ("exactly zero",),
    "nonfinite": ("NaN or Inf",),
    "outside_range": ("0 or Inf in float32:", "measure with 'full'"),
    "not_measured": ("not measured",),
}
_FOLDER = {"shape": "folder"}
_STACK = {"shape": "box3d", "margin": "0.2,0.12"}  # its front face is smaller than the box
_EDGE_WORDS = ("a line's width and colour:", "the part sent back over it")
_WAY_WORDS = ("a double line:", "the path of a finding")
_DROP = 0.05  # ratio below which a drop is marked
_DROP_WORDS = ("DROP: the gradient shrinks", "to less than 1/20 here")


def to_dot(flow: GradientFlow, path: str | Path | None = None, options: Mapping[str, Any] | None = None) -> str:
    """The picture as DOT text, also written to ``path`` if given; options as in ``fxgrad.schema.PictureWords``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured at this level.
        FlowFileError: the file cannot be written.
    """
    chosen = options_from(flow, options or {})
    text: str = _Picture(flow, chosen).draw()
    if path is not None:
        write_whole(Path(path), text)
    return text


class _Picture:
    """A flow on its way to DOT."""

    def __init__(self, flow: GradientFlow, options: PictureOptions) -> None:
        self.flow = flow
        self.norm = options.norm
        theme = THEMES[options.theme]
        self.ground = ("white", "black") if options.theme == "light" else (theme.paper, theme.ink)
        self.direction = "TB" if options.direction == "down" else "LR"
        self.labels = Labels(flow, options.norm, drops_to_mark(flow, options.findings, _DROP))
        self.boxes, self.number = boxes_of(flow, options.depth, fold=options.fold)
        self.looks = [self.labels.look(box) for box in self.boxes]
        self.dropped = {drop.site.id for box in self.boxes for drop in self.labels.drops(box)}
        self.scale = scale_of(flow, options.norm, options.scale)
        self.uses = uses_between(flow, self.number)
        self.marks = Marks(flow, options.findings, self.boxes, self.number)
        self.ways = self.marks.ways(self.uses)
        self.size = max(len(self.boxes), len(self.uses) // 3)

    def draw(self) -> str:
        graph = graphviz.Digraph("gradient_flow", comment="made by fxgrad")
        graph.attr(
            rankdir=self.direction, fontname="Helvetica", fontsize="14", nodesep="0.25", ranksep="0.25",
            bgcolor=self.ground[0], fontcolor=self.ground[1], labelloc="t", labeljust="l",
            label=_text(self._title(), "\\l"), tooltip=_text(self.flow.capture.model),
        )  # fmt: skip
        graph.attr(**_haste(self.size))
        graph.attr("node", shape="box", fontname="Helvetica", fontsize="11", margin="0.12,0.05", height="0.3")
        graph.attr("edge", color="#777777", arrowsize="0.6")
        self._cluster(graph, (), list(range(len(self.boxes))))
        self._edges(graph)
        self._legend(graph)
        return str(graph.source)

    def _title(self) -> list[str]:
        flow = self.flow
        measured = sum(site.measured for site in flow.sites)
        return [
            f"{short(flow.capture.model)}: {self.norm} of the gradient at {measured} of {len(flow.sites)} sites",
            f"loss: {short(flow.event.loss, 90)}",
            "forward runs down, the gradient runs up; gain: l2 norm passed back / received",
            *self.marks.title(),
        ]

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _cluster(self, graph: Any, path: tuple[str, ...], members: list[int]) -> None:
        """The boxes below ``path``: those that lie in it directly, and a cluster for each module inside of it."""
        deeper: dict[tuple[str, ...], list[int]] = {}
        for index in members:
            container = self.boxes[index].container
            if len(container) == len(path):
                self._box(graph, index)
            else:
                deeper.setdefault(container[: len(path) + 1], []).append(index)
        for inner, indices in deeper.items():
            with graph.subgraph(name=f"cluster_{indices[0]}_{len(inner)}") as cluster:
                cluster.attr(
                    label=_text(short(inner[-1])), tooltip=_text(inner[-1]), style="rounded", color="#aaaaaa",
                    fontcolor="#444444", labelloc="t", labeljust="l",
                )  # fmt: skip
                self._cluster(cluster, inner, indices)

    def _box(self, graph: Any, index: int) -> None:
        box, look = self.boxes[index], self.looks[index]
        attributes = dict(LOOKS[look])
        value = self.labels.value(box)
        if look == "measured" and value is not None:
            fill = self.scale.colour(value)
            attributes |= {"fillcolor": fill, "fontcolor": text_colour(fill)}
        if box.single and box.nodes[0].op == "output":
            attributes = {"shape": "plaintext", "fontcolor": "#444444"}
        if not box.single:
            attributes = (_STACK if box.blocks else _FOLDER) | attributes
        if (self.labels.rewritten(box) or self.labels.rewritten_parameters(box)) and look != "nonfinite":
            attributes |= REWRITTEN if look != "zero" else {"color": REWRITTEN["color"], "penwidth": "2"}
        if self.labels.drops(box) and look != "nonfinite":
            # A double border has no room for a wide pen between its lines.
            attributes |= DROP if look != "zero" else {"color": DROP["color"], "penwidth": "2"}
        marks = self.marks.lines(index)
        if marks:
            attributes |= CULPRIT | (CULPRIT_SHAPE if box.single or look == "nonfinite" else {})
        words = marks + self.labels.label(box)
        tooltip = self.labels.tooltip(box) + self.marks.tooltip(index)
        graph.node(f"n{index}", label=_text(words), tooltip=_text(tooltip), **attributes)

    # ---- edges and legend ------------------------------------------------------------------------------------------

    def _edges(self, graph: Any) -> None:
        far = _far(self.uses, len(self.boxes)) if self.size > _LARGE else set()
        for (tail, head), edges in self.uses.items():
            dropped = any(edge.producer + edge.output_position in self.dropped for edge in edges)
            uses = [use_words(edge, self.norm) for edge in edges[:_USES]]
            start = f"n{tail}"
            if (tail, head) in far:
                box = self.boxes[tail]
                start, name = f"from{tail}_{head}", box.path or box.nodes[0].key
                graph.node(start, label=_text(f"from {short(name)}"), tooltip=_text(name), shape="plaintext")
            look = DROP_EDGE if dropped and self.flow.event.sites == "node" else self._edge_look(edges)
            if any(edge.rewritten is not None for edge in edges):
                look = look | {"color": REWRITTEN["color"], "style": "dashed"}
            if (tail, head) in self.ways:
                look, uses = WAY, [*uses, f"on the path of {self.ways[tail, head]}"]
            graph.edge(start, f"n{head}", tooltip=_text(uses), **look)

    def _edge_look(self, edges: list[Edge]) -> dict[str, str]:
        """Width and colour by the joint norm of what flows back, where that was measured."""
        if self.flow.event.sites == "node":
            return {}
        found = [edge.statistics for edge in edges if edge.statistics is not None]
        if any(statistics.nonfinite for statistics in found):
            return EDGES["nonfinite"]
        value = joint(edges, self.norm)
        if value is None:
            return EDGES["not_measured"]
        return _line(self.scale, value) if value > 0 else EDGES["zero"]

    def _legend(self, graph: Any) -> None:
        """In one row, so that it takes no height from the graph beside it."""
        with graph.subgraph(name="cluster_legend") as legend:
            legend.attr(label=_text(self._scale_words()), style="rounded", color="#dddddd", fontsize="11",
                        labelloc="t", labeljust="l")  # fmt: skip
            # A cluster itself cannot be a rank.
            with legend.subgraph() as row:
                row.attr(rank="same")
                self._swatches(row)

    def _scale_words(self) -> str:
        against = f", {number(self.scale.reference)} at the loss side is neutral" if self.scale.relative else ""
        return f"{self.norm}, log scale{against}"

    def _swatches(self, row: Any) -> None:
        swatches: list[tuple[str, Iterable[str], dict[str, str]]] = []
        for index, decades in enumerate(range(DECADES, -DECADES - 1, -_STEP)):
            value = self.scale.reference * 10.0**decades
            fill = self.scale.colour(value)
            colours = {"style": "filled", "color": "#333333", "fillcolor": fill, "fontcolor": text_colour(fill)}
            swatches.append((f"legend{index}", [number(value)], colours))
        swatches += [(f"legend_{look}", words, LOOKS[look]) for look, words in _WORDS.items() if look in self.looks]
        if self.flow.event.sites == "edge":
            swatches.append(("legend_edges", _EDGE_WORDS, {"shape": "plaintext"}))
        if rewritten_counts(self.flow) or any(map(self.labels.rewritten, self.boxes)):
            swatches.append(("legend_rewritten", ["rewritten by a rule"], REWRITTEN))
        if self.dropped:
            swatches.append(("legend_drop", _DROP_WORDS, DROP))
        if self.marks:
            swatches.append(("legend_culprit", ["culprit of a finding"], CULPRIT | CULPRIT_SHAPE))
        if self.ways:
            swatches.append(("legend_way", _WAY_WORDS, {"shape": "plaintext"}))
        for name, words, attributes in swatches:
            row.node(name, label=_text(words), tooltip="legend", **attributes)
        for one, two in pairwise(swatches):
            row.edge(one[0], two[0], style="invis")


def _line(scale: Size, value: float) -> dict[str, str]:
    """Width and colour of a line over which this norm flows back; wider is larger."""
    decades = min(max(scale.decades(value), -DECADES), DECADES)
    shade = "#777777" if abs(decades) < _PLAIN else colour(decades)
    return {"color": shade, "penwidth": f"{0.6 + 5 * (decades + DECADES) / (2 * DECADES):.1f}"}


def _far(ends: Iterable[tuple[int, int]], boxes: int) -> set[tuple[int, int]]:
    """The edges between boxes that skip too many ranks, where a rank is the longest way from an input.

    dot places a dummy on each rank that an edge crosses: 100 uses of one mask, spread over 10,000 nodes in a row, made
    the layout take 58 s, and the 1,900 edges between the layers of DenseNet-201 more than 100 s.  Nobody can follow
    such edges by eye either, so their starts are named beside their ends.
    """
    listed = sorted(ends, key=lambda pair: pair[::-1])
    rank: dict[int, int] = {}
    for tail, head in listed:
        if tail < head:
            rank[head] = max(rank.get(head, 0), rank.get(tail, 0) + 1)
    crossed = {(tail, head): rank.get(head, 0) - rank.get(tail, 0) for tail, head in listed}
    longest = _longest(crossed.values(), max(_CROSSED, _CROSSED_PER_BOX * boxes))
    return {pair for pair, ranks in crossed.items() if ranks > longest}


def _longest(crossed: Iterable[int], budget: int) -> int:
    """How many ranks an edge may cross: as many as ``_FAR``, unless all edges up to that together exceed ``budget``."""
    longest, total = 1, 0
    for ranks, count in sorted(Counter(crossed).items()):
        total += ranks * count
        if total > budget or ranks > _FAR:
            break
        longest = max(longest, ranks)
    return longest


def _haste(size: int) -> dict[str, str]:
    """Graph attributes that keep the layout of large graphs fast.

    Network simplex is what grows: with ``nslimit=1`` a random graph of 10,000 nodes with two inputs each took more than
    180 s, with 0.01 it takes 11 s.  ``nslimit1`` stays 1: cut off, it leaves a chain a hundred times as wide as needed.
    """
    if size <= _LARGE:
        return {}
    limit = f"{min(1.0, (1000 / size) ** 2):.4f}"
    return {
        "splines": "line",
        "nslimit": limit,
        "nslimit1": "1",
        "mclimit": "0.2",
        "maxiter": "100",
        "searchsize": "10",
    }


def _text(lines: str | Iterable[str], ending: str = "") -> str:
    r"""Lines as a DOT string in which nothing is markup: no HTML, entity, escape sequence or control character.

    ``ending`` is DOT's escape that ends each line, and aligns it to the left with ``\l``.
    """
    listed = [lines] if isinstance(lines, str) else lines
    clean = ["".join(c if c.isprintable() else " " for c in line) for line in listed]
    safe = [line.replace("\\", "\\\\").replace("&", "&amp;") for line in clean]
    joined = "".join(line + ending for line in safe) if ending else "\\n".join(safe)
    return graphviz.nohtml(joined)  # type: ignore[no-any-return]  # a str that is never taken for HTML
