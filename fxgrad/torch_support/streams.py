"""Random streams are given back as they were: what our own run drew, and nothing that another thread did.

A stream belongs to the whole process.  Where other threads live, a mode looks at the streams around each torch function
of this thread.  Torch's own streams are drawn from inside of functions that can draw, Python's and NumPy's between two
functions; any other change is somebody else's.  A stream that somebody else drew from as well is left as it is: to give
it back would deal the same numbers again.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fxgrad.torch_support.private import without_torch_function

#: Names of functions that may draw from a stream of torch.  A test holds it against torch's own tags.
_DRAWS = re.compile(
    "rand|drop|normal|uniform|bernoulli|binomial|multinomial|poisson|exponential|geometric|cauchy|gamma|dirichlet|"
    "rrelu|gumbel|attention|fractional_max|lstm|gru|rnn|seed|kaiming|xavier|orthogonal|sparse_$|custom|own code"
)


def name_of(function: Any) -> str:
    """The name of a torch function; ``own code`` for what is not torch's."""
    name = str(getattr(function, "__name__", ""))
    module = str(getattr(function, "__module__", "torch") or "torch")
    return name if name and module.startswith(("torch", "_operator")) else f"own code {name}"


class _Stream:
    """One stream.

    Attributes:
        of_torch: whether torch's functions draw from it.
        ours: whether this thread drew from it.
        others: whether another thread did.
    """

    def __init__(self, get: Callable[[], Any], restore: Callable[[Any], Any], *, of_torch: bool) -> None:
        self.get = get
        self.ours = self.others = False
        self._restore = restore
        self.of_torch = of_torch
        self._last = get()
        self._known = [self._last]

    def look(self, ran: str | None) -> None:
        """Now, behind a torch function of this thread with the name ``ran``, or before one (None)."""
        state = self.get()
        if _equal(state, self._last):
            return
        self._last = state
        # A state that was there before is set again: a checkpoint rewinds the stream for its second run.
        known = not self.others and any(_equal(state, one) for one in self._known)
        own = ran is not None and _DRAWS.search(ran) is not None if self.of_torch else ran is None
        if known or own:
            self.ours = True
        else:
            self.others = True
            del self._known[1:]
        if not known and not self.others:
            self._known.append(state)

    def changed(self) -> bool:
        """Whether it is not as it was."""
        return not _equal(self.get(), self._known[0])

    def give_back(self) -> None:
        """As it was, where nobody else drew from it."""
        if not self.others and self.changed():
            self._restore(self._known[0])


class _Looking(TorchFunctionMode):
    """Looks at the streams around each torch function that this thread runs."""

    def __init__(self, streams: list[_Stream]) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it."""
        del types
        self.look(None)
        ran = name_of(func)
        try:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, fx.Proxy):  # while torch.fx traces, nothing runs
                ran = ""
        finally:
            self.look(ran)
        return result

    def look(self, ran: str | None) -> None:
        """At all streams."""
        with without_torch_function():
            for stream in self._streams:
                stream.look(ran)


@contextmanager
def random_streams(*, fake: bool = False, compiled: bool = False) -> Iterator[Callable[[], bool]]:
    """Restore those random streams of torch (all devices in use), Python and NumPy that this thread drew from.

    ``fake``: what runs has no data, and draws nothing from torch's streams.  ``compiled``: dynamo runs it, which takes
    no mode of ours; there all that was drawn counts as our own.

    Gives a function that says whether one of them was.  A stream that nobody drew from is not written to.  What another
    thread draws from Python's or NumPy's stream between two torch functions of ours cannot be told from our own.
    """
    alone = threading.active_count() == 1
    streams = [stream for stream in _streams() if alone or not (fake and stream.of_torch)]
    mode = None if alone or fake or compiled else _Looking(streams)

    def drawn() -> bool:
        if mode is None:
            return any(stream.changed() for stream in streams)
        mode.look(None)
        return any(stream.ours for stream in streams)

    try:
        with nullcontext() if mode is None else mode:
            yield drawn
    finally:
        if mode is not None:
            mode.look(None)
        for stream in streams:
            stream.give_back()


def _streams() -> Iterator[_Stream]:
    yield _Stream(torch.get_rng_state, torch.set_rng_state, of_torch=True)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            yield _Stream(
                functools.partial(torch.cuda.get_rng_state, device), functools.partial(_set_cuda, device), of_torch=True
            )
    yield _Stream(random.getstate, random.setstate, of_torch=False)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield _Stream(numpy.random.get_state, numpy.random.set_state, of_torch=False)


def _set_cuda(device: int, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        with without_torch_function():  # a mode of the user's must not see it
            return torch.equal(one, two)
    if hasattr(one[1], "tobytes"):  # NumPy's
        return bool(one[1].tobytes() == two[1].tobytes() and one[0] == two[0] and one[2:] == two[2:])
    return bool(one == two)
