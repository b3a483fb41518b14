"""``-o``: a flow into files, by their suffix, all of them whole or none.

Imports no torch, as drawing a saved flow needs none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console, RenderableType
from rich.text import Text

from fxgrad.errors import GraphvizMissingError, OptionError
from fxgrad.frames import check_parquet, to_csv, to_parquet
from fxgrad.render.convert import check_converter, converted
from fxgrad.render.report import Report, text_width
from fxgrad.schema import (
    Comparison,
    Diagnosis,
    DirectionWord,
    FlowSeries,
    GradientFlow,
    NormWord,
    PageThemeWord,
    PageWords,
    PictureWords,
    ScaleWord,
    ThemeWord,
)

__all__ = [
    "SUFFIXES",
    "Drawing",
    "View",
    "check_paths",
    "error_lines",
    "plain_text",
    "replace_all",
    "write_all",
    "write_difference",
]

_CONVERTED = (".png", ".pdf")
_ORDINARY_MODE = 0o666  # of a new file, before the umask


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a picture is drawn; see ``fxgrad.schema.PictureWords``."""

    norm: NormWord = "l2_norm"
    depth: int | None = None
    fold: bool = True
    scale: ScaleWord = "relative"
    theme: ThemeWord = "light"
    direction: DirectionWord = "down"


@dataclass(frozen=True, slots=True)
class View:
    """How a flow is shown.

    Attributes:
        drawing: how a picture of it is drawn.
        diagnosis: what the checks say of the flow.
        whole: whether findings are told with all their evidence.
        every: whether a table of every value follows.
        run: where the flow is the latest one of a run, that: its page shows all of it.
    """

    drawing: Drawing = field(default_factory=Drawing)
    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(()))
    whole: bool = False
    every: bool = False
    run: FlowSeries | None = None

    def shown(self, flow: GradientFlow) -> list[RenderableType]:
        """What is printed, part by part."""
        told = self.diagnosis if self.whole else None
        parts: list[RenderableType] = [
            Report(flow, self.diagnosis.findings, self.drawing.norm, "--all", "--check", told)
        ]
        if self.every:
            parts += [Text(), flow.table(norm=self.drawing.norm, findings=self.diagnosis.findings)]
        return parts

    def page(self) -> PageWords:
        """The options of its page: light or dark as the reader's system is set, unless dark was asked for."""
        drawing = self.drawing
        theme: PageThemeWord = "dark" if drawing.theme == "dark" else "auto"
        findings = self.diagnosis if self.run is None else None
        return {"findings": findings, "norm": drawing.norm, "scale": drawing.scale, "theme": theme}

    def picture(self) -> PictureWords:
        """The options of its picture."""
        words: PictureWords = {"findings": self.diagnosis.findings}
        words.update(asdict(self.drawing))  # type: ignore[typeddict-item]  # the same names, of the same types
        return words


def plain_text(flow: GradientFlow, view: View) -> str:
    """What is printed, without colour, as wide as the terminal or ``COLUMNS``."""
    buffer = StringIO()
    console = Console(file=buffer, width=text_width(), color_system=None, emoji=False)
    for part in view.shown(flow):
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def error_lines(view: View) -> list[str]:
    """A line for each error: what is never left out.  With ``whole``, all that is to be said of findings."""
    if view.whole:
        return str(view.diagnosis).splitlines()
    return [str(finding) for finding in view.diagnosis.findings if finding.severity == "error"]


_WRITERS: Mapping[str, Callable[[GradientFlow, View], str | bytes]] = {
    ".svg": lambda flow, view: flow.to_svg(**view.picture()),
    ".png": lambda flow, view: converted(flow.to_svg(**view.picture()), "png"),
    ".pdf": lambda flow, view: converted(flow.to_svg(**view.picture()), "pdf"),
    ".html": lambda flow, view: flow.to_html(**view.page()) if view.run is None else view.run.to_html(**view.page()),
    ".dot": lambda flow, view: flow.to_dot(**view.picture()),
    ".json": lambda flow, _: flow.to_json(),
    ".csv": lambda flow, _: to_csv([flow]),
    ".parquet": lambda flow, _: to_parquet([flow]),
    ".txt": plain_text,
}

#: The suffixes that ``-o`` knows.
SUFFIXES = tuple(_WRITERS)


