"""Every value of a flow as a terminal table in backward order."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from io import StringIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fxgrad.errors import OptionError
from fxgrad.graph import backward_order, ratios
from fxgrad.render.findings import severity_counts
from fxgrad.render.marks import drops_to_mark, findings_from, nodes_blamed, ranked
from fxgrad.render.palette import text_colour
from fxgrad.render.profile import short_middle
from fxgrad.render.report import text_width
from fxgrad.render.scale import Size, scale_of
from fxgrad.render.words import (
    before_after,
    blind_counts,
    check_norm,
    look_of,
    norm_words,
    number,
    printable,
    rewritten_counts,
    rewritten_words,
    rule_words,
    shape_words,
    short_source,
)
from fxgrad.schema import Diagnosis, Finding, GradientFlow, NormWord, Site

_BAR = 12
_AROUND = 3  # of each column: a border and the space at both sides
_GIVE_WAY = (6, 5, 3, 1, 4)  # columns, the first to go first: source, zeros, log scale, shape, ratio
_NAME = 20  # columns that a name gets before others give way
_DECADES = 2.0  # a bar that is shorter than this is stretched to it, or round-off would look like a fault
_REWRITTEN = 10  # rows for edges, and for parameters, that rules act on
_STYLES = {
    "measured": "",
    "zero": "bold yellow",
    "nonfinite": "bold red",
    "outside_range": "italic",
    "not_measured": "dim",
}


class FlowTable(Table):
    """A rich table that reads as a table wherever it is printed: on a narrow screen it leaves columns out.

    A row of a value is one line.  Its name gives way first, in the middle, then the columns of ``_GIVE_WAY``.
    """

    sites = 0  # rows of values, at the top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table in the room that there is."""
        wide = [max(map(_width, [column.header, *column.cells])) for column in self.columns]
        rest = {n: width + _AROUND for n, width in enumerate(wide) if n}
        room = options.max_width - 1 - _AROUND  # of the names
        gone = [n for n in _GIVE_WAY if sum(rest.values()) + min(wide[0], _NAME) > room and rest.pop(n)]
        name = max(1, min(wide[0], room - sum(rest.values())))
        words = ", ".join(str(self.columns[n].header) for n in sorted(gone))
        caption = Text.assemble(self.caption or "", f"; no room for: {words}" if gone else "")
        shown = Table(title=self.title, caption=caption, expand=False)
        for n in (0, *rest):
            column = self.columns[n]
            shown.add_column(column.header, justify=column.justify, overflow="fold", width=wide[n] if n else name)
        listed = [list(self.columns[n].cells) for n in (0, *rest)]
        for n, (row, cells) in enumerate(zip(self.rows, zip(*listed, strict=True), strict=True)):
            first = _shortened(cells[0], name) if n < self.sites else cells[0]
            shown.add_row(first, *cells[1:], style=row.style, end_section=row.end_section)
        yield from console.render(shown, options)

    def __str__(self) -> str:
        """The table as plain text, as wide as the terminal."""
        buffer = StringIO()
        Console(file=buffer, width=text_width(), color_system=None, emoji=False).print(self)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def __repr__(self) -> str:
        """How many rows there are."""
        return f"FlowTable({self.row_count} rows)"


def table(
    flow: GradientFlow, *, norm: NormWord = "l2_norm", limit: int | None = None,
    findings: Iterable[Finding] | Diagnosis | None = None,
) -> FlowTable:  # fmt: skip
    """A rich table in backward order: from the loss to the inputs.

    The ratio is always one of l2 norms: a site's over that of the nearest measured sites nearer to the loss.

    Args:
        flow: what to show.
        norm: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``, in the units of the gradient.
        limit: rows of sites at most; the largest drops, culprits and what is special are kept first.  Rewritten edges
            and parameters follow below, some of each.
        findings: whose culprits are marked, or a ``Diagnosis``; None for none.

    Raises:
        OptionError: ``norm`` is unknown or not measured at this level, ``limit`` is no positive number, or
            ``findings`` holds something else.
    """
    check_norm(flow, norm)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        message = f"limit must be a whole number of at least 1, but is {limit!r}"
        raise OptionError(message)
    rows = [site for site in backward_order(flow) if site.measured]
    found = findings_from(findings)
    drops = {drop.site.id for drop in drops_to_mark(flow, found)}
    marks = _marks(flow, found)
    shown = _chosen(rows, marks, drops, limit)
    title = f"Gradient flow of {flow.capture.model} (loss at the top, inputs at the bottom)"
    caption = _caption(flow, len(rows) - len(shown), found)
    # Text and not str, here and in the rows, so that no name is taken for markup or an emoji.
    result = FlowTable(title=_text(title, "bold"), caption=_text(caption, "dim italic"), expand=False)
    _add_columns(result, norm)
    known, scale, size = ratios(flow), _scale(flow, norm), scale_of(flow, norm)
    for site in shown:
        marker = "<- drop " if site.id in drops else ""
        name = _text(f"{_site_words(site)} {rewritten_words(site, norm)}".strip())
        ratio = f"{marker}x{number(known[site.id])}" if site.id in known else ""
        bar = Text(_bar(site, norm, scale), _colours(site, norm, size))
        words = (shape_words(site), norm_words(site.statistics, norm)), (ratio, _zeros(site), short_source(site.source))
        style = "bold reverse" if marker else _STYLES[look_of(site.statistics)]
        culprit = [_text(f"<- {word}", "bold magenta") for word in marks.get(site.id, [])]
        cells = (*map(_text, words[0]), bar, *map(_text, words[1]))
        result.add_row(Text("\n").join([name, *culprit]), *cells, style=style)
    result.sites = len(shown)
    _add_rewritten(result, flow, norm)
    return result


