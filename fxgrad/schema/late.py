"""Functions of the stages above, looked up when called: the data may not import who presents it."""

from __future__ import annotations

import importlib
import random
from typing import Any


def late(module: str, function: str) -> Any:
    """The ``function`` of ``module``, which is imported now if it has not been yet."""
    return getattr(imported(module), function)


def imported(module: str) -> Any:
    """The module.  Python's random stream stays as it is: rich draws from it when it is imported, wherever that is."""
    before = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        if random.getstate() != before:
            random.setstate(before)
