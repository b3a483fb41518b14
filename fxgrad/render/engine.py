"""The Graphviz engine: the one in pygraphviz's wheel, or else a ``dot`` on PATH."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator

import graphviz

__all__ = ["lay_out"]


def lay_out(dot: str, form: str = "svg") -> str | None:
    """DOT text laid out, in one of dot's formats; None where no engine is installed."""
    _find_fonts()
    return _lay_out(dot, form)


def _lay_out(dot: str, form: str) -> str | None:
    try:
        import pygraphviz
    except ImportError:  # not installed, or built against a Graphviz that is no longer there
        return _by_program(dot, form)
    graph = pygraphviz.AGraph(string=dot)
    # From 1,000 nodes on draw() would write a warning to stderr, past whoever called us; to_svg shows progress instead.
    graph.number_of_nodes = lambda: 0
    try:
        drawn: bytes = graph.draw(format=form, prog="dot")
    finally:
        graph.close()
    return drawn.decode("utf-8")


def _by_program(dot: str, form: str) -> str | None:
    try:
        return str(graphviz.Source(dot).pipe(format=form, encoding="utf-8", quiet=True))
    except graphviz.ExecutableNotFound:
        return None


@functools.cache
def _find_fonts() -> None:
    """Lay out one node, once: the wheel's fontconfig reads the system's settings, and writes a line for each new word.

    It does so in C, to the process's stderr.
    """
    with _without_lines(b"Fontconfig "):
        _lay_out("graph { a }", "svg")


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