def _width(cell: object) -> int:
    return max(map(cell_len, str(cell).splitlines()), default=0)


def _shortened(cell: RenderableType, room: int) -> RenderableType:
    """A cell whose lines lack their middle where they are longer than ``room``."""
    if not isinstance(cell, Text) or _width(cell) <= room:
        return cell
    lines = cell.split()
    return Text("\n").join(
        line if cell_len(line.plain) <= room else Text(short_middle(line.plain, room), line.style) for line in lines
    )


def _add_columns(table: Table, norm: NormWord) -> None:
    table.add_column("site, op", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column(norm, justify="right", overflow="fold")  # folded and never cut: half a number is a wrong one
    table.add_column("log scale", no_wrap=True)
    table.add_column("ratio", justify="right", overflow="fold")
    table.add_column("zeros", justify="right")
    table.add_column("source", overflow="fold")


def _colours(site: Site, norm: NormWord, size: Size) -> str:
    """The style of a bar: ink that reads on the colour of the scale."""
    value = site.statistics.norm(norm) if site.statistics is not None else None
    if look_of(site.statistics) != "measured" or not value:
        return ""
    ground = size.colour(value)
    return f"{text_colour(ground)} on {ground} not reverse"


def _add_rewritten(table: Table, flow: GradientFlow, norm: NormWord) -> None:
    """Rows for the edges and parameters that rewrite rules act on, at most ``_REWRITTEN`` of each."""
    edges = [
        (f"{edge.producer}{edge.output_position} -> {edge.consumer.key}", edge.rewritten)
        for edge in flow.edges if edge.rewritten is not None
    ]  # fmt: skip
    parameters = [(record.name, record.rewritten) for record in flow.parameters if record.rewritten is not None]
    if edges or parameters:
        table.add_section()
    for listed in (edges, parameters):
        for name, rewritten in listed[:_REWRITTEN]:
            words = f"{name} rewritten {before_after(rewritten, norm)} by {rule_words(rewritten)}"
            table.add_row(_text(words), "", _text(norm_words(rewritten.before, norm)))
        if len(listed) > _REWRITTEN:
            table.add_row(_text(f"... and {len(listed) - _REWRITTEN} more"))


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style)


def _marks(flow: GradientFlow, findings: Sequence[Finding]) -> dict[str, list[str]]:
    """What stands at the site that a finding blames, or at all sites of the node where it names none, by site id."""
    ids: dict[str, list[str]] = {}
    for site in flow.sites:
        ids.setdefault(site.key, []).append(site.id)
    marks: dict[str, list[str]] = {}
    named = ranked(findings)
    for (word, finding), keys in zip(named, nodes_blamed(flow, [one for _, one in named]), strict=True):
        blamed = [name for key in keys for name in ids.get(key, [])]
        for name in [finding.site] if finding.site in blamed else blamed:
            marks.setdefault(name, []).append(word)
    return marks


def _site_words(site: Site) -> str:
    """The site's id, and the op where the id does not tell it: the class of a leaf module."""
    return f"{site.id} {site.node.module_type}" if site.op == "call_module" else site.id


def _zeros(site: Site) -> str:
    """Share of exact zeros; 0% and 100% mean none and all."""
    if site.zero_count is None or site.statistics is None or not site.statistics.numel:
        return ""
    share = site.zero_count / site.statistics.numel
    if 0 < share < 0.01:  # noqa: PLR2004  # one per cent
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"  # noqa: PLR2004


def _chosen(rows: list[Site], culprits: Container[str], drops: Container[str], limit: int | None) -> list[Site]:
    """At most ``limit`` rows in their order: culprits, drops and special gradients first, then those near the loss."""
    if limit is None or len(rows) <= limit:
        return rows
    ranks = [(site.id not in culprits, site.id not in drops, look_of(site.statistics) == "measured") for site in rows]
    kept = {rows[n].id for n in sorted(range(len(rows)), key=ranks.__getitem__)[:limit]}
    return [site for site in rows if site.id in kept]


def _scale(flow: GradientFlow, norm: NormWord) -> tuple[float, float]:
    """log10 of the smallest and largest positive finite norm."""
    values = [site.statistics.norm(norm) for site in flow.sites if site.statistics is not None]
    logs = [math.log10(value) for value in values if value and math.isfinite(value)]
    return (min(logs), max(logs)) if logs else (0.0, 0.0)


def _bar(site: Site, norm: NormWord, scale: tuple[float, float]) -> str:
    """A bar whose length is the norm on a log scale, so that a drop is seen without reading numbers."""
    look = look_of(site.statistics)
    if look != "measured" or site.statistics is None:
        return {"zero": "0", "nonfinite": "!" * _BAR, "outside_range": "?"}.get(look, "").ljust(_BAR)
    low, high = scale
    value = site.statistics.norm(norm)
    # Norms that lie close together all get long bars: their differences are no story.
    length = round(_BAR * (1 - (high - math.log10(value)) / max(high - low, _DECADES))) if value else 0
    return ("#" * max(1, length)).ljust(_BAR)


def _caption(flow: GradientFlow, hidden: int, findings: Iterable[Finding]) -> str:
    parts = [f"loss: {flow.event.loss}"]
    counts = severity_counts(findings)
    if counts:
        parts.append(f"findings: {counts}")
    if hidden:
        parts.append(f"{hidden} more rows")
    blind = blind_counts(flow)
    if blind:
        parts.append(f"without a gradient: {blind}")
    if rewritten_counts(flow):
        parts.append(f"rewritten besides sites: {rewritten_counts(flow)}")
    return "; ".join(parts)
