"""What a program of the suite is: a small torch model with a known fault, and the answer that is right for it.

The files of programs import torch and this module only, so that they prove themselves in plain torch
(``test_programs.py``) and say nothing of how a fault is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Loss = Callable[[Any], Tensor]
Form = Literal["one_shot", "history"]
Half = Literal["tune", "report", "unseen"]
BOTH: frozenset[Form] = frozenset({"one_shot", "history"})
ONE_SHOT: frozenset[Form] = frozenset({"one_shot"})
HISTORY: frozenset[Form] = frozenset({"history"})
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Built:
    """A program made from a seed.

    Attributes:
        model, args, loss: one step is ``loss(model(*args)).backward()``; without ``loss`` the model returns it.
        optimizer: makes the optimizer of the history form; None: SGD with a small step, without momentum.
        steps: how many steps the history form takes.
        batch: ``(args, loss)`` of a step of the history form; None: the same batch in each.
        loop: the training loop of the history form; None: the usual one.
        scaler: what the loop scales its losses with.
        kwargs: further arguments of the model.
        trains: whether some steps on this batch lower the loss.
        known: whether the watch is given the optimizer.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss: Loss | None = None
    optimizer: Callable[[nn.Module], Any] | None = None
    steps: int = 6
    batch: Callable[[int], tuple[tuple[Any, ...], Loss]] | None = None
    loop: Callable[[Built, Any], None] | None = None
    scaler: torch.amp.GradScaler | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    trains: bool = True
    known: bool = True

    def at(self, step: int) -> tuple[tuple[Any, ...], Loss]:
        """Arguments and loss of a step."""
        return (self.args, self.loss or returned) if self.batch is None else self.batch(step)

    def loss_at(self, step: int) -> Tensor:
        """The loss of a step."""
        args, loss = self.at(step)
        return loss(self.model(*args, **self.kwargs))

    def optimized(self) -> Any:
        """The optimizer of the history form, or a list of several."""
        if self.optimizer is not None:
            return self.optimizer(self.model)
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def train(self, optimizer: Any) -> None:
        """The history form's run; without an optimizer of its own the gradients are clipped to norm 1."""
        if self.loop is not None:
            self.loop(self, optimizer)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for step in range(self.steps):
            optimizer.zero_grad()
            self.loss_at(step).backward()
            if self.optimizer is None:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # else the first step ends what explodes
            optimizer.step()


def returned(out: Any) -> Tensor:
    """The loss that a model returns, alone or as a part of its output."""
    return out if isinstance(out, Tensor) else out.loss


@dataclass(frozen=True)
class Ran:
    """What a training run in plain torch was.

    Attributes:
        losses: one for each backward pass that went through ``loss_at``.
        first, last: gradients by name behind the first and the last of them; None where there is none.
        moved: by name, the norm of the whole way over the norm at the start.
    """

    losses: list[float]
    first: dict[str, Tensor | None]
    last: dict[str, Tensor | None]
    moved: dict[str, float]


@dataclass(frozen=True)
class Program:
    """A program and the answer that is right for it.

    Attributes:
        name, kind: ``kind`` is the file's: ``vanishing`` ... ``healthy``.
        make: builds it from the global random stream.
        expect: rules that may come first; the best answer stands first.  Empty for a healthy one.
        culprits: words, any of which must occur in name, target, module path or key of the blamed node (or in the name
            of the blamed parameter).  Where a word ends with a digit, no digit may follow.
        not_culprits: words that must not occur there.
        outside: the fault lies outside the model or at a parameter: no node is to be blamed.
        victims: beginnings of the names of the parameters that suffer, for the proof in plain torch.
        forms: the forms in which it must be found.
        info_ok: whether the right rule as information counts as found, since training goes on all the same.
        says: words, any of which must stand in the message or the suggestion of the finding.
        proof: what a run of its own in plain torch shows (``Ran``), where no test of its kind does.
        half: thresholds are set on ``tune`` and reported on ``report``; see ``places.py`` for ``unseen``.
        places: in place of the words, regular expressions; one has to match the blamed key, id or parameter as a whole.
        real: plain torch's word on one step of it.
        seed_offsets: what is added to a seed for making it, and for running it.
        seeds: how many are worth the time.
    """

    name: str
    kind: str
    make: Callable[[], Built]
    expect: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()
    not_culprits: tuple[str, ...] = ()
    outside: bool = False
    victims: tuple[str, ...] = ()
    forms: frozenset[Form] = BOTH
    info_ok: bool = False
    says: tuple[str, ...] = ()
    half: Half = "tune"
    proof: Callable[[Ran], bool] | None = None
    places: tuple[str, ...] = ()
    real: Callable[[Any], bool] | None = None
    seed_offsets: tuple[int, int] = (1000, 0)
    seeds: int = len(SEEDS)

    def build(self, seed: int) -> Built:
        """The program from this seed."""
        torch.manual_seed(self.seed_offsets[0] + seed)
        return self.make()

    def blames(self, *words: str) -> bool:
        """Whether these names of a node are those of a culprit, and of no bystander."""
        text = " ".join(words)
        return any(map(_pattern(text), self.culprits)) and not any(map(_pattern(text), self.not_culprits))


def _pattern(text: str) -> Callable[[str], bool]:
    def occurs(word: str) -> bool:
        start = r"(?<!\d)" if word[0].isdigit() else ""
        end = r"(?!\d)" if word[-1].isdigit() else ""
        return re.search(start + re.escape(word) + end, text, re.IGNORECASE) is not None

    return occurs


@dataclass
class Register:
    """The programs of one kind, in the order of their definition, split in two halves by turns."""

    kind: str
    programs: list[Program] = field(default_factory=list)

    def __call__(self, *expect: str, **answer: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
        """Decorates a builder; its name is the program's."""

        def decorate(make: Callable[[], Built]) -> Callable[[], Built]:
            self.add(make.__name__, make, expect, **answer)
            return make

        return decorate

    def add(self, name: str, make: Callable[[], Built], expect: Sequence[str] = (), **answer: Any) -> None:
        """Adds a program that is made by a loop instead of a function of its own."""
        if any(program.name == name for program in self.programs):
            raise ValueError(name)
        answer.setdefault("half", "tune" if len(self.programs) % 2 == 0 else "report")
        self.programs.append(Program(name, self.kind, make, tuple(expect), **answer))
