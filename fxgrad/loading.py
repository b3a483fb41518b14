"""Modules that are loaded late, maybe in the middle of a training loop."""

from __future__ import annotations

import importlib
import random
from typing import Any

__all__ = ["loaded"]


def loaded(module: str) -> Any:
    """The module, which is imported now if it has not been yet.

    Python's random stream stays as it is: rich, for one, draws from it when it is imported, wherever that is.
    """
    before = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        if random.getstate() != before:
            random.setstate(before)
