"""Programs whose Python keeps state, or reads it: in the model, in objects, in classes, in the process."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.fidelity.harness import Program, program


@program
class BuffersRebound(Program):
    """A step counter and a moving average, each a new tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        h = self.a(x)
        self.average = self.average * 0.9 + h.detach().mean(0) * 0.1
        return self.b(h - self.average) / self.calls


@program
class BuffersWrittenInPlace(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        torch.maximum(self.largest, h.detach().abs().amax(0), out=self.largest)
        return self.b(h / (self.largest + 1)) * self.calls.item()

    def state(self) -> Any:
        return self.largest


@program
class NormFrozenInForward(Program):
    """The usual way to freeze BatchNorm, with ``train()`` called in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def change(self, i: int) -> None:
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.b(self.norm(self.a(x)))


@program
class NormThawedLater(Program):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.3)

    def change(self, i: int) -> None:
        self.norm.train(i >= 3)
        self.drop.p = 0.3 if i < 5 else 0.6

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(self.a(x))))


@dataclasses.dataclass
class Progress:
    step: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


@program
class WarmUpInAnObject(Program):
    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def forward(self, x: Tensor) -> Tensor:
        self.progress.step += 1
        self.progress.seen.append(x.shape[0])
        return self.b(self.a(x)) * min(1.0, self.progress.step / 5)

    def state(self) -> Any:
        return dataclasses.asdict(self.progress)


@program
class QueueOfGains(Program):
    def __init__(self) -> None:
        super().__init__()
        self.gains, self.last = deque([0.5, 1.0, 2.0]), deque([0.0], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.gains.rotate()
        y = self.b(self.a(x)) * self.gains[0]
        self.last.append(float(y.detach().abs().sum()))
        return y + self.last[0] * 1e-3

    def state(self) -> Any:
        return list(self.gains), list(self.last)


@program
class FeatureBank(Program):
    """Detached features of the last steps, concatenated and attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.bank = [*self.bank[-2:], h.detach()]
        return self.b((h @ torch.cat(self.bank).T).softmax(-1) @ torch.cat(self.bank) + h)

    def state(self) -> Any:
        return self.bank


@program
class NestedListsAndArrays(Program):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"norms": [], "shapes": Counter()}
        self.usage = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.kept["norms"].append(h.detach().norm())
        self.kept["shapes"][tuple(h.shape)] += 1
        self.usage[0] += h.detach().numpy().sum()
        return self.b(h) * (1 + len(self.kept["norms"]) / 10)

    def state(self) -> Any:
        return self.kept["norms"], dict(self.kept["shapes"]), self.usage


class Meter:
    def __init__(self) -> None:
        self._sum, self.reads = 0.0, 0

    @property
    def value(self) -> float:
        self.reads += 1
        return self._sum

    @value.setter
    def value(self, new: float) -> None:
        self._sum = 0.5 * self._sum + new


@program
class MeterBehindAProperty(Program):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    @property
    def gain(self) -> float:
        self.meter.reads += 100
        return 1.0 / (1.0 + self.meter.value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)) * self.gain
        self.meter.value = y.detach().norm().item()
        return y

    def state(self) -> Any:
        return self.meter._sum, self.meter.reads


class Settings:
    gain = 1.0


class Registry:
    entries: dict[str, float] = {}

    @classmethod
    def get(cls, name: str) -> float:
        return cls.entries[name]


@program
class Configured(Program):
    """A class attribute that is an object, an attribute of a class, a registry behind a class method."""

    options = SimpleNamespace(gain=1.0)

    @classmethod
    def reset(cls) -> None:
        cls.options.gain = Settings.gain = Registry.entries["gain"] = 1.0

    def change(self, i: int) -> None:
        if i == 3:
            type(self).options.gain = 2.0
        if i == 4:
            Settings.gain = 3.0
        if i == 5:
            Registry.entries["gain"] = 4.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.options.gain * Settings.gain * Registry.get("gain")


class Schedule:
    def __init__(self) -> None:
        self.now = 1.0

    def value(self) -> float:
        return self.now


@program
class ScheduleAsABoundMethod(Program):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.gain = self.schedule.value

    def change(self, i: int) -> None:
        self.schedule.now = 1.0 + i // 3

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.gain()


@program
class FromTheEnvironment(Program):
    def change(self, i: int) -> None:
        os.environ["FIDELITY_GAIN"] = str(1 + i // 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * float(os.environ.get("FIDELITY_GAIN", "1"))


i = 1.0  # a global of the same name as a loop variable somewhere else


@program
class GlobalNames(Program):
    @classmethod
    def reset(cls) -> None:
        globals()["i"] = 1.0

    def change(self, i: int) -> None:
        globals()["i"] = 1.0 + i % 3

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * i


@program
class PlainTensorsAsAttributes(Program):
    """No buffers: read by ``float()``, ``if``, ``len()`` and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.flag = torch.tensor(1.0), torch.tensor(False)
        self.rows, self.which = torch.ones(3, 8), torch.tensor(0)

    def change(self, i: int) -> None:
        if i == 3:
            self.gain.fill_(3.0)
        if i == 4:
            self.flag.fill_(True)
        if i == 5:
            self.rows = torch.arange(40.0).view(5, 8)
        if i == 6:
            self.which += 4

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * float(self.gain) / len(self.rows) + self.rows[self.which]
        return self.b(h * 2 if self.flag else h)


@program
class AttributesOfTensors(Program):
    def inputs(self, i: int) -> Tensor:
        x = torch.randn(4, 8)
        x.gain = 1.0 + i // 3
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.origin = "a"
        y = self.b(h) * x.gain
        y.seen_by = [h.origin]
        return y

    def step(self, i: int) -> Any:
        out = super().step(i)
        self.b.weight.touched = i
        return out, out.seen_by, vars(self.b.weight), vars(self.a.weight)


@program
class TablesByShape(Program):
    """A dictionary keyed by shapes and dtypes, and one keyed by the modules themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[Any, Tensor] = {}
        self.uses = {self.a: 0, self.b: 0}

    def inputs(self, i: int) -> Tensor:
        return torch.randn(2 + i % 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        key = (x.shape[0], x.dtype)
        if key not in self.tables:
            self.tables[key] = torch.rand(x.shape[0], 1)
        for layer in self.uses:
            self.uses[layer] += 1
        return self.b(self.a(x)) * self.tables[key] * self.uses[self.a]

    def state(self) -> Any:
        return {str(key): table for key, table in self.tables.items()}, list(self.uses.values())


@functools.lru_cache
def position_table(length: int) -> Tensor:
    return torch.rand(length, 8)


@program
class CachedTables(Program):
    @classmethod
    def reset(cls) -> None:
        position_table.cache_clear()

    def inputs(self, i: int) -> Tensor:
        return torch.randn(3 + i % 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + position_table(x.shape[0]))

    def state(self) -> Any:
        return tuple(position_table.cache_info())


class Scaled:
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain  # type: ignore[misc]


class Straight(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program
class MixinInFront(Scaled, Straight):
    def change(self, i: int) -> None:
        self.gain = 1.0 + i // 3


@program
class ForwardBoundAtInit(Program):
    """The variant of the forward is chosen once, and again later."""

    def __init__(self) -> None:
        super().__init__()
        self.variant = self.first

    def change(self, i: int) -> None:
        if i == 4:
            self.variant = self.second

    def first(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def second(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        return self.variant(*args, **kwargs)