def check_paths(
    paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, option: str = "-o", *, needs_converter: bool = True
) -> None:  # fmt: skip
    """Find out before the work whether its result could be written.

    Raises:
        OptionError: an unknown suffix, a folder that is missing or closed, something else in place of a file.
    """
    for path in paths:
        if path.suffix not in suffixes:
            message = f"{option} {path}: no format goes by the suffix {path.suffix!r}. Use one of {', '.join(suffixes)}"
            raise OptionError(message)
        if needs_converter and path.suffix in _CONVERTED:
            check_converter(path.suffix.removeprefix("."), f"{option} {path}")
        if path.suffix == ".parquet":
            check_parquet(f"{option} {path}")
        folder = path.parent
        if not folder.is_dir():
            message = f"{option} {path}: there is no folder {folder}. Make it first, or name another"
            raise OptionError(message)
        if path.exists() and not path.is_file():
            message = f"{option} {path}: there is something that is no ordinary file. Name another place"
            raise OptionError(message)
        if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            message = f"{option} {path}: no permission to write there. Name another place"
            raise OptionError(message)


def write_all(flow: GradientFlow, paths: Sequence[Path], view: View) -> None:
    """Write every file, each in place at once when all texts are ready, so that none is ever half-written.

    Raises:
        OptionError: a file cannot be written.
        GraphvizMissingError: no picture can be laid out; its DOT text and all other files are written nevertheless.
    """
    texts: dict[Path, str | bytes] = {}
    missing: GraphvizMissingError | None = None
    for path in paths:
        try:
            texts[path] = _WRITERS[path.suffix](flow, view)
        except GraphvizMissingError as error:
            missing = error
            texts.setdefault(path.with_suffix(".dot"), _WRITERS[".dot"](flow, view))
    replace_all(texts)
    if missing is not None:
        written = ", ".join(map(str, texts))
        message = f"{missing}\nWritten instead of the picture: {written}"
        raise GraphvizMissingError(message) from missing


def write_difference(comparison: Comparison, paths: Sequence[Path], options: PictureWords) -> None:
    """Write the picture, the page or the words of a comparison to every file, by its suffix.

    Raises:
        OptionError: a file cannot be written, or nothing is installed that makes a PNG or PDF.
        GraphvizMissingError: no picture can be laid out.
    """
    made: dict[Path, str | bytes] = {}
    for path in paths:
        if path.suffix == ".txt":
            made[path] = f"{comparison}\n"
            continue
        if path.suffix == ".html":
            theme: PageThemeWord = "dark" if options.get("theme") == "dark" else "auto"
            made[path] = comparison.to_html(theme=theme)
            continue
        svg = comparison.to_svg(**options)
        made[path] = svg if path.suffix == ".svg" else converted(svg, "png" if path.suffix == ".png" else "pdf")
    replace_all(made)


def replace_all(texts: Mapping[Path, str] | Mapping[Path, str | bytes], option: str = "-o") -> None:
    """Write every text to its file, when all of them lie ready beside it.

    Raises:
        OptionError: a file cannot be written.
    """
    with ExitStack() as leftovers:
        ready: list[tuple[Path, Path]] = []
        for path, text in texts.items():
            try:
                ready.append((_stage(path, text, leftovers), path))
            except OSError as error:
                raise _unwritable(option, path, error) from error
        for staged, path in ready:
            try:
                staged.replace(path.resolve())  # through a link to the file that it names
            except OSError as error:
                raise _unwritable(option, path, error) from error


def _stage(path: Path, text: str | bytes, leftovers: ExitStack) -> Path:
    """Write ``text`` beside ``path``; ``leftovers`` removes it unless it is moved into place."""
    target = path.resolve()
    with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        staged = Path(file.name)
        leftovers.callback(_remove, staged)
        file.write(text if isinstance(text, bytes) else text.encode("utf-8"))
    if target.exists():
        shutil.copymode(target, staged)
    else:
        umask = os.umask(0)
        os.umask(umask)
        staged.chmod(_ORDINARY_MODE & ~umask)  # a temporary file is private, the result is not
    return staged


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _unwritable(option: str, path: Path, error: OSError) -> OptionError:
    return OptionError(f"{option} {path}: cannot be written: {error.strerror or error}. Name another place")
