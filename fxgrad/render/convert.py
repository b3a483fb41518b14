"""A picture as PNG or PDF, by CairoSVG where it is installed, or else by ``rsvg-convert`` on PATH."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from typing import Literal

from fxgrad.errors import OptionError

__all__ = ["check_converter", "converted"]

_SHARPER = 2  # pixels of a PNG for each point
_PROGRAM = "rsvg-convert"


def check_converter(form: str, asked: str) -> None:
    """Find out before the work whether a picture could be converted.

    Raises:
        OptionError: nothing is installed that could; ``asked`` says what for.
    """
    if importlib.util.find_spec("cairosvg") is None and shutil.which(_PROGRAM) is None:
        message = (
            f"{asked}: making a .{form} needs CairoSVG (pip install 'fxgrad[image]') or {_PROGRAM} on PATH. "
            "Install one of them, or write .svg"
        )
        raise OptionError(message)


def converted(svg: str, form: Literal["png", "pdf"]) -> bytes:
    """SVG text as the bytes of a ``"png"`` (two pixels a point) or a ``"pdf"``.

    Raises:
        OptionError: nothing is installed that could convert it.
    """
    check_converter(form, f"a .{form}")
    if importlib.util.find_spec("cairosvg") is not None:
        cairosvg = importlib.import_module("cairosvg")
        made: bytes = getattr(cairosvg, f"svg2{form}")(bytestring=svg.encode(), scale=_SHARPER if form == "png" else 1)
        return made
    program = shutil.which(_PROGRAM) or _PROGRAM
    words = [program, f"--format={form}", *([f"--zoom={_SHARPER}"] if form == "png" else [])]
    return subprocess.run(words, input=svg.encode(), capture_output=True, check=True).stdout  # noqa: S603  # no shell, no name from outside
