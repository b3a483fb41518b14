"""Programs that look at what is around them: random streams, logs, warnings, profiles, threads."""

from __future__ import annotations

import contextvars
import cProfile
import io
import pstats
import queue
import random
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.fidelity.harness import LOG, Program, program


@program
class StreamSavedAndRestored(Program):
    """The same mask twice, as reversible networks do."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        h = F.dropout(self.a(x), 0.5)
        torch.set_rng_state(state)
        return self.b(F.dropout(h, 0.5))


@program
class StreamForked(Program):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(8)
        return self.b(self.a(x) + noise) * torch.rand(())


@program
class GeneratorOfItsOwn(Program):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * torch.rand(8, generator=self.generator)

    def state(self) -> Any:
        return self.generator.get_state()


@program
class AllThreeStreams(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * (torch.rand(()) + random.random() + np.random.rand())


@program
class SeededEachStep(Program):
    def change(self, i: int) -> None:
        torch.manual_seed(i // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5)) + torch.bernoulli(torch.full((8,), 0.5))


@program
class Logging(Program):
    def forward(self, x: Tensor) -> Tensor:
        LOG.debug("mean %s", x.mean())
        h = self.a(x)
        LOG.info("%s of %s", tuple(h.shape), type(h).__name__)
        return self.b(h)


@program
class Printing(Program):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        file = io.StringIO()
        print(h, h.shape, h.dtype, self.a.weight.grad is None, file=file)
        self.lines.append(file.getvalue())
        return self.b(h)

    def state(self) -> Any:
        return list(self.lines)


@program
class WarningsOnce(Program):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        if x.mean() > 0:
            warnings.warn("positive", UserWarning, stacklevel=2)
        return self.b(self.a(x))


@program
class CaughtWarnings(Program):
    def __init__(self) -> None:
        super().__init__()
        self.caught: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            h = F.mse_loss(self.a(x), x[:1], reduction="none")  # torch warns of the sizes
        self.caught.append(len(caught))
        return self.b(h)

    def state(self) -> Any:
        return list(self.caught)


def marker() -> None:
    pass


@program
class Profiled(Program):
    """Each step in a profile of its own; what it counts of the user's functions."""

    def forward(self, x: Tensor) -> Tensor:
        marker()
        return self.b(self.a(x))

    def step(self, i: int) -> Any:
        profile = cProfile.Profile()
        try:
            profile.enable()
        except ValueError:  # another one runs, of the test that counts calls
            return super().step(i)
        out = super().step(i)
        marker()
        profile.disable()
        stats: Any = pstats.Stats(profile)
        return out, {key[2]: found[0] for key, found in stats.stats.items() if key[0] == __file__}


@program
class ProfiledByTorch(Program):
    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("mine"):
            return self.b(self.a(x))

    def step(self, i: int) -> Any:
        if i not in {2, 3}:
            return super().step(i)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = super().step(i)
        counts = {event.key: event.count for event in profile.key_averages()}
        return out, counts["mine"], counts["aten::linear"], counts["aten::addmm"]


@program
class ThreadsInTheForward(Program):
    """Two halves of the batch in two threads, as a pipeline does."""

    def forward(self, x: Tensor) -> Tensor:
        parts: list[Any] = [None, None]

        def work(number: int) -> None:
            parts[number] = self.a(x[number::2])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.b(torch.cat(parts))


@program
class BackwardInAnotherThread(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def step(self, i: int) -> Any:
        out = self(self.inputs(i))
        thread = threading.Thread(target=lambda: out.square().mean().backward())
        thread.start()
        thread.join()
        return out


class Loading:
    """A thread that makes a batch of random numbers whenever one was taken, during the forward."""

    def __init__(self) -> None:
        self.wanted: queue.Queue[bool] = queue.Queue()
        self.batches: queue.Queue[Tensor] = queue.Queue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while self.wanted.get():
            self.batches.put(torch.randn(4, 8))


@program
class LoadingThread(Program):
    def __init__(self) -> None:
        super().__init__()
        self.loading = Loading()

    def step(self, i: int) -> Any:
        out = super().step(i)
        if i == 6:
            self.loading.wanted.put(False)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5)
        self.loading.wanted.put(True)
        return self.b(F.dropout(h + self.loading.batches.get(), 0.5))


@program
class LoaderOfData(Program):
    def __init__(self) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.2))

    def step(self, i: int) -> Any:
        outputs = []
        for (x,) in DataLoader(self.data, batch_size=4, shuffle=True):
            outputs.append(self(x))
            outputs[-1].square().mean().backward()
        return outputs


CURRENT: contextvars.ContextVar[float] = contextvars.ContextVar("CURRENT", default=1.0)
LOCAL = threading.local()


@program
class ContextAndThreadLocals(Program):
    def forward(self, x: Tensor) -> Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        CURRENT.set(CURRENT.get() * 1.1)
        return self.b(self.a(x)) * CURRENT.get()

    @classmethod
    def reset(cls) -> None:
        CURRENT.set(1.0)
        LOCAL.calls = 0

    def state(self) -> Any:
        return LOCAL.calls, CURRENT.get()


@program
class ForwardThatIsPatched(Program):
    """A timer around the forward, put on and taken off in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def change(self, i: int) -> None:
        if i == 3:
            plain = self.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                begun = time.perf_counter()
                result = plain(*args, **kwargs)
                self.timed.append(int(time.perf_counter() < begun))
                return result * 2

            self.forward = forward  # type: ignore[method-assign]
        if i == 5:
            del self.forward

    def state(self) -> Any:
        return list(self.timed)


@program
class StreamOfParts(Program):
    """A generator that yields layer by layer while the forward uses what it yields."""

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        for layer in (self.a, self.b, self.a):
            x = layer(x)
            yield x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.parts(x))).sum(0)
