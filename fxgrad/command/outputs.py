"""``-o``: a flow into files, by their suffix, all of them whole or none.

Imports no torch, as drawing a saved flow needs none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console
from rich.text import Text

from fxgrad.errors import GraphvizMissingError, OptionError
from fxgrad.render.text import summary
from fxgrad.schema import Finding, GradientFlow, NormWord

__all__ = ["SUFFIXES", "View", "check_paths", "plain_text", "replace_all", "write_all"]

_ORDINARY_MODE = 0o666  # of a new file, before the umask
_TEXT_WIDTH = 160  # columns of a table that goes to a file or a pipe, where there is no terminal to ask


@dataclass(frozen=True, slots=True)
class View:
    """How a flow is shown.

    Attributes:
        norm: which norm colours and numbers mean.
        depth: module depth of the clusters in a picture, None for an automatic one.
        findings: what the checks say of the flow.
        listed: whether they are printed one by one behind the summary, which then leaves them out.
    """

    norm: NormWord = "l2_norm"
    depth: int | None = None
    findings: tuple[Finding, ...] = ()
    listed: bool = False

    def summary(self, flow: GradientFlow) -> str:
        """The lines below the table."""
        return summary(flow, () if self.listed else self.findings)


def plain_text(flow: GradientFlow, view: View) -> str:
    """The table and the summary without colour."""
    buffer = StringIO()
    console = Console(file=buffer, width=_TEXT_WIDTH)
    console.print(flow.table(norm=view.norm, findings=view.findings))
    console.print(Text(view.summary(flow)), soft_wrap=True)  # names are no markup
    return buffer.getvalue()


_WRITERS: Mapping[str, Callable[[GradientFlow, View], str]] = {
    ".svg": lambda flow, view: flow.to_svg(norm=view.norm, depth=view.depth, findings=view.findings),
    ".dot": lambda flow, view: flow.to_dot(norm=view.norm, depth=view.depth, findings=view.findings),
    ".json": lambda flow, _: flow.to_json(),
    ".txt": plain_text,
}

#: The suffixes that ``-o`` knows.
SUFFIXES = tuple(_WRITERS)


def check_paths(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, option: str = "-o") -> None:
    """Find out before the work whether its result could be written.

    Raises:
        OptionError: an unknown suffix, a folder that is missing or closed, something else in place of a file.
    """
    for path in paths:
        if path.suffix not in suffixes:
            message = f"{option} {path}: no format goes by the suffix {path.suffix!r}. Use one of {', '.join(suffixes)}"
            raise OptionError(message)
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
    texts: dict[Path, str] = {}
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


def replace_all(texts: Mapping[Path, str], option: str = "-o") -> None:
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


def _stage(path: Path, text: str, leftovers: ExitStack) -> Path:
    """Write ``text`` beside ``path``; ``leftovers`` removes it unless it is moved into place."""
    target = path.resolve()
    with NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as file:  # fmt: skip
        staged = Path(file.name)
        leftovers.callback(_remove, staged)
        file.write(text)
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
