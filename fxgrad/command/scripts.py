"""Running a script as ``python script.py`` runs it.

Imports no torch: a script may set what torch reads when it is imported.
"""

from __future__ import annotations

import io
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from fxgrad.errors import TargetError

__all__ = ["is_script", "run_as_main", "when_imported"]

_INTERRUPTED = 130  # what a shell makes of a program that Ctrl-C ended
_FAILED = 1


def is_script(target: str) -> bool:
    """Whether the words of TARGET are the path of a training script, and not ``file.py:name``."""
    return target.endswith(".py")


def run_as_main(script: str, arguments: Sequence[str]) -> int:
    """Run a file as ``__main__``, with its arguments and its folder first on the path, until it ends in whatever way.

    A traceback is printed as Python does.

    Returns:
        The exit code that Python would have ended with.

    Raises:
        TargetError: there is no such file, or it cannot be read.
    """
    path = Path(script).absolute()
    try:
        with io.open_code(str(path)) as file:
            source = file.read()
    except OSError as error:
        message = f"{script}: cannot be read: {error.strerror or error} (looked in {Path.cwd()})"
        raise TargetError(message) from error
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __cached__=None, __loader__=SourceFileLoader("__main__", str(path)))
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    with _in_place(main, [script, *arguments], str(path.resolve().parent)):
        try:
            return _run(source, str(path), main)
        finally:
            sys.stdout.flush()  # what comes after it stands behind it


def _run(source: bytes, path: str, main: types.ModuleType) -> int:
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  # what was asked for
    except SystemExit as error:
        return _code_of(error)
    except BaseException as error:  # noqa: BLE001  # Ctrl-C too
        _print(error, path)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    return 0


@contextmanager
def _in_place(main: types.ModuleType, words: list[str], folder: str) -> Iterator[None]:
    """What a script finds in ``sys``."""
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = words, main
    if not getattr(sys.flags, "safe_path", False):  # there, Python puts no folder in front
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _code_of(error: SystemExit) -> int:
    """As Python has it: a number, 0 for nothing, or words to print and 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return _FAILED


def _print(error: BaseException, path: str) -> None:
    """Print the traceback from the script on, by the script's own hook if it has set one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # raised elsewhere: nothing is left out
        trace = error.__traceback__
    error.__traceback__ = trace
    sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:  # noqa: BLE001  # as Python does where a hook fails
        traceback.print_exception(type(error), error, trace)


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` when the top-level module ``name`` has been imported; now, if it was before."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds one module as Python's own path finder does, and acts once it has run."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The specification of the module, with a loader that tells."""
        del target
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            run(module)
            self._then()

        loader.exec_module = exec_module
        return spec
