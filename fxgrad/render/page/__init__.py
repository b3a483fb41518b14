"""The interactive page: one file that opens without a network, in which one walks through the model.

``web/`` in the repository holds the sources of what runs in the browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxgrad.render.page.code import code_of
from fxgrad.render.page.document import document
from fxgrad.render.page.options import PageOptions, page_options
from fxgrad.render.page.payload import Data, flow_data, scale_data, shown_files
from fxgrad.schema import Diagnosis, GradientFlow
from fxgrad.store import write_whole

__all__ = ["to_html"]


def to_html(flow: GradientFlow, path: str | Path | None, options: Mapping[str, Any]) -> str:
    """The page of a flow as HTML text, also written to ``path`` if given; options: ``fxgrad.schema.PageWords``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured.
        FlowFileError: the file cannot be written.
    """
    chosen, findings = page_options(flow, options)
    diagnosis = findings or Diagnosis(())
    text = document(_data(flow, diagnosis, chosen), flow.capture.model, diagnosis)
    if path is not None:
        write_whole(Path(path), text)
    return text


def _data(flow: GradientFlow, diagnosis: Diagnosis, options: PageOptions) -> Data:
    return {
        "format": 1,
        "theme": options.theme,
        "norm": options.norm,
        "scale": options.scale,
        "palette": scale_data(),
        "flow": flow_data(flow, diagnosis, options),
        "code": code_of(flow, shown_files(flow)) if options.source else None,
    }
