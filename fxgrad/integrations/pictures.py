"""The picture of an entry, for tools that show images: drawn at first, and when something new is found."""

from __future__ import annotations

import warnings

from fxgrad.errors import GraphvizMissingError, LogWarning, OptionError
from fxgrad.render.convert import converted
from fxgrad.schema import LogEntry

__all__ = ["Pictures"]


class Pictures:
    """Draws when there is something new to see, for a picture takes longer than a step.

    Args:
        on: False: never.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._first = True

    def svg(self, entry: LogEntry) -> str | None:
        """The picture as SVG text; None where there is nothing new, or no Graphviz."""
        if not self._on or not (self._first or entry.fresh):
            return None
        try:
            text = entry.flow.to_svg(findings=entry.diagnosis.findings)
        except GraphvizMissingError as error:
            self._off(error)
            return None
        self._first = False
        return text

    def png(self, entry: LogEntry) -> bytes | None:
        """The same as a PNG; None also where nothing is installed that makes one."""
        text = self.svg(entry)
        if text is None:
            return None
        try:
            return converted(text, "png")
        except OptionError as error:
            self._off(error)
            return None

    def _off(self, error: Exception) -> None:
        """Curves and findings go on."""
        self._on = False
        warnings.warn(f"no pictures are logged: {error}", LogWarning, stacklevel=2)
