"""The picture as SVG: laid out by the Graphviz engine in pygraphviz's wheel, or else by a ``dot`` on PATH."""

from __future__ import annotations

import contextlib
import functools
import html
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphviz

from fxgrad.errors import GraphvizMissingError
from fxgrad.graph import ratios
from fxgrad.render.dot import to_dot
from fxgrad.render.findings import html_text
from fxgrad.render.words import norm_words, number, shape_words, short_source
from fxgrad.schema import Diagnosis, GradientFlow
from fxgrad.store import write_whole

_SLOW = 100_000  # characters of DOT from which layout takes long enough to say so


def to_svg(flow: GradientFlow, path: str | Path | None = None, **options: Any) -> str:
    """The picture as SVG text, also written to ``path`` if given; options as in ``PictureOptions``.

    Raises:
        OptionError: an unknown option or value, or a norm that was not measured at this level.
        GraphvizMissingError: no Graphviz engine is there; the DOT text is written beside ``path`` instead.
        FlowFileError: the file cannot be written.
    """
    dot = to_dot(flow, **options)
    text = _with_progress(dot)
    if text is None:
        message = "no Graphviz engine was found: install pygraphviz (pip install 'pygraphviz>=2.0'), or put dot on PATH"
        if path is not None:
            beside = Path(path).with_suffix(".dot")
            write_whole(beside, dot)
            message += f". The DOT text is in {beside}"
        raise GraphvizMissingError(message)
    if path is not None:
        write_whole(Path(path), text)
    return text


def _with_progress(dot: str) -> str | None:
    _find_fonts()
    if len(dot) < _SLOW or not sys.stderr.isatty():
        return lay_out(dot)
    from rich.console import Console

    with Console(stderr=True).status("laying out the graph ..."):
        return lay_out(dot)


def lay_out(dot: str) -> str | None:
    """SVG text of DOT text; None where no engine is installed."""
    try:
        import pygraphviz
    except ImportError:  # not installed, or built against a Graphviz that is no longer there
        return _by_program(dot)
    graph = pygraphviz.AGraph(string=dot)
    # From 1,000 nodes on draw() would write a warning to stderr, past whoever called us; to_svg shows progress instead.
    graph.number_of_nodes = lambda: 0
    try:
        drawn: bytes = graph.draw(format="svg", prog="dot")
    finally:
        graph.close()
    return drawn.decode("utf-8")


def _by_program(dot: str) -> str | None:
    try:
        return str(graphviz.Source(dot).pipe(format="svg", encoding="utf-8", quiet=True))
    except graphviz.ExecutableNotFound:
        return None


@functools.cache
def _find_fonts() -> None:
    """Lay out one node, once: the wheel's fontconfig reads the system's settings, and writes a line for each new word.

    It does so in C, to the process's stderr.
    """
    with _without_lines(b"Fontconfig "):
        lay_out("graph { a }")


@contextlib.contextmanager
def _without_lines(beginning: bytes) -> Iterator[None]:
    """Leave out what is written to stderr in lines with this beginning; everything else is written a little later."""
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
            stack.callback(os.close, kept)
            written = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(written.fileno(), 2)
        except OSError:  # there is no stderr, or no place for a file
            yield
            return
        try:
            yield
        finally:
            os.dup2(kept, 2)
            written.seek(0)
            for line in written:
                if not line.startswith(beginning):
                    os.write(2, line)


def notebook_html(flow: GradientFlow, diagnosis: Diagnosis | None = None) -> str:
    """The picture for a notebook, or a plain table where no Graphviz engine is installed, and the findings below."""
    words = html_text(diagnosis) if diagnosis is not None and diagnosis.findings else ""
    try:
        text = to_svg(flow, findings=diagnosis)
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
