"""The picture as an SVG file, and what a notebook shows."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxgrad.errors import GraphvizMissingError
from fxgrad.graph import ratios
from fxgrad.render.dot import to_dot
from fxgrad.render.findings import html_text
from fxgrad.render.options import PictureOptions, options_from
from fxgrad.render.picture import draw
from fxgrad.render.words import norm_words, number, shape_words, short_source
from fxgrad.schema import Diagnosis, GradientFlow
from fxgrad.store import write_whole

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
    from rich.console import Console

    with Console(stderr=True).status("laying out the graph ..."):
        return draw(flow, options, before)


def notebook_html(flow: GradientFlow, diagnosis: Diagnosis | None = None) -> str:
    """The picture for a notebook, or a plain table where no Graphviz engine is installed, and the findings below."""
    words = html_text(diagnosis) if diagnosis is not None and diagnosis.findings else ""
    try:
        text = to_svg(flow, options={"findings": diagnosis})
    except GraphvizMissingError:
        return _html_table(flow) + words
    return text[text.index("<svg") :] + words


def _html_table(flow: GradientFlow) -> str:
    known = ratios(flow)
    rows = []
    for site in reversed(flow.sites):
        cells = (
            site.id,
            shape_words(site),
            norm_words(site.statistics, "l2_norm"),
            f"x{number(known[site.id])}" if site.id in known else "",
            short_source(site.source),
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{word}</th>" for word in ("site", "shape", "l2_norm", "ratio", "source"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
