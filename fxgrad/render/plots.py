"""Figures by matplotlib: the depth profile of a flow, and the course of a gradient over steps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fxgrad.errors import OptionError
from fxgrad.render.course import Course, course_of
from fxgrad.render.scale import DECADES, colour, scale_of
from fxgrad.render.themes import THEMES
from fxgrad.render.words import check_norm, look_of
from fxgrad.schema import GradientFlow, NormWord, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_flow", "plot_history"]

_LIGHT = THEMES["light"]
_BAD = "#000000"
_BLANK = "#ffffff"
_LEAST = 10.0  # largest over smallest number that an axis shows at least
_TICKS = 12  # names along an axis


def plot_flow(flow: GradientFlow, path: str | Path | None = None, *, norm: NormWord = "l2_norm") -> Figure:
    """The norm of each value's gradient against its place in the forward pass, on a log scale.

    Points have the colours of the scale; the culprits of errors and warnings are ringed and named.

    Raises:
        OptionError: matplotlib is not installed, or ``norm`` is unknown or was not measured.
    """
    check_norm(flow, norm)
    size, sites = scale_of(flow, norm), [site for site in flow.sites if site.measured]
    places = {site.id: place for place, site in enumerate(sites)}
    norms = {
        site.id: site.statistics.norm(norm) or 0.0
        for site in sites if site.statistics is not None and look_of(site.statistics) == "measured"
    }  # fmt: skip
    figure, axes = _figure(9.0, [4.0])
    axes.plot([places[name] for name in norms], list(norms.values()), color=_LIGHT.line, linewidth=0.8, zorder=1)
    axes.scatter(
        [places[name] for name in norms], list(norms.values()), c=[size.colour(value) for value in norms.values()],
        edgecolors=_LIGHT.line, linewidths=0.5, s=26, zorder=2,
    )  # fmt: skip
    axes.axhline(size.reference, color=_LIGHT.faint, linewidth=0.6, linestyle=":")
    for finding in (one for one in flow.findings if one.severity != "info"):
        name = finding.site if finding.site in norms else None
        if name is not None:
            axes.scatter(
                [places[name]], [norms[name]], s=130, facecolors="none", edgecolors=_LIGHT.accent, linewidths=2
            )
            axes.annotate(f" {finding.rule}", (places[name], norms[name]), color=_LIGHT.accent, weight="bold")
    for site in sites:
        if look_of(site.statistics) == "nonfinite":
            axes.axvline(places[site.id], color=_BAD, linewidth=1.2)
    if norms:
        axes.set_yscale("log")
    _names(axes, [site.id for site in sites])
    axes.set_ylabel(f"{norm} of the gradient")
    axes.set_title(f"{flow.capture.model}: inputs at the left, the loss at the right", loc="left", fontsize=10)
    return _finished(figure, path)


def plot_history(
    flows: Sequence[GradientFlow], path: str | Path | None = None, *, norm: NormWord = "l2_norm",
    values: Sequence[str] = (), notes: Mapping[str, Series] = MappingProxyType({}),
) -> Figure:  # fmt: skip
    """A heat map of blocks over steps in the colours of the scale.

    Above it the loss, where one was noted; then the loss side, findings and chosen values.

    Raises:
        OptionError: matplotlib is not installed, there is no flow, or ``norm`` is unknown or was not measured.
        SiteNotFoundError: the latest flow has no value of that name.
    """
    if not flows:
        message = "there is no flow to plot yet: run a backward pass under the watch first"
        raise OptionError(message)
    check_norm(flows[-1], norm)
    course = course_of(flows, norm, values, notes=notes)
    heights = [0.9] * bool(course.losses) + [1.3, max(1.5, 1.0 + 0.24 * len(course.lines))]
    figure, (*top, above, below) = _figure(9.0, heights)
    for axes in top:
        _losses(axes, course)
    _lines(above, course)
    _heat(below, course)
    (*top, above)[0].set_title(f"{course.model}: {norm} of the gradient over steps", loc="left", fontsize=10)
    return _finished(figure, path)


def _losses(axes: Any, course: Course) -> None:
    values = [[math.nan if v is None else v for v in line] for _, line in course.losses]
    for (name, _), line in zip(course.losses, values, strict=True):
        axes.plot(range(len(course.steps)), line, linewidth=1.2, label=name)
    if all(math.isnan(v) or v > 0 for line in values for v in line):
        axes.set_yscale("log")
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.set_xlim(-0.5, len(course.steps) - 0.5)
    axes.tick_params(labelbottom=False)
    axes.legend(fontsize=7, frameon=False, loc="best")


def _lines(axes: Any, course: Course) -> None:
    steps = range(len(course.steps))
    axes.plot(steps, [size.reference for size in course.sizes], color=_LIGHT.ink, linewidth=1.2, label="loss side")
    for line in course.chosen:
        axes.plot(steps, [math.nan if v is None else v for v in line.values], linewidth=1.2, label=line.name)
    if course.lines:
        first = course.lines[0]
        values = [math.nan if v is None else v for v in first.values]
        axes.plot(steps, values, color=_LIGHT.faint, linewidth=1.2, linestyle="--", label=first.name)
    found = [n for n, all_ in enumerate(course.findings) if any(one.severity != "info" for one in all_)]
    if found:  # ticks along the upper edge
        axes.plot(found, [0.97] * len(found), "|", color=_LIGHT.accent, markersize=6, markeredgewidth=1.6,
                  transform=axes.get_xaxis_transform(), label="a finding")  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < _LEAST:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / _LEAST**0.5, middle * _LEAST**0.5)
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.set_xlim(-0.5, len(course.steps) - 0.5)
    axes.tick_params(labelbottom=False)
    axes.legend(fontsize=7, frameon=False, loc="best")


def _heat(axes: Any, course: Course) -> None:
    for row, line in enumerate(course.lines):
        for step, (cell, size) in enumerate(zip(line.cells, course.sizes, strict=True)):
            shade = _BLANK
            if cell is not None and cell.look == "measured" and cell.value:
                shade = size.colour(cell.value)
            elif cell is not None and cell.look == "nonfinite":
                shade = _BAD
            axes.add_patch(_module("matplotlib.patches").Rectangle((step - 0.5, row - 0.5), 1, 1, color=shade, lw=0))
    axes.set_xlim(-0.5, len(course.steps) - 0.5)
    axes.set_ylim(len(course.lines) - 0.5, -0.5)
    axes.set_yticks(range(len(course.lines)), [line.name[-32:] for line in course.lines], fontsize=7)
    every = max(1, len(course.steps) // _TICKS)
    places = range(0, len(course.steps), every)
    axes.set_xticks(list(places), [str(course.steps[place]) for place in places], fontsize=7)
    axes.set_xlabel("backward pass")
    colours = _module("matplotlib.colors").ListedColormap([colour(n) for n in range(-DECADES, DECADES + 1)])
    bounds = _module("matplotlib.colors").BoundaryNorm([n - 0.5 for n in range(-DECADES, DECADES + 2)], colours.N)
    shown = _module("matplotlib.cm").ScalarMappable(bounds, colours)
    bar = axes.figure.colorbar(shown, ax=axes, orientation="horizontal", fraction=0.06, pad=0.14, aspect=40)
    bar.set_ticks([*range(-DECADES, DECADES + 1, 2)], labels=[f"{n:+d}" if n else "0" for n in range(-DECADES, 7, 2)])
    bar.set_label("decades against the loss side", fontsize=7)
    bar.ax.tick_params(labelsize=7)


def _names(axes: Any, names: Sequence[str]) -> None:
    every = max(1, len(names) // _TICKS)
    places = range(0, len(names), every)
    axes.set_xticks(list(places), [names[place][-24:] for place in places], rotation=35, ha="right", fontsize=7)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = "plot() needs matplotlib: pip install 'fxgrad[plot]'; print(history) needs nothing"
        raise OptionError(message) from error


def _figure(width: float, heights: Sequence[float]) -> tuple[Any, Any]:
    """A figure of its own, that no pyplot keeps, and its axes: one below the other where there are several heights."""
    figure = _module("matplotlib.figure").Figure(figsize=(width, sum(heights)), layout="constrained")
    return figure, figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights})


def _finished(figure: Any, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=160)
    made: Figure = figure
    return made
