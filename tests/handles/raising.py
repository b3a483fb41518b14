"""Programs whose backward pass raises, and what is to be said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class ChangedValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).exp()
        h.add_(1)
        return self.b(h)


class ChangedThroughView(ChangedValue):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid()
        part = h[:, :2]
        part.mul_(2)
        return self.b(h)


class ChangedLeafModule(ChangedValue):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.late = nn.Tanh(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        return self.b(self.late(h))


class ChangedParameter(ChangedValue):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.scale
        with torch.no_grad():
            self.scale.clamp_(-1, 1)
        return self.b(h)


class ChangedBuffer(ChangedValue):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.mask
        self.mask.mul_(0.5)
        return self.b(h)


class MaxNorm(nn.Module):
    """Tied weights and ``max_norm``: the embedding scales the table that a matmul has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.table = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.a(x) @ self.table.weight.t()
        return scores.sum() + self.table(torch.arange(5)).sum()


class Two(torch.autograd.Function):
    """The gradient that it gives back is what the class says."""

    made: Callable[[Tensor], Any] = staticmethod(lambda grad: grad)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return cls.made(grad)


class WrongShape(Two):
    made = staticmethod(lambda grad: grad[:, :3])


class WrongNumber(Two):
    made = staticmethod(lambda grad: (grad, grad))


class Refusing(Two):
    @staticmethod
    def made(grad: Tensor) -> Any:
        message = "no rule for this"
        raise KeyError(message)


class Custom(ChangedValue):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function.apply(self.a(x))
        return self.b(h)


def plain_step(model: nn.Module) -> None:
    model(X).sum().backward()


def step_between(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    first = model(X).sum()
    second = model(X).sum()
    first.backward()
    optimizer.step()
    second.backward()


def twice(model: nn.Module) -> None:
    loss = model(X).sum()
    loss.backward()
    loss.backward()


def input_changed(model: nn.Module) -> None:
    x = X.clone()
    loss = model(x).sum()
    x.zero_()
    loss.backward()


def output_changed(model: nn.Module) -> None:
    out = model(X)
    out.mul_(2)
    out.sum().backward()


class Plain(ChangedValue):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Bounded(ChangedValue):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sigmoid()


class Recurrent(ChangedValue):
    """Keeps its state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.a(x)
        if self.state is not None:
            state = state + self.again(self.state)
        self.state = state.tanh()
        return self.b(self.state)


class Given(Recurrent):
    """The caller keeps the state."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        new = (self.a(x) + self.again(state)).tanh()
        return self.b(new), new


def carried(model: nn.Module) -> None:
    state = torch.ones(6, 8)
    for _ in range(2):
        out, state = model(X, state)
        out.sum().backward()


def kept(model: Any) -> None:
    model.state = None
    for _ in range(2):
        model(X).sum().backward()


#: model, step, the node to blame, the line of its source, and words of the message.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], str, str, list[str]]] = {
    "value": (ChangedValue, plain_step, "/exp", "h = self.a(x).exp()", ["changed in place", "/exp", "/add_"]),
    "view": (ChangedThroughView, plain_step, "/sigmoid", "h = self.a(x).sigmoid()", ["/mul_"]),
    "leaf": (ChangedLeafModule, plain_step, "act", "h = self.act(self.a(x))", ["changed in place", "by late"]),
    "parameter": (ChangedParameter, plain_step, "/mul", "h = self.a(x) * self.scale", ["scale", "/clamp_"]),
    "buffer": (ChangedBuffer, plain_step, "/mul", "h = self.a(x) * self.mask", ["mask", "/mul_"]),
    "max_norm": (MaxNorm, plain_step, "/matmul", "scores = self.a(x) @", ["table.weight", "max_norm", "by table"]),
    "step": (Plain, step_between, "b", "return self.b(", ["b.weight", "optimizer step"]),
    "twice": (Plain, twice, "b", "return self.b(", ["second time", "retain_graph"]),
    "input": (Plain, input_changed, "a", "return self.b(self.a(x)", ["input:x", "outside of the model"]),
    "output": (Bounded, output_changed, "/sigmoid", "return self.b(", ["/sigmoid was changed", "outside"]),
    "kept": (Recurrent, kept, "/tanh", "self.state = state.tanh()", ["second time", "/tanh", "detach"]),
    "carried": (Given, carried, "/tanh", "new = (self.a", ["second time", "/tanh", "input:state", "detach"]),
    "shape": (lambda: Custom(WrongShape), plain_step, "/WrongShape", "self.function", ["invalid gradient"]),
    "number": (lambda: Custom(WrongNumber), plain_step, "/WrongNumber", "self.function.apply", ["incorrect number"]),
    "refusing": (lambda: Custom(Refusing), plain_step, "/Refusing", "self.function", ["KeyError", "no rule for this"]),
}  # fmt: skip
