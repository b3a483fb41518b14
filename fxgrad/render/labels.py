"""What the picture writes in a box and shows while the mouse rests on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from fxgrad.graph import Drop, ratios, sites_of
from fxgrad.render.boxes import Box
from fxgrad.render.gains import Gains
from fxgrad.render.scale import joint
from fxgrad.render.words import (
    Look,
    audit_lines,
    before_after,
    look_of,
    norm_words,
    number,
    rewritten_words,
    rule_words,
    shape_words,
    way_words,
)
from fxgrad.schema import BlindSpot, GradientFlow, Node, NormWord, ParameterRecord, Site, Statistics

_NAME = 44  # characters of a name in a label; the tooltip has all of it
_TENSORS = 3  # outputs of one node that its label lists
_INNER = 40  # nodes of a collapsed box that its tooltip lists


class Labels:
    """Words, value and look of each box, by the chosen norm."""

    def __init__(self, flow: GradientFlow, norm: NormWord, drops: Iterable[Drop] = ()) -> None:
        self._norm: NormWord = norm
        self._sites = sites_of(flow)
        self._gains = Gains(flow)
        self._ratios = ratios(flow)
        self._drops = {drop.site.id: drop for drop in drops}
        self._parameters = {name: one for one in flow.parameters for name in (one.name, *one.aliases)}
        self._spots: dict[str, list[BlindSpot]] = {}
        for spot in (spot for spot in flow.blind_spots if spot.consumer is None):
            self._spots.setdefault(spot.key, []).append(spot)

    # ---- what a box is --------------------------------------------------------------------------------------------

    def value(self, box: Box) -> float | None:
        """The number that colours a box: of its outputs together, of repeated blocks the geometric mean."""
        if box.blocks:
            logs = [math.log10(v) for v in map(self.value, box.blocks) if v and math.isfinite(v)]
            return float(10 ** (sum(logs) / len(logs))) if logs else None
        return joint(box.outputs, self._norm)

    def look(self, box: Box) -> Look:
        """The look of what a box holds; NaN or Inf inside of a collapsed one shows outside."""
        inner = self._inner(box)
        looks = {look_of(site.statistics) for site in inner}
        if "nonfinite" in looks:
            return "nonfinite"
        outer = {look_of(site.statistics) for site in (box.outputs or inner)}
        ranked: tuple[Look, ...] = ("measured", "outside_range", "zero")
        return next((look for look in ranked if look in outer), "not_measured")

    def gain(self, box: Box) -> float | None:
        """What it passes back to its inputs over what it received; None where that cannot be told."""
        return self._gains.of({node.key for node in box.all_nodes}, box.outputs)

    def words(self, box: Box) -> str:
        """The norm of what a box receives, and what is special about it."""
        return self._norm_words(box.outputs)

    def reasons(self, box: Box) -> list[str]:
        """Why its first node has no gradient, in words of ``REASONS``."""
        return list(dict.fromkeys(spot.reason for spot in self._spots.get(box.all_nodes[0].key, [])))

    def drops(self, box: Box) -> list[Drop]:
        """Those of the given drops that lie in this box."""
        return [self._drops[site.id] for site in self._inner(box) if site.id in self._drops]

    def rewritten(self, box: Box) -> list[Site]:
        """The sites in this box at which rewrite rules stand."""
        return [site for site in self._inner(box) if site.rewritten is not None]

    def _inner(self, box: Box) -> list[Site]:
        return [site for node in box.all_nodes for site in self._sites.get(node.key, [])]

    def rewritten_parameters(self, box: Box) -> list[ParameterRecord]:
        """The parameters of its nodes that rewrite rules act on."""
        found = [one for node in box.all_nodes for one in self._parameters_of(node) if one.rewritten is not None]
        return list({one.name: one for one in found}.values())

    def _before_after(self, record: ParameterRecord) -> str:
        """The norms of a parameter's gradient before and after the rules, where there are both."""
        rewritten = record.rewritten
        known = rewritten is not None and rewritten.before is not None and rewritten.after is not None
        return before_after(rewritten, self._norm) if known and rewritten is not None else ""

    def _parameters_of(self, node: Node) -> list[ParameterRecord]:
        return [self._parameters[name] for name in node.parameters if name in self._parameters]

    # ---- the label ------------------------------------------------------------------------------------------------

    def label(self, box: Box) -> list[str]:
        """A few lines: name and type, shape and dtype, norm and gain, and what is wrong."""
        if box.single:
            return self._node_label(box)
        count = len(box.all_nodes)
        nodes = f"{count} node{'s' if count > 1 else ''}"
        if box.blocks:
            lines = [_run_name(box), f"{len(box.blocks)}x {short(box.kind)}, {nodes}"]
        else:
            lines = [f"{short(box.path)} ({short(box.type)}, {nodes})"]
        lines.append(self._norm_line(box))
        if self.look(box) == "nonfinite":
            # The last in forward order is the first that the backward pass comes to.
            bad = [site for site in self._inner(box) if look_of(site.statistics) == "nonfinite"][-1]
            lines.append(f"{norm_words(bad.statistics, self._norm)} at {short(below(bad.id, box.path))}")
        inside = len(self.rewritten(box)) + len(self.rewritten_parameters(box))
        if inside:
            lines.append(f"{inside} rewritten inside")
        return lines + [
            f"DROP x{number(drop.ratio)} at {short(below(drop.site.id, box.path))}" for drop in self.drops(box)
        ]

    def _node_label(self, box: Box) -> list[str]:
        node = box.nodes[0]
        if node.op == "output":
            return ["output"]
        kind = node.module_type if node.op == "call_module" else node.op.replace("call_", "")
        lines = [f"{short(node.key)} ({short(kind)})"]
        lines += [f"{short(site.output_position)} {shape_words(site)}".strip() for site in box.outputs[:_TENSORS]]
        if len(box.outputs) > _TENSORS:
            lines.append(f"... {len(box.outputs)} tensors")
        lines.append(self._norm_line(box))
        reasons = dict.fromkeys(spot.reason for spot in self._spots.get(node.key, []))
        if reasons:
            lines.append("blind: " + ", ".join(reasons))
        return lines + self._after(box) + [f"DROP x{number(drop.ratio)}" for drop in self.drops(box)]

    def after(self, box: Box) -> str:
        """What rules made of the gradients at a node, in a line; who did it is in the tooltip."""
        return ", ".join(self._after(box))

    def _after(self, box: Box) -> list[str]:
        lines = [rewritten_words(site, self._norm).partition(" by ")[0] for site in self.rewritten(box)[:_TENSORS]]
        changed = self.rewritten_parameters(box)[:_TENSORS]
        return lines + [f"rewritten: {short(one.name)} {self._before_after(one)}".strip() for one in changed]

    def _norm_line(self, box: Box) -> str:
        words = self._range_words(box) if box.blocks else self._norm_words(box.outputs)
        if not any(site.measured for site in box.outputs) or self._bad(box.outputs):
            return words
        gain = self.gain(box)
        return f"{self._norm} {words}" + ("" if gain is None else f", gain {number(gain)}")

    @staticmethod
    def _bad(sites: Iterable[Site]) -> bool:
        return any(look_of(site.statistics) == "nonfinite" for site in sites)

    def _range_words(self, box: Box) -> str:
        if self._bad(box.outputs):
            return self._norm_words(box.outputs)
        values = [value for value in map(self.value, box.blocks) if value is not None]
        if not values:
            return self._norm_words(box.outputs)
        low, high = number(min(values)), number(max(values))
        return self._norm_words(box.outputs) if low == high else f"{low} ... {high}"

    def _norm_words(self, sites: list[Site]) -> str:
        """The joint norm of several tensors, and what is special about them together."""
        measured = [site.statistics for site in sites if site.statistics is not None]
        if len(measured) <= 1:
            return norm_words(measured[0] if measured else None, self._norm)
        if self._bad(sites):
            counts = {
                "NaN": sum(one.nan_count or 0 for one in measured),
                "Inf": sum(one.inf_count or 0 for one in measured),
            }
            return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "NaN"
        if all(one.all_zero for one in measured):
            return norm_words(measured[0], self._norm)
        words = number(joint(sites, self._norm))
        return f"{words} (part outside float32's range)" if any(one.outside_range for one in measured) else words

    # ---- the tooltip ----------------------------------------------------------------------------------------------

    def tooltip(self, box: Box) -> list[str]:
        """Everything that is known of a node; of a collapsed box its outputs, and its nodes in one line each."""
        if box.single:
            return self._node_tooltip(box.nodes[0])
        lines = [f"{box.name} ({box.kind}) receives"]
        for site in box.outputs:
            lines += self._site_tooltip(site)
        nodes = box.all_nodes
        lines += [self._node_line(node) for node in nodes[:_INNER]]
        return [*lines, f"... and {len(nodes) - _INNER} nodes more"] if len(nodes) > _INNER else lines

    def _node_tooltip(self, node: Node) -> list[str]:
        lines = [f"{node.key} ({node.op} {node.target})"]
        if node.source:
            lines.append(node.source)
        for site in self._sites.get(node.key, []):
            lines += self._site_tooltip(site)
        for one in self._parameters_of(node):
            if one.rewritten is not None:
                words = f"{rule_words(one.rewritten)}: {way_words(one.rewritten, self._norm)}"
                lines += [f"{one.name}: rewritten by {words}", *(f"  {line}" for line in audit_lines(one.rewritten))]
        return lines + [f"{spot.reason}: {spot.detail}" for spot in self._spots.get(node.key, [])]

    def _site_tooltip(self, site: Site) -> list[str]:
        lines = [f"{site.id}: {shape_words(site)} on {site.device}", f"  {_all_statistics(site.statistics)}"]
        if site.rewritten is not None:
            lines.append(f"  rewritten by {rule_words(site.rewritten)}: {_all_statistics(site.rewritten.after)}")
            lines += [f"  {line}" for line in audit_lines(site.rewritten)]
        if site.id in self._ratios:
            lines.append(f"  ratio to the sites nearer to the loss {number(self._ratios[site.id])}")
        return lines

    def _node_line(self, node: Node) -> str:
        words = self._norm_words(self._sites.get(node.key, []))
        return f"{node.key}: {words}" + (f", {node.source}" if node.source else "")


def short(text: str, length: int = _NAME) -> str:
    """``text``, or its beginning and its end where it is longer than ``length``."""
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 2 - 3) :]}"


def _run_name(box: Box) -> str:
    first, last = box.blocks[0].name, box.blocks[-1].name
    if len(first) + len(last) > _NAME:
        last = last.rpartition(".")[2]  # they have the same parent
    return f"{short(first)} ... {short(last, 30)}"


def below(name: str, path: str) -> str:
    """A site's name as seen from the module at ``path``."""
    inside = name.startswith(path) and name[len(path) : len(path) + 1] in {".", "/"}
    return name[len(path) :].lstrip("./") if inside else name


def _all_statistics(statistics: Statistics | None) -> str:
    if statistics is None:
        return "not measured"
    words = [f"rms {number(statistics.rms)}"]
    for entry in fields(statistics):
        value = getattr(statistics, entry.name)
        if value is not None and not isinstance(value, tuple):
            words.append(f"{entry.name} {number(value) if isinstance(value, float) else value}")
    return ", ".join(words)
