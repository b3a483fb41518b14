"""Findings on the picture: which boxes hold a culprit, and over which lines its fault went."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.graph import Drop, biggest_drops
from fxgrad.render.boxes import Box
from fxgrad.render.findings import at, one_line
from fxgrad.render.labels import below, short
from fxgrad.schema import Diagnosis, Finding, GradientFlow

_SHOWN = 3  # findings in one label, and in the title
_TITLE = 110  # characters of a finding in the title
#: The checks that tell of a gradient which becomes small.
_LOSSES = frozenset(
    {"vanishing", "cancelled", "scale_break", "saturated", "dead", "zero", "starved", "underflow", "detached"}
)


def findings_from(given: Any) -> tuple[Finding, ...]:
    """The option ``findings`` of a picture or a table, checked; None is none.

    Raises:
        OptionError: it holds something else than findings.
    """
    if given is None:
        return ()
    listed = given.findings if isinstance(given, Diagnosis) else given
    found = tuple(listed) if isinstance(listed, Iterable) else (listed,)
    odd = next((one for one in found if not isinstance(one, Finding)), None)
    if odd is not None:
        message = f"findings must be findings, such as flow.findings, or a diagnosis, but holds {odd!r:.80}"
        raise OptionError(message)
    return found


def words_of(findings: Sequence[Finding]) -> list[str]:
    """Number and name as in the list of all findings: ``"1 ERROR dead"``."""
    return [f"{n} {finding.severity.upper()} {finding.rule}" for n, finding in enumerate(findings, start=1)]


def ranked(findings: Sequence[Finding]) -> list[tuple[str, Finding]]:
    """Errors and warnings, each with its words."""
    return [(word, one) for word, one in zip(words_of(findings), findings, strict=True) if one.severity != "info"]


def nodes_blamed(flow: GradientFlow, findings: Iterable[Finding]) -> list[list[str]]:
    """Keys of the nodes that each finding blames: its node, or those that take the parameter that it blames."""
    takers: dict[str, list[str]] = {}
    for node in flow.nodes:
        for name in node.parameters:
            takers.setdefault(name, []).append(node.key)
    return [[f.node.key] if f.node is not None else takers.get(f.parameter or "", []) for f in findings]


def drops_to_mark(flow: GradientFlow, findings: Iterable[Finding], below: float = 0.5) -> list[Drop]:
    """The biggest drops (see ``graph.biggest_drops``) on the way of an error or warning that tells of a loss.

    A small ratio alone is no fault, and where no finding tells of one nothing is marked.
    """
    told = [one for one in findings if one.rule in _LOSSES and one.severity != "info"]
    blamed = {key for keys in nodes_blamed(flow, told) for key in keys}
    here = blamed.union(*(one.path for one in told), (e.producer for e in flow.edges if e.consumer.key in blamed))
    kept = {site.id for site in flow.sites if site.key in here}
    return biggest_drops(flow, below=below, among=kept)


class Marks:
    """What the boxes of one picture have to do with the findings."""

    def __init__(
        self, flow: GradientFlow, findings: Sequence[Finding], boxes: Sequence[Box], number: Mapping[str, int]
    ) -> None:
        self._boxes, self._number = boxes, number
        self._ranked = ranked(findings)
        self._culprits: dict[int, dict[str, Finding]] = {}  # box -> word -> finding
        self._hints: dict[int, list[Finding]] = {}  # information, for tooltips only
        listed = zip(words_of(findings), findings, nodes_blamed(flow, findings), strict=True)
        self._keys: list[tuple[int, str]] = []
        for place, (word, finding, blamed) in enumerate(listed, start=1):
            self._keys += [(place, key) for key in blamed if finding.severity != "info"]
            for index in dict.fromkeys(number[key] for key in blamed if key in number):
                if finding.severity == "info":
                    self._hints.setdefault(index, []).append(finding)
                else:
                    self._culprits.setdefault(index, {})[word] = finding

    def __bool__(self) -> bool:
        """Whether any box is marked."""
        return bool(self._culprits)

    def numbers(self, index: int) -> list[int]:
        """The numbers of the findings whose culprit is in a box, as in the list of all findings."""
        return [int(word.split()[0]) for word in self._culprits.get(index, {})]

    def blamed(self, index: int) -> dict[str, int]:
        """Keys of the nodes in a box that findings blame, each with the number of the first."""
        return {key: n for n, key in reversed(self._keys) if self._number.get(key) == index}

    def lines(self, index: int) -> list[str]:
        """What the label of a box says above its name; nothing for one without a culprit."""
        box, found = self._boxes[index], self._culprits.get(index, {})
        lines = [
            word if box.single else f"{word} at {short(below(finding.place, box.path))}"
            for word, finding in list(found.items())[:_SHOWN]
        ]
        return [*lines, f"... and {len(found) - _SHOWN} findings more"] if len(found) > _SHOWN else lines

    def tooltip(self, index: int) -> list[str]:
        """All findings in a box, with what to try."""
        found = [*self._culprits.get(index, {}).values(), *self._hints.get(index, [])]
        lines = []
        for one in found:
            lines += [one_line(one), *([f"  try: {one.suggestion}"] if one.suggestion else [])]
        return lines

    def ways(self, drawn: Container[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """The lines between boxes, as they are drawn, over which a fault went, and the finding's word."""
        found: dict[tuple[int, int], str] = {}
        for word, finding in self._ranked:
            way = [self._number[key] for key in finding.path if key in self._number]
            for one, two in pairwise(way):
                # A fault goes down with the values or up with the gradient.
                pair = (one, two) if (one, two) in drawn else (two, one)
                if pair in drawn:
                    found.setdefault(pair, word)
        return found

    def title(self) -> list[str]:
        """The first findings, for those that blame nothing inside of the model have no box to stand at."""
        lines = [f"{word} {at(finding)}: {finding.message}" for word, finding in self._ranked[:_SHOWN]]
        cut = [line if len(line) <= _TITLE else f"{line[: _TITLE - 4]} ..." for line in lines]
        more = len(self._ranked) - _SHOWN
        return [*cut, f"... and {more} findings more"] if more > 0 else cut
