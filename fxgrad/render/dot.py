"""The picture as Graphviz DOT: nodes coloured by gradient norm, clusters by module path, a legend with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphviz

from fxgrad.errors import OptionError
from fxgrad.graph import joint_norm, ratios
from fxgrad.render.boxes import Box, boxes_of
from fxgrad.render.palette import LOOKS, Scale, text_colour
from fxgrad.render.words import Look, check_norm, look_of, norm_words, number, shape_words
from fxgrad.schema import GradientFlow, NormWord, Site, Statistics
from fxgrad.store import write_whole

_LABEL = 44  # characters of a name in a label; the tooltip has all of it
_LARGE = 400  # boxes from which layout speed comes before looks
_WORDS: dict[Look, str] = {
    "measured": "measured",
    "zero": "exactly zero",
    "nonfinite": "NaN or Inf",
    "outside_range": "0 or Inf in float32:\nmeasure with 'full'",
    "not_measured": "not measured",
}


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """What a picture shows.

    Attributes:
        norm: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``: the number in the labels and behind the colours.
        depth: module levels drawn as clusters, deeper modules collapse into a box; None: as deep as stays readable.
        fold: whether runs of three or more equal collapsed blocks become one box.
    """

    norm: NormWord = "l2_norm"
    depth: int | None = None
    fold: bool = True


def options_from(flow: GradientFlow, options: dict[str, Any]) -> PictureOptions:
    """Checked options.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
    """
    known = [f.name for f in fields(PictureOptions)]
    for name in options:
        if name not in known:
            message = f"pictures have no option {name!r}; they have {', '.join(known)}"
            raise OptionError(message)
    made = PictureOptions(**options)
    check_norm(flow, made.norm)
    whole = isinstance(made.depth, int) and not isinstance(made.depth, bool) and made.depth >= 0
    if made.depth is not None and not whole:
        message = f"depth must be None or a whole number of at least 0, but is {made.depth!r}"
        raise OptionError(message)
    if not isinstance(made.fold, bool):
        message = f"fold must be True or False, but is {made.fold!r}"
        raise OptionError(message)
    return made


def to_dot(flow: GradientFlow, path: str | Path | None = None, **options: Any) -> str:
    """The picture as DOT text, also written to ``path`` if given; options as in ``PictureOptions``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured at this level.
        FlowFileError: the file cannot be written.
    """
    chosen = options_from(flow, options)
    text: str = _Picture(flow, chosen).draw()
    if path is not None:
        write_whole(Path(path), text)
    return text


class _Picture:
    def __init__(self, flow: GradientFlow, options: PictureOptions) -> None:
        self.flow = flow
        self.norm = options.norm
        self.boxes, self.number = boxes_of(flow, options.depth, fold=options.fold)
        self.ratios = ratios(flow)
        self.reasons = {spot.id: spot for spot in flow.blind_spots}
        values = (self.value(box) for box in self.boxes)
        self.scale = Scale([value for value in values if value is not None])
        self.large = len(self.boxes) > _LARGE

    def draw(self) -> str:
        graph = graphviz.Digraph("gradient_flow", comment="made by fxgrad")
        graph.attr(
            rankdir="TB", fontname="Helvetica", fontsize="14", nodesep="0.25", ranksep="0.3", bgcolor="white",
            labelloc="t", labeljust="l", label=_text(self._title()), tooltip=_text(self.flow.capture.model),
        )  # fmt: skip
        if self.large:
            # Measured on 2 cores: straight edges and bounded network simplex draw 1,000 nodes 5 times as fast.
            graph.attr(splines="line", nslimit="1", nslimit1="1", mclimit="0.2", maxiter="100", searchsize="10")
        graph.attr("node", shape="box", fontname="Helvetica", fontsize="11", margin="0.12,0.06")
        graph.attr("edge", color="#777777", arrowsize="0.6")
        self._cluster(graph, (), list(range(len(self.boxes))))
        self._edges(graph)
        self._legend(graph)
        return str(graph.source)

    def _title(self) -> list[str]:
        flow = self.flow
        measured = sum(site.measured for site in flow.sites)
        return [
            f"{_short(flow.capture.model)}: {self.norm} of the gradient at {measured} of {len(flow.sites)} sites",
            f"forward runs down, the gradient runs up; loss: {_short(flow.event.loss, 90)}",
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
            name = f"cluster_{indices[0]}_{len(inner)}"
            with graph.subgraph(name=name) as cluster:
                title = inner[-1]
                cluster.attr(
                    label=_text([_short(title)]), tooltip=_text([title]), style="rounded", color="#aaaaaa",
                    fontcolor="#444444", labelloc="t", labeljust="l",
                )  # fmt: skip
                self._cluster(cluster, inner, indices)

    def _box(self, graph: Any, index: int) -> None:
        box = self.boxes[index]
        look = self._look(box)
        attributes = dict(LOOKS[look])
        value = self.value(box)
        if look == "measured" and value is not None and value > 0:
            fill = self.scale.colour(value)
            attributes |= {"fillcolor": fill, "fontcolor": text_colour(fill)}
        if box.single and box.nodes[0].op == "output":
            attributes = {"shape": "plaintext", "fontcolor": "#444444"}
        if not box.single:
            attributes.setdefault("shape", "box3d" if box.blocks else "folder")
        graph.node(f"n{index}", label=_text(self._label(box)), tooltip=_text(self._tooltip(box)), **attributes)

    def _look(self, box: Box) -> Look:
        """The look of what a box holds; what is wrong inside of a collapsed one shows outside."""
        inner = [s for part in (box, *box.blocks) for n in part.nodes for s in self._sites.get(n.key, [])]
        if any(look_of(site.statistics) == "nonfinite" for site in inner):
            return "nonfinite"
        outer = [look_of(site.statistics) for site in (box.outputs or inner) if site.measured]
        ranked: tuple[Look, ...] = ("measured", "outside_range", "zero")
        for look in ranked:
            if look in outer:
                return look
        return "not_measured"

    @property
    def _sites(self) -> dict[str, list[Site]]:
        if not hasattr(self, "_by_key"):
            self._by_key: dict[str, list[Site]] = {}
            for site in self.flow.sites:
                self._by_key.setdefault(site.key, []).append(site)
        return self._by_key

    def value(self, box: Box) -> float | None:
        """The number that colours a box: of its outputs together, of repeated blocks the geometric mean."""
        if box.blocks:
            logs = [math.log10(v) for v in map(self.value, box.blocks) if v and math.isfinite(v)]
            return float(10 ** (sum(logs) / len(logs))) if logs else None
        return joint(box.outputs, self.norm)

    def _label(self, box: Box) -> list[str]:
        if box.blocks:
            values = [v for v in map(self.value, box.blocks) if v is not None]
            first, last = box.blocks[0].path, box.blocks[-1].path
            norms = f"{number(min(values))} ... {number(max(values))}" if values else "not measured"
            count = sum(len(block.nodes) for block in box.blocks)
            return [f"{_short(first, 30)} ... {_short(last, 30)}", f"{len(box.blocks)} x {_short(box.type)}",
                    f"{self.norm} {norms}", f"{count} nodes"]  # fmt: skip
        if not box.single:
            return [_short(box.path), f"{_short(box.type)}, {len(box.nodes)} nodes",
                    f"{self.norm} {self._norm_words(box.outputs)}"]  # fmt: skip
        node = box.nodes[0]
        if node.op == "output":
            return ["output"]
        kind = node.module_type if node.op == "call_module" else node.op.replace("call_", "")
        lines = [_short(node.key), _short(kind)]
        lines += [_short(shape_words(site) + site.output_position) for site in box.outputs[:3]]
        if len(box.outputs) > 3:  # noqa: PLR2004  # as many as a label holds
            lines.append(f"... {len(box.outputs)} tensors")
        lines.append(self._norm_words(box.outputs) + self._gain(box.outputs))
        spots = [self.reasons[site.id].reason for site in box.outputs if site.id in self.reasons]
        if node.key in self.reasons and not box.outputs:
            spots = [self.reasons[node.key].reason]
        if spots:
            lines.append("blind: " + ", ".join(dict.fromkeys(spots)))
        return lines

    def _norm_words(self, sites: list[Site]) -> str:
        measured = [site for site in sites if site.statistics is not None]
        if len(measured) == 1:
            return norm_words(measured[0].statistics, self.norm)
        value = joint(sites, self.norm)
        return "not measured" if value is None else number(value)

    def _gain(self, sites: list[Site]) -> str:
        found = [self.ratios[site.id] for site in sites if site.id in self.ratios]
        return f", x{number(found[0])}" if len(found) == 1 else ""

    def _tooltip(self, box: Box) -> list[str]:
        lines = []
        for node in [*box.nodes, *(node for block in box.blocks for node in block.nodes)][:30]:
            lines.append(f"{node.key} ({node.op} {node.target}) {node.source or ''}")
            for site in self._sites.get(node.key, []):
                lines.append(f"  {site.id}: {shape_words(site)} on {site.device}")
                lines.append(f"  {_all_statistics(site.statistics)}")
            lines += [f"  {spot.detail}" for spot in self._spots(node.key)]
        return lines

    def _spots(self, key: str) -> list[Any]:
        if not hasattr(self, "_spots_by_key"):
            self._spots_by_key: dict[str, list[Any]] = {}
            for spot in self.flow.blind_spots:
                self._spots_by_key.setdefault(spot.key, []).append(spot)
        return self._spots_by_key.get(key, [])

    # ---- edges and legend ------------------------------------------------------------------------------------------

    def _edges(self, graph: Any) -> None:
        drawn: dict[tuple[int, int], list[str]] = {}
        for edge in self.flow.edges:
            tail, head = self.number[edge.producer], self.number[edge.consumer.key]
            if tail != head:
                use = f"{edge.producer}{edge.output_position} -> {edge.consumer.key} {edge.consumer.argument}"
                drawn.setdefault((tail, head), []).append(use)
        for (tail, head), uses in drawn.items():
            graph.edge(f"n{tail}", f"n{head}", tooltip=_text(uses[:10]))

    def _legend(self, graph: Any) -> None:
        looks: list[Look] = [look for look in _WORDS if look != "measured" and look in set(map(self._look, self.boxes))]
        with graph.subgraph(name="cluster_legend") as legend:
            legend.attr(label=_text([f"{self.norm} (log scale)"]), style="rounded", color="#dddddd", fontsize="11")
            names = []
            for index, value in enumerate(self.scale.steps()):
                fill = self.scale.colour(value)
                names.append(f"legend{index}")
                legend.node(names[-1], label=number(value), fillcolor=fill, fontcolor=text_colour(fill),
                            tooltip="legend", style="filled", color="#333333", height="0.3")  # fmt: skip
            for look in looks:
                names.append(f"legend_{look}")
                legend.node(names[-1], label=_text(_WORDS[look].split("\n")), tooltip="legend", **LOOKS[look])
            for one, two in pairwise(names):
                legend.edge(one, two, style="invis")


def joint(sites: Iterable[Site], norm: NormWord) -> float | None:
    """One number for several sites: l2 norm and rms over all entries together, the largest of the ``max_abs``."""
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


def _all_statistics(statistics: Statistics | None) -> str:
    if statistics is None:
        return "not measured"
    words = [f"rms {number(statistics.rms)}"]
    for entry in fields(statistics):
        value = getattr(statistics, entry.name)
        if value is not None:
            words.append(f"{entry.name} {number(value) if isinstance(value, float) else value}")
    return ", ".join(words)


def _short(text: str, length: int = _LABEL) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 2 - 3) :]}"


def _text(lines: str | Iterable[str]) -> str:
    """Lines as a DOT string in which nothing is markup: no HTML label, no escape sequence, no control character."""
    listed = [lines] if isinstance(lines, str) else lines
    clean = ("".join(c if c.isprintable() else " " for c in line).replace("\\", "\\\\") for line in listed)
    return graphviz.nohtml("\\n".join(clean))  # type: ignore[no-any-return]  # a str that is never taken for HTML
