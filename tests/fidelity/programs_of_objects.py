"""Programs with objects of their own: whatever of them is called, is called as often as without a watch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.fidelity.harness import Program, program


class Counted:
    """Counts its special methods."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


class Argument(Counted):
    def __repr__(self) -> str:
        self.note("repr")
        return "Argument()"

    def __eq__(self, other: object) -> bool:
        self.note("eq")
        return self is other

    def __hash__(self) -> int:
        self.note("hash")
        return 1

    def __bool__(self) -> bool:
        self.note("bool")
        return True

    def __len__(self) -> int:
        self.note("len")
        return 3

    def __iter__(self) -> Iterator[int]:
        self.note("iter")
        return iter((1, 2, 3))

    def __getattr__(self, name: str) -> Any:
        if name == "counts":
            raise AttributeError(name)
        self.note(f"getattr {name}")
        raise AttributeError(name)

    @property
    def gain(self) -> float:
        self.note("gain")
        return 1.0 + self.counts["gain"]


@program
class ArgumentOfOnesOwn(Program):
    def __init__(self) -> None:
        super().__init__()
        self.argument = Argument()

    def forward(self, x: Tensor, how: Argument, *, also: Argument) -> Tensor:
        return self.b(self.a(x)) * how.gain + also.gain

    def step(self, i: int) -> Any:
        out = self(self.inputs(i), self.argument, also=self.argument)
        out.mean().backward()
        return out

    def state(self) -> Any:
        return dict(self.argument.counts)


class Lazily(Mapping[str, Tensor]):
    """A mapping that makes its values when asked, and counts."""

    def __init__(self, values: dict[str, Tensor], counts: dict[str, int]) -> None:
        self.values_, self.counts = values, counts

    def __getitem__(self, name: str) -> Tensor:
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.values_[name] * self.counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@program
class MappingThatMakesItsValues(Program):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.b(self.a(batch["x"])) + batch["x"]

    def step(self, i: int) -> Any:
        out = self(Lazily({"x": self.inputs(i), "unused": torch.ones(1)}, self.counts))
        out.mean().backward()
        return out

    def state(self) -> Any:
        return dict(self.counts)


@dataclasses.dataclass
class Result:
    y: Tensor
    log: list[str] = dataclasses.field(default_factory=list)

    @property
    def loss(self) -> Tensor:
        self.log.append("loss")
        return self.y.square().mean()

    def __getattr__(self, name: str) -> Any:
        if name not in {"log", "y"}:
            self.log.append(name)
        raise AttributeError(name)


@program
class ResultOfOnesOwn(Program):
    def forward(self, x: Tensor) -> Result:
        return Result(self.b(self.a(x)))

    def step(self, i: int) -> Any:
        result = self(self.inputs(i))
        result.loss.backward()
        return result.y, result.log


@program
class ModelThatDelegates(Program):
    """Unknown attributes are looked up elsewhere, and counted."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "asked", [])
        self.elsewhere = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        if name == "gain":
            vars(self)["asked"].append(name)
            return self.elsewhere[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("asked", []).append(f"set {name}")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.gain

    def state(self) -> Any:
        return list(self.asked)


@program
class CallOfOnesOwn(Program):
    """``__call__`` and ``named_parameters`` of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        return super().__call__(x) * self.calls

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def state(self) -> Any:
        return self.calls


@program
class ForwardThatCallsItself(Program):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h) if depth == 0 else self(h, depth - 1) + self.forward(h, 0)


@program
class ForwardCalledDirectly(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def step(self, i: int) -> Any:
        out = self.forward(self.inputs(i)) if i % 2 else self(self.inputs(i))
        out.square().mean().backward()
        return out


class Wrapped(torch.Tensor):
    """A subclass that says what it was asked."""

    asked: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in {"linear", "tanh", "mul", "add", "exp"}:
            cls.asked.append(name)
        return super().__torch_function__(func, kinds, args, kwargs or {})


@program
class TensorSubclass(Program):
    @classmethod
    def reset(cls) -> None:
        Wrapped.asked = []

    def inputs(self, i: int) -> Tensor:
        return torch.randn(4, 8).as_subclass(Wrapped)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).exp()

    def state(self) -> Any:
        return list(Wrapped.asked)
