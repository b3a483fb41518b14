"""What goes on around a trace: the garbage collector, the random streams."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_collector() -> Iterator[None]:
    """Callbacks of the garbage collector are Python that runs at any time, and no part of a forward."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def random_state() -> tuple[Any, ...]:
    """The state of the streams of torch (CPU), Python and NumPy, comparable."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    words = tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return (torch.get_rng_state().numpy().tobytes() if numpy is not None else tuple(torch.get_rng_state().tolist()),
            random.getstate(), words)  # fmt: skip
