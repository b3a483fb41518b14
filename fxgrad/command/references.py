"""``package.module:name`` and ``file.py:name``: from the words to the object."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fxgrad.errors import FxgradError

__all__ = ["Asked", "resolve"]

_SHOWN_NAMES = 8  # of the names that a message offers


@dataclass(frozen=True, slots=True)
class Asked:
    """Words of the command line, and how to complain about them.

    Attributes:
        words: as typed.
        role: where they were typed: ``"TARGET"``, ``"--loss"``.
        error: the class to raise.
    """

    words: str
    role: str
    error: type[FxgradError]

    def refuse(self, found: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the error: what was asked, then what was ``found``."""
        message = f"{self.role} {self.words!r}: {found}"
        raise self.error(message) from cause


def resolve(asked: Asked) -> Any:
    """The object that ``asked.words`` lead to.

    Raises:
        FxgradError: of the class ``asked.error``; the place cannot be imported, or has no such name.
    """
    place, colon, name = asked.words.rpartition(":")
    if not colon or not place or not name:
        message = "expected package.module:name or file.py:name, such as torchvision.models:resnet18"
        asked.refuse(message)
    module = _load_file(Path(place), asked) if place.endswith(".py") else _load_module(place, asked)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            asked.refuse(f"{place} has no {name!r}. {_offer(part, found)}", error)
        except Exception as error:  # noqa: BLE001  # packages that load their names late may raise anything
            asked.refuse(_raised(f"{place}.{part}", error), error)
    return found


def _load_file(path: Path, asked: Asked) -> ModuleType:
    """Run a file as a module of its own name, with its folder searched for what it imports, as Python would."""
    if not path.is_file():
        asked.refuse(f"there is no file {path} (looked in {Path.cwd()})")
    _search_first(path.resolve().parent)
    # A prefix keeps `random.py` of the user from passing for the standard library's.
    name = f"fxgrad_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        asked.refuse(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
        del sys.modules[name]
        asked.refuse(_raised(str(path), error), error)
    return module


def _load_module(name: str, asked: Asked) -> ModuleType:
    top = name.partition(".")[0]
    here = Path.cwd()
    if (here / top).is_dir() or (here / f"{top}.py").is_file():
        _search_first(here)  # a script's own folder is on the path, the one it is called from is not
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            message = (
                f"there is no module {error.name!r} for {sys.executable}. "
                f"Install the package that has it, or write the path of a file, such as models.py:make_model"
            )
            asked.refuse(message, error)
        asked.refuse(_raised(name, error), error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
        asked.refuse(_raised(name, error), error)


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _raised(place: str, error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"importing {place} ended the program. Put what it runs under `if __name__ == '__main__':`"
    return f"importing {place} raised {type(error).__name__}: {error}"


def _offer(name: str, holder: Any) -> str:
    public = [n for n in dir(holder) if not n.startswith("_")]
    near = difflib.get_close_matches(name, public, n=_SHOWN_NAMES)
    if near:
        return f"Did you mean {', '.join(near)}?"
    place = getattr(holder, "__name__", "")
    own = [n for n in public if getattr(getattr(holder, n, None), "__module__", None) == place]
    shown = ", ".join(own[:_SHOWN_NAMES])
    return f"It has {shown}{' ...' if len(own) > _SHOWN_NAMES else ''}." if own else "It defines nothing public."
