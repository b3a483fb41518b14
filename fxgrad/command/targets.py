"""TARGET and its ``name=value`` words: from the command line to a model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fxgrad.command.references import Asked, resolve
from fxgrad.command.scripts import is_script
from fxgrad.errors import TargetError

__all__ = ["load_model", "parse_keywords"]

_BOOLEANS = {"true": True, "false": False}


def load_model(target: str, words: Sequence[str] = ()) -> nn.Module:
    """The model that ``target`` leads to: a module, a module class, or a function that returns one.

    Args:
        target: ``package.module:name`` or ``file.py:name``.
        words: ``name=value``, keyword arguments for the class or function.

    Raises:
        TargetError: it leads nowhere, cannot be called with these arguments, or gives no ``torch.nn.Module``.
    """
    asked = Asked(target, "TARGET", TargetError)
    if is_script(target):
        message = (
            "a training script is run as it is: fxgrad run [OPTIONS] train.py [ARGS], with the options that "
            f"`fxgrad run --help {target}` lists. A model in it is {target}:name"
        )
        asked.refuse(message)
    keywords = parse_keywords(words)
    found = resolve(asked)
    if isinstance(found, nn.Module):
        if keywords:
            asked.refuse(f"is a model already, so that {', '.join(words)} cannot be passed to it")
        return found
    if not callable(found):
        asked.refuse(f"is of type {type(found).__name__}, neither a torch.nn.Module nor a callable returning one")
    model = _build(found, keywords, asked)
    if not isinstance(model, nn.Module):
        message = (
            f"returned {type(model).__name__}, not a torch.nn.Module. Write a function that returns only the model"
        )
        asked.refuse(message)
    return model


def _build(factory: Callable[..., Any], keywords: dict[str, Any], asked: Asked) -> Any:
    try:
        return factory(**keywords)
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        given = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        message = (
            f"raised {type(error).__name__} when called with ({given}): {error}\n"
            "Arguments are written after TARGET as name=value."
        )
        asked.refuse(message, error)


def parse_keywords(words: Sequence[str]) -> dict[str, Any]:
    """``["width=8", "act=relu"]`` as ``{"width": 8, "act": "relu"}``.

    A value is a Python literal where it reads as one, ``true`` and ``false`` are the booleans, and anything else is
    text; ``name='"true"'`` is the text "true".

    Raises:
        TargetError: a word is not ``name=value``, or a name comes twice.
    """
    keywords: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            message = f"{word!r} after TARGET is not an argument for it. Write name=value, such as num_classes=10"
            raise TargetError(message)
        if name in keywords:
            message = f"the argument {name} is given twice: {name}={keywords[name]!r} and {word}"
            raise TargetError(message)
        keywords[name] = _value(value)
    return keywords


def _value(text: str) -> Any:
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
