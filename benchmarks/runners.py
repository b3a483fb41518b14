"""A configuration's training step, and what it saw."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import LEARNING_RATE, Built


def without_places(text: str) -> str:
    """The first line, without the folders of this machine."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])", "", text.strip().splitlines()[0])[:300]


class SkippedError(Exception):
    """A configuration cannot run here; the message says why and goes into the table."""


@dataclass
class Seen:
    """What one step told, so that a cheaper row that sees less shows it.

    Attributes:
        activations: activations whose gradient was measured (derived ones included).
        parameters: parameters whose gradient was measured.
        told: what is told of a gradient, in words.
        derived: activations that are the very tensor of another one, whose hook serves both.
        edges: parts of gradients by consumer.
        blind: activations without a measured gradient, by reason; None for tools that don't say.
        front_end: of ours, which one ran.
    """

    activations: int = 0
    parameters: int = 0
    told: str = ""
    derived: int = 0
    edges: int = 0
    blind: dict[str, int] | None = None
    front_end: str = ""
    more: dict[str, Any] = field(default_factory=dict)


class Runner:
    """The plain training step; a configuration changes what it needs to.

    Args:
        built: the model to train; the runner may do with it what it wants.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.model: Callable[..., Any] = built.model
        self.optimizer = torch.optim.SGD(built.model.parameters(), lr=LEARNING_RATE)
        self.attach()

    def attach(self) -> None:
        """Do to the model what the configuration does to it, once."""

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.backward(self.forward())
        self.optimizer.step()

    def forward(self) -> Tensor:
        """The loss of the batch."""
        return self.built.loss(self.model(*self.built.args, **self.built.kwargs))

    def backward(self, loss: Tensor) -> None:
        """The backward pass, and what the configuration does right behind it."""
        loss.backward()

    def read(self) -> None:
        """Bring to the host what the latest step told, where that is apart from the step."""

    def seen(self) -> Seen:
        """What the latest step told."""
        return Seen(told="nothing")

    def close(self) -> None:
        """Take off what was put on."""


class CompiledPlain(Runner):
    """The plain step of a compiled model, which compiled configurations are compared with."""

    def attach(self) -> None:
        """Compile the model, in one graph."""
        self.model = torch.compile(self.built.model, fullgraph=True)


@dataclass(frozen=True)
class Configuration:
    """Something to measure.

    Attributes:
        name: what ``--configurations`` takes.
        words: for the table.
        make: puts it on a model.
        kind: ``"A/A"``, ``"ours"`` or ``"peer"``.
        plain: what it is compared with.
        steps: a pair has so many steps of each side (ten where something happens at every tenth).
        apart: leaves something behind in the process (patches, threads) and needs one of its own.
    """

    name: str
    words: str
    make: Callable[[Built], Runner]
    kind: str
    plain: Callable[[Built], Runner] = Runner
    steps: int = 1
    apart: bool = False

    @property
    def compiled(self) -> bool:
        """Whether it is compared with the compiled model."""
        return self.plain is CompiledPlain
