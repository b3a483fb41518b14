"""What a small model of the zoo says about itself, and the register they are put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.oracle import Twin
from tests.runs import tensors_in

Args = tuple[Any, ...]
Fx = Literal["same", "differs", "raises"]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A model with inputs and a loss.

    Attributes:
        id: short, unique.
        make: builds the model (seeded by ``build``).
        inputs: makes the positional arguments.
        keywords: makes the keyword arguments.
        loss: of the output.
        fx: what bare ``torch.fx.symbolic_trace`` does with it: the traced copy computes the same outputs and
            gradients, silently others, or tracing raises.
        symbolic: True where a faithful symbolic front end has to take the model, False where it has to refuse it
            (a trace cannot be right), None where both answers are right.
        twin: the same model fully out of place for the oracle; None where nobody has written one.
        unmeasurable: sites whose gradient no hook can tell (memory changed in place through a view).
        training: mode that ``build`` puts the model in.
        raises: name of the error that the plain step raises, None for a healthy model.
    """

    id: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Args]
    keywords: Callable[[], dict[str, Any]] = dict
    loss: Callable[[Any], Tensor] = lambda output: squares(output)  # noqa: PLW0108  # defined below
    fx: Fx = "same"
    symbolic: bool | None = True
    twin: Twin | None = None
    unmeasurable: frozenset[str] = frozenset()
    training: bool = True
    raises: str | None = None

    @property
    def symbolic_ok(self) -> bool:
        """Whether both front ends have to take it, with equal keys and statistics."""
        return self.symbolic is True

    @property
    def eager_only(self) -> bool:
        """Whether a symbolic trace cannot be right."""
        return self.symbolic is False

    def build(self) -> tuple[nn.Module, Args, dict[str, Any]]:
        """Model, args and kwargs; the same numbers on every call, and the global generator as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(self.id.encode()))
            model = self.make().train(self.training)
            return model, self.inputs(), self.keywords()


def squares(output: Any) -> Tensor:
    """Mean square over every floating or complex tensor of an output: a loss that fits any of them."""
    found = [t.abs() for _, t in tensors_in(output) if t.is_floating_point() or t.is_complex()]
    wide = [t if t.dtype == torch.float64 else t.float() for t in found]
    return torch.stack([t.square().mean() for t in wide]).sum()


def case(id: str, inputs: Callable[[], Args], **more: Any) -> Callable[[Callable[[], nn.Module]], Any]:  # noqa: A002
    """Register the decorated model class or factory under ``id``."""

    def register(make: Any) -> Any:
        assert id not in CASES, f"two models are called {id!r}"
        CASES[id] = Case(id=id, make=make, inputs=inputs, **more)
        return make

    return register


def normal(*shape: int, grad: bool = False) -> Callable[[], Args]:
    """Inputs: one normal tensor."""
    return lambda: (torch.randn(*shape, requires_grad=grad),)
