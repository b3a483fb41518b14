"""``fxgrad plot``: a series over its steps, or a flow over its depth, in a terminal and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from rich.console import RenderableType

from fxgrad.command.outputs import check_paths, replace_all
from fxgrad.render.course import Course, course_of, course_text
from fxgrad.render.plots import plot_flow, plot_history
from fxgrad.render.report import Report, report_text
from fxgrad.render.words import check_norm
from fxgrad.schema import FlowSeries, GradientFlow, NormWord, Series

__all__ = ["plain", "shown", "write_figures"]


def shown(flows: Sequence[GradientFlow], norm: NormWord, values: Sequence[str]) -> RenderableType:
    """The heat map of a series, or the profile of a single flow.

    Raises:
        OptionError: the norm was not measured.
        SiteNotFoundError: there is no such value.
    """
    check_norm(flows[-1], norm)
    if len(flows) == 1 and not values:
        return Report(flows[0], flows[0].findings, norm, more="fxgrad render --all")
    return course_of(flows, norm, values, notes=_notes(flows))


def _notes(flows: Sequence[GradientFlow]) -> Mapping[str, Series]:
    return flows.notes if isinstance(flows, FlowSeries) else {}


def plain(part: RenderableType) -> str:
    """The same without colour, as wide as the terminal or ``COLUMNS``."""
    if isinstance(part, Course):
        return course_text(part)
    return report_text(part) if isinstance(part, Report) else str(part)


def write_figures(
    flows: Sequence[GradientFlow], paths: Sequence[Path], norm: NormWord, values: Sequence[str]
) -> None:  # fmt: skip
    """Write the figure to every file, in the format of its suffix.

    Raises:
        OptionError: a file cannot be written, or matplotlib is not installed.
    """
    check_paths(paths, (".png", ".svg", ".pdf"), needs_converter=False)
    made: dict[Path, str | bytes] = {}
    for path in paths:
        one = len(flows) == 1 and not values
        figure = (
            plot_flow(flows[0], norm=norm)
            if one
            else plot_history(flows, norm=norm, values=values, notes=_notes(flows))
        )
        buffer = BytesIO()
        figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=160)
        made[path] = buffer.getvalue()
    replace_all(made)
