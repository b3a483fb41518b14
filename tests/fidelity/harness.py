"""What a program is, how it is run plain or watched, and what of it is compared."""

from __future__ import annotations

import contextlib
import cProfile
import logging
import pstats
import random
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxgrad

STEPS = 7
LOG = logging.getLogger("tests.fidelity")
PROGRAMS: list[type[Program]] = []
_HERE = str(Path(__file__).parent)


class Program(nn.Module):
    """A model, with the loop around it.  Its subclasses say what is special about them.

    Attributes:
        seen: whether backward events are recorded at all.
        differs: why the program is known not to end in the same, if so.
    """

    seen = True
    differs = ""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    @classmethod
    def reset(cls) -> None:
        """Before each run: what outlives a model."""

    def change(self, i: int) -> None:
        """Before step ``i``: what changes in the middle."""

    def inputs(self, i: int) -> Tensor:
        """Of step ``i``."""
        return torch.randn(4, 8)

    def step(self, i: int) -> Any:
        """One step, and what is to be compared of it."""
        out = self(self.inputs(i))
        out.square().mean().backward()
        return out

    def state(self) -> Any:
        """What else is to be compared after a step."""
        return None


def program(kind: type[Program]) -> type[Program]:
    """Put a program into the table."""
    PROGRAMS.append(kind)
    return kind


class Records(logging.Handler):
    """Log records as text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.funcName} {record.getMessage()}")


@contextlib.contextmanager
def switches_kept() -> Iterator[None]:
    """What a program may leave switched."""
    threads, dtype, deterministic = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_grad_enabled(True)


def run(kind: type[Program], options: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Train for some steps, under a watch if there are ``options``; what is compared, with where it is from."""
    kind.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = kind()
    watch = fxgrad.watch(model, **options) if options is not None else None
    found: list[tuple[str, Any]] = []
    handler = Records()
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    try:
        with switches_kept(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            for i in range(STEPS):
                found += [(f"step {i}: {what}", value) for what, value in _one(model, i)]
    finally:
        LOG.removeHandler(handler)
    found += [("log", handler.texts), ("warnings", [(w.category, str(w.message)) for w in warned])]
    if watch is not None:
        assert bool(watch.history) == kind.seen
        watch.remove()
        assert "forward" not in vars(model)
    return found


def _one(model: Program, i: int) -> Iterator[tuple[str, Any]]:
    model.change(i)
    model.zero_grad()
    yield "outputs", snapshot(model.step(i))
    for name, parameter in model.named_parameters():
        yield f"gradient of {name}", snapshot(parameter.grad)
        yield f"requires_grad of {name}", parameter.requires_grad
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad, alpha=0.05)
    yield "state dict", snapshot(dict(model.state_dict()))
    yield "modes", [(name, module.training) for name, module in model.named_modules()]
    yield "state", snapshot(model.state())
    yield "switches", (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    yield "random streams", (snapshot(torch.get_rng_state()), random.getstate(), snapshot(np.random.get_state()))


def snapshot(value: Any) -> Any:
    """A value that stays as it is now."""
    if isinstance(value, Tensor):
        return ("tensor", value.requires_grad, type(value).__name__, value.detach().clone())
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: snapshot(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *(snapshot(one) for one in value)]
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two snapshots are equal, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
            return False
        dense = (one.to_dense(), other.to_dense()) if one.is_sparse else (one, other)
        return bool(torch.allclose(*dense, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def differences(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> list[str]:
    """Where two runs differ."""
    if [where for where, _ in one] != [where for where, _ in other]:
        return ["other things were found"]
    return [where for (where, a), (_, b) in zip(one, other, strict=True) if not same(a, b)]


def calls(kind: type[Program], options: Mapping[str, Any] | None) -> dict[str, int]:
    """How often each function of the programs was called in a run."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        run(kind, options)
    finally:
        profile.disable()
    stats: Any = pstats.Stats(profile)
    counts: dict[str, int] = {}
    for (file, line, name), (_, count, *_) in stats.stats.items():
        if file.startswith(_HERE) and file != __file__:
            counts[f"{Path(file).name}:{line} {name}"] = count
    return counts
