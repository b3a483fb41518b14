"""Programs with hooks, changes in place, errors, and gradients of other kinds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fidelity.harness import Program, program
from tests.fidelity.programs_of_autograd import Straight


@program
class HooksOnValues(Program):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(self.note)
            h.retain_grad()
        self.h = [h]
        return self.b(h.relu())

    def note(self, gradient: Tensor) -> Tensor:
        self.norms.append(gradient.norm().item())
        return gradient * 0.5

    def state(self) -> Any:
        return list(self.norms), self.h[0].grad


@program
class HooksOnModules(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.a.register_forward_pre_hook(lambda _, args: self.note("before", (args[0] * 2,)))
        self.a.register_forward_hook(lambda _, args, out: self.note("after", out + 1))
        self.b.register_full_backward_hook(lambda *_: self.note("backward", None))
        self.b.register_full_backward_pre_hook(lambda *_: self.note("backward pre", None))
        self.register_forward_hook(lambda _, args, out: self.note("whole", out * 2))
        self.register_full_backward_hook(lambda *_: self.note("whole backward", None))

    def note(self, word: str, value: Any) -> Any:
        self.order.append(word)
        return value

    def state(self) -> Any:
        return list(self.order)


@program
class StepsInTheBackward(Straight):
    """The optimizer steps as soon as a gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.descend)

    def descend(self, parameter: Tensor) -> None:
        self.steps += 1
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def state(self) -> Any:
        return self.steps


@program
class ChangedInPlace(Program):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        F.relu(h, inplace=True)
        h = h.clone()
        first, second = h[:, :4], h[:, 4:]
        first.exp_()
        h = torch.cat([first, second], 1)
        h[:, 0] = 0
        h.view(-1)[::3].mul_(2)
        return self.b(h)


@program
class StoppedGradients(Program):
    """A straight-through estimator and a branch that is detached."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        hard = h + (h.sign() - h).detach()
        return self.b(hard) + self.b(h.detach())


@program
class SwallowedErrors(Program):
    def inputs(self, i: int) -> Tensor:
        return torch.full((4, 8), float("nan")) if i in {3, 5} else torch.randn(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            if not torch.isfinite(h).all():
                raise ValueError  # noqa: TRY301  # as people do
        except ValueError:
            h = torch.nan_to_num(h)
        try:
            return self.b(h @ x)
        except RuntimeError:
            return self.b(h)


@program
class ErrorsOutOfTheForward(Straight):
    def step(self, i: int) -> Any:
        if i in {2, 4}:
            try:
                self(torch.randn(4, 9))
            except RuntimeError as error:
                return str(error)
        return super().step(i)


@program
class UnusedBranches(Program):
    def forward(self, x: Tensor) -> Tensor:
        h, unused = self.a(x), self.b(x)
        return h if unused.detach().sum() > 0 else h + unused


@program
class SparseGradients(Program):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.table((x.abs() * 5).long().clamp(max=19)).mean(1))


@program
class ClippedAndKept(Straight):
    def step(self, i: int) -> Any:
        out = super().step(i)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return out, norm, len(self._forward_hooks), len(self.a._forward_hooks)


@program
class RecurrentAndAttending(Program):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)

    def inputs(self, i: int) -> Tensor:
        return torch.randn(5 + i % 2, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        y, weights = self.attention(h, h, h)
        return self.b(y) * weights.mean()
