"""The picture as an SVG file, and what a notebook shows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from fxgrad.errors import GraphvizMissingError
from fxgrad.render.dot import to_dot
from fxgrad.render.options import PictureOptions, options_from
from fxgrad.render.picture import draw
from fxgrad.render.profile import profile
from fxgrad.render.report import Report
from fxgrad.schema import Diagnosis, GradientFlow
from fxgrad.store import write_whole

_NOTEBOOK = 100  # columns of words in a notebook
_SLOW = 1000  # values from which layout takes long enough to say so


def to_svg(
    flow: GradientFlow, path: str | Path | None = None, options: Mapping[str, Any] | None = None, *,
    before: GradientFlow | None = None,
) -> str:  # fmt: skip
    """The picture as SVG text, also written to ``path`` if given; options as in ``fxgrad.schema.PictureWords``.

    With ``before``, colours mean what became of each gradient since that flow.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured at this level.
        GraphvizMissingError: no Graphviz engine is there; the DOT text is written beside ``path`` instead.
        FlowFileError: the file cannot be written.
    """
    chosen = options_from(flow, options or {})
    text = _with_progress(flow, chosen, before)
    if text is None:
        message = "no Graphviz engine was found: install pygraphviz (pip install 'pygraphviz>=2.0'), or put dot on PATH"
        if path is not None:
            beside = Path(path).with_suffix(".dot")
            write_whole(beside, to_dot(flow, options=options))
            message += f". The DOT text is in {beside}"
        raise GraphvizMissingError(message)
    if path is not None:
        write_whole(Path(path), text)
    return text


def _with_progress(flow: GradientFlow, options: PictureOptions, before: GradientFlow | None) -> str | None:
    if len(flow) < _SLOW or not sys.stderr.isatty():
        return draw(flow, options, before)
    with Console(stderr=True).status("laying out the graph ..."):
        return draw(flow, options, before)


def notebook_html(flow: GradientFlow, diagnosis: Diagnosis) -> str:
    """The picture and the profile below it for a notebook; without a Graphviz engine, the answer in words."""
    try:
        text = to_svg(flow, options={"findings": diagnosis})
    except GraphvizMissingError:
        return _preformatted(Report(flow, diagnosis.findings))
    return text[text.index("<svg") :] + _preformatted(*profile(flow, diagnosis.findings, _NOTEBOOK))


def _preformatted(*parts: RenderableType) -> str:
    """What a terminal shows, colours included, as HTML without script or style sheet."""
    console = Console(file=StringIO(), record=True, width=_NOTEBOOK, emoji=False, force_jupyter=False)
    for part in parts:
        console.print(part)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
