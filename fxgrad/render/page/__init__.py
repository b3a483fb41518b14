"""The interactive page: one file that opens without a network, in which one walks through the model.

``web/`` in the repository holds the sources of what runs in the browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.render.page.code import code_of
from fxgrad.render.page.course import course_data, run_of
from fxgrad.render.page.difference import before_data, told
from fxgrad.render.page.document import document
from fxgrad.render.page.options import PageOptions, page_options
from fxgrad.render.page.payload import Data, flow_data, scale_data, shown_files
from fxgrad.schema import Comparison, Diagnosis, FlowSeries, GradientFlow
from fxgrad.store import write_whole

__all__ = ["comparison_html", "series_html", "to_html"]


def to_html(flow: GradientFlow, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The page of a flow as HTML text, also written to ``path`` if given; options: ``fxgrad.schema.PageWords``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
        FlowFileError: the file cannot be written.
    """
    chosen, findings = page_options(flow, options)
    diagnosis = findings or Diagnosis(())
    return _written(document(_data(flow, diagnosis, chosen), flow.capture.model, diagnosis), path)


def series_html(flows: FlowSeries, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The page of a run: that of its latest flow, with the norms of all recorded events; see ``to_html``.

    Raises:
        OptionError: there is no flow, an unknown option or value, or a norm that was not measured.
        FlowFileError: the file cannot be written.
    """
    if not len(flows):
        message = "there is no flow to show yet: no backward pass was recorded"
        raise OptionError(message)
    run = run_of(flows)
    chosen, findings = page_options(run.shown, options)
    diagnosis = findings or Diagnosis(())
    data = {**_data(run.shown, diagnosis, chosen), "series": course_data(run)}
    return _written(document(data, run.shown.capture.model, diagnosis), path)


def comparison_html(comparison: Comparison, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The page of what became of each gradient, of two runs at each step that both have; see ``to_html``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
        FlowFileError: the file cannot be written.
    """
    after = comparison.after
    chosen, findings = page_options(after, {"norm": comparison.norm, **options})
    diagnosis = findings or after.diagnosis
    data = {**_data(after, diagnosis, chosen, told(comparison)), "before": before_data(comparison)}
    if comparison.runs is not None:
        one, two = comparison.runs
        known = set(one.steps)
        steps = [step for step in two.steps if step in known]
        for name, run in (("before_series", one), ("series", two)):
            data[name] = course_data(run_of(run, steps, after))
    return _written(document(data, f"{after.capture.model}, before and after", diagnosis), path)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_whole(Path(path), text)
    return text


def _data(flow: GradientFlow, diagnosis: Diagnosis, options: PageOptions, verdict: str | None = None) -> Data:
    return {
        "verdict": verdict,
        "format": 1,
        "theme": options.theme,
        "norm": options.norm,
        "scale": options.scale,
        "palette": scale_data(),
        "flow": flow_data(flow, diagnosis, options),
        "code": code_of(flow, shown_files(flow)) if options.source else None,
    }
