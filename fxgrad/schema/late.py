"""Functions of the stages above, looked up when called: the data may not import who presents it."""

from __future__ import annotations

import importlib
from typing import Any


def late(module: str, function: str) -> Any:
    """The ``function`` of ``module``, which is imported now if it has not been yet."""
    return getattr(importlib.import_module(module), function)
