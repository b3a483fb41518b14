"""Random models for property tests: ``random_models()`` for hypothesis, ``random_model(seed)`` for long sweeps.

A random model is ordinary Python source, compiled: every step has a line of its own, so that a failure can be read
and pasted (``print(case.source)``), and every front end meets what it would meet in a user's file.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import At, Twin
from tests.programs import BATCH, WIDTH, Writer, Written
from tests.runs import tensors_in
from tests.steps import write_step
from tests.zoo.case import squares
from tests.zoo.dynamic import Clipped


@dataclass(frozen=True, repr=False)
class RandomCase:
    """A random model with inputs and a loss; the attributes are those of ``tests.zoo.case.Case`` where they agree.

    Attributes:
        id: names the seed.
        source: the model's code.
        twin: for the oracle; None where the program changes memory that several tensors share.
        static: whether nothing is decided at run time and no grad mode is switched: a trace may be right.
        training: mode of the model.
        gradients: whether each input requires a gradient.
        seed: of parameters and inputs.
        features: words for what occurs in the program.
    """

    id: str
    source: str
    make: Callable[[], nn.Module]
    twin: Twin | None
    static: bool
    training: bool
    gradients: tuple[bool, ...]
    loss: Callable[[Any], Tensor]
    seed: int
    features: frozenset[str]

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
        """Model, args and kwargs: the same numbers on every call, and the global generator as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.make().train(self.training)
            inputs = tuple(torch.randn(BATCH, WIDTH, requires_grad=needs) for needs in self.gradients)
        return model, inputs, {}

    def __repr__(self) -> str:
        mode = "train" if self.training else "eval"
        return f"<{self.id}, {mode}, seed={self.seed}, inputs require grad: {self.gradients}\n{self.source}\n>"


class Numbered:
    """An ``At`` for generated twins: numbers repeated names in the order in which they run, as keys are numbered."""

    def __init__(self, at: At) -> None:
        self._at = at
        self._count: dict[str, int] = {}

    def _next(self, stem: str) -> str:
        index = self._count.get(stem, 0)
        self._count[stem] = index + 1
        return f"{stem}#{index}" if index else stem

    def __call__(self, stem: str, value: Tensor) -> Tensor:
        return self._at(self._next(stem), value)

    def same(self, stem: str, value: Tensor) -> Tensor:
        """As ``At.same``."""
        return self._at.same(self._next(stem), value)

    def many(self, stem: str, value: Any) -> Any:
        """Every floating tensor of a nested output, under one call's name."""
        return self._each(self._next(stem), value)

    def _each(self, site: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self._each(f"{site}[{n}]", item) for n, item in enumerate(value))
        return self._at(site, value) if value.is_floating_point() else value


def random_model(seed: int, *, dynamic: bool | None = None) -> RandomCase:
    """The random model number ``seed``, the same on every machine.

    ``dynamic``: whether steps that no trace can take may occur; None leaves that to chance.
    """
    return _case(random.Random(seed), f"random-{seed}", dynamic)  # noqa: S311  # repeatable is the point


@st.composite
def random_models(draw: st.DrawFn, *, dynamic: bool | None = None) -> RandomCase:
    """Hypothesis strategy: every choice of the program is drawn, so that failures shrink."""
    rng = draw(st.randoms(use_true_random=False, note_method_calls=False))
    return _case(rng, "random", dynamic)


def _case(rng: random.Random, id: str, dynamic: bool | None) -> RandomCase:  # noqa: A002
    dynamic = rng.random() < 0.4 if dynamic is None else dynamic
    training = rng.random() < 0.7
    gradients = tuple(rng.random() < 0.3 for _ in range(rng.choice((1, 1, 2))))
    blocks = tuple(_block(rng, n, training=training, dynamic=dynamic) for n in range(rng.choice((0, 1, 1, 2))))
    arguments = dict(zip("xy", gradients, strict=False))
    writer = Writer(rng, "Root", arguments, training=training, inner=blocks, dynamic=dynamic)
    for _ in range(rng.randint(3, 14)):
        write_step(writer)
    root = writer.finish(_output(writer))
    make, twin, source = _compile(id, (*blocks, root))
    loss = first_only if rng.random() < 0.25 else squares
    return RandomCase(
        id=id,
        source=source,
        make=make,
        twin=twin if root.has_twin else None,
        static=root.static,
        training=training,
        gradients=gradients,
        loss=loss,
        seed=rng.randrange(10**6),
        features=frozenset(root.features),
    )


def _block(rng: random.Random, number: int, *, training: bool, dynamic: bool) -> Written:
    writer = Writer(rng, f"Block{number}", {"x": False}, training=training, dynamic=dynamic and rng.random() < 0.5)
    writer.things["x"].safe = False
    for _ in range(rng.randint(2, 5)):
        write_step(writer)
    own = [name for name, thing in writer.things.items() if thing.root != writer.things["x"].root]
    if not own:  # what a block returns must be a value of its own, or callers could not tell what aliases what
        own = [writer.new(safe=False, needs=False)]
        writer.say(f"{own[0]} = <mul:x * 1.0>")
    return writer.finish(own[-1])


def _output(writer: Writer) -> str:
    """An expression for what the model returns; it always depends on a parameter."""
    head = writer.attribute("nn.Linear(6, 3)")
    last, other = list(writer.things)[-1], writer.pick()
    writer.keep(last)
    writer.say(f"out = self.{head}({last})", f'out = at(p + "{head}", self.{head}({last}))')
    kinds = ("out", f"(out, {other})", f"[out, ({other}, 3)]", f'{{"out": out, "aux": {other}, "step": 7}}')
    return writer.rng.choice(kinds)


def first_only(output: Any) -> Tensor:
    """A loss that ignores all but the first tensor."""
    return next(tensor for _, tensor in tensors_in(output)).square().mean()


def _compile(id: str, programs: tuple[Written, ...]) -> tuple[Callable[[], nn.Module], Twin, str]:  # noqa: A002
    source = "\n".join(program.source for program in programs)
    file = f"<{id}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "Clipped": Clipped}
    scope["__name__"] = __name__
    exec(compile(source, file, "exec"), scope)  # noqa: S102  # our own source, a few lines above
    exec(compile("\n".join(p.twin_source for p in programs), f"<twin of {id}>", "exec"), scope)  # noqa: S102

    def twin(model: nn.Module, at: At, *args: Tensor) -> Any:
        return scope["twin_Root"](model, Numbered(at), "", *args)

    return scope["Root"], twin, source
