"""Who presents the data, see ``fxgrad.presenting``: this module is a ``Presenter``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxgrad.diagnosis import diagnose
from fxgrad.errors import GraphvizMissingError
from fxgrad.frames import to_csv, to_pandas
from fxgrad.graph import find_site, module_flows, to_networkx
from fxgrad.render.comparing import comparison_text
from fxgrad.render.comparing import to_svg as comparison_svg
from fxgrad.render.dot import to_dot
from fxgrad.render.findings import html_text as findings_html
from fxgrad.render.findings import one_line as finding_line
from fxgrad.render.findings import plain_text as findings_text
from fxgrad.render.findings import rich_text as findings_rich
from fxgrad.render.lines import history_text, site_text
from fxgrad.render.page import comparison_html as comparison_page
from fxgrad.render.page import series_html
from fxgrad.render.page import to_html as flow_page
from fxgrad.render.page.notebook import Shown
from fxgrad.render.page.notebook import shown as page_shown
from fxgrad.render.plots import plot_flow, plot_history
from fxgrad.render.report import Report as report  # noqa: N813  # called like the functions
from fxgrad.render.report import report_text
from fxgrad.render.svg import notebook_html
from fxgrad.render.svg import to_svg as flow_svg
from fxgrad.render.text import table
from fxgrad.render.verdict import verdict
from fxgrad.run_file import Run
from fxgrad.schema import Comparison, Diagnosis, FlowSeries, GradientFlow
from fxgrad.series import flow_at, sampled, series_of
from fxgrad.store import to_json, write_whole

__all__ = [
    "comparison_page", "comparison_svg", "comparison_text", "diagnose", "find_site", "finding_line",
    "findings_html", "findings_rich", "findings_text", "flow_at", "flow_page", "flow_svg", "flow_text",
    "flows_of_ranks", "history_text", "module_flows", "notebook_html", "plot_flow", "plot_history", "report",
    "sampled", "series_of", "series_page", "shown", "site_text", "table", "to_csv", "to_dot", "to_json", "to_networkx",
    "to_pandas", "write_whole",
]  # fmt: skip

_JUDGED = 64  # flows of a run that the checks look at


def flows_of_ranks(flows: Sequence[GradientFlow], *, timeout: float, group: Any) -> Sequence[GradientFlow]:
    """See ``fxgrad.record.distributed``, which is the one here that loads torch."""
    from fxgrad.record import distributed

    return distributed.flows_of_ranks(flows, timeout=timeout, group=group)


def flow_text(flow: GradientFlow) -> str:
    """The report of a flow as plain text, as wide as the terminal."""
    return report_text(report(flow, flow.findings)).rstrip("\n")


def series_page(flows: FlowSeries, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The page of a run, with what the checks say of an even sample of it, and what was found while it ran."""
    if len(flows) and options.get("findings") is None:
        options = {**options, "findings": _judged(flows)}
    return series_html(flows, path, options)


def _judged(flows: FlowSeries) -> Diagnosis:
    found = diagnose(flows.sampled(_JUDGED))
    known = {(one.rule, one.place) for one in found.findings}
    recorded = flows.findings if isinstance(flows, Run) else ()
    earlier = {(one.rule, one.place): one for one in reversed(recorded) if (one.rule, one.place) not in known}
    ranks = {"error": 0, "warning": 1, "info": 2}
    both = sorted((*found.findings, *earlier.values()), key=lambda one: ranks[one.severity])
    return replace(found, findings=tuple(both))


def shown(what: GradientFlow | FlowSeries | Comparison, height: int, options: Mapping[str, Any]) -> Shown:
    """The page of any of these for a notebook, and its picture where Graphviz is there."""
    page = what.to_html(None, **options)
    drawn = what.sampled(1)[0] if isinstance(what, FlowSeries) else what
    flow = drawn.after if isinstance(drawn, Comparison) else drawn
    try:
        picture = drawn.to_svg()
    except GraphvizMissingError:
        picture = None
    return page_shown(page, picture, f"{flow.capture.model}: {verdict(flow, flow.findings)}", height)
