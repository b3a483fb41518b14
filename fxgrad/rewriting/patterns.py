"""How modules, nodes and parameters are named in selections: globs, regular expressions, classes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fxgrad.errors import OptionError

Pattern = str | re.Pattern[str]
Kind = type[nn.Module] | str


def near(word: str, known: Iterable[str]) -> str:
    """``near names are 'a', 'b'``, or how many names there are."""
    names = list(dict.fromkeys(known))
    found = difflib.get_close_matches(word, names, n=5, cutoff=0.4)
    return f"near names are {', '.join(map(repr, found))}" if found else f"there are {len(names)} names"


def fits(pattern: Pattern, name: str) -> bool:
    """Whether a name is what a pattern asks for, from end to end."""
    if isinstance(pattern, str):
        return pattern == name or (("*" in pattern or "?" in pattern) and fnmatchcase(name, _glob(pattern)))
    return pattern.fullmatch(name) is not None


def _glob(pattern: str) -> str:
    """Brackets stand for themselves: ids such as ``lstm[1][0]`` have them."""
    return pattern.replace("[", "[[]")


def pattern_words(pattern: Pattern) -> str:
    """A pattern as it is written in code."""
    return repr(pattern) if isinstance(pattern, str) else f"re.compile({pattern.pattern!r})"


def kind_word(kind: Kind) -> str:
    """The name of a class."""
    return kind if isinstance(kind, str) else kind.__name__


def is_of(model: nn.Module, path: str, name: str, kinds: tuple[Kind, ...]) -> bool:
    """Whether the module at ``path`` is of one of the classes; ``name`` is its class name where it is gone."""
    try:
        module: nn.Module | None = model.get_submodule(path)
    except AttributeError:
        module = None
    names = {name} if module is None else {kind.__name__ for kind in type(module).__mro__}
    return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in kinds)


def check_pattern(path: object) -> None:
    """Refuse what is neither text nor a regular expression.

    Raises:
        OptionError: it is something else.
    """
    if path is not None and not isinstance(path, (str, re.Pattern)):
        message = f"a path is text or a compiled regular expression, but is {type(path).__name__}"
        raise OptionError(message)


def check_kinds(kinds: tuple[Any, ...]) -> None:
    """Refuse what is neither a class of modules nor a name.

    Raises:
        OptionError: it is something else.
    """
    for kind in kinds:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            message = f"a module type is a class of modules or its name, but is {kind!r}"
            raise OptionError(message)
