"""The life of a backward event: from the first gradient of a backward pass to its end, or to where it raised.

Torch says when a pass ends, by a callback that the pass itself holds.  A pass that raises never calls it, and lets go
of it: that is how it is told from one that ended, without anything around the user's code.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from fxgrad.torch_support.private import at_end_of_backward, current_backward
from fxgrad.torch_support.structure import tensors_in


@dataclass(slots=True, eq=False)
class Event:
    """One run of the backward pass, with those inside of it.

    Attributes:
        number: of the event, from 0.
        thread: the thread in which its first gradient came.
        certain_end: whether torch says when it ends.
        raised: whether the pass has raised.
    """

    number: int
    thread: int
    certain_end: bool = False
    raised: bool = False
    watched: Any = None  # the weak reference that notices when the pass lets go of its callback


E = TypeVar("E", bound=Event)


class Events(ABC, Generic[E]):
    """The backward events of one recorder, or of one set of rules.

    Attributes:
        begun: how many began.
    """

    #: Rounds of torch's end-of-backward callbacks that are let pass: those who wait there queue again and come later.
    rounds = 0

    def __init__(self) -> None:
        self.begun = 0
        self._lock = threading.RLock()
        self._open: dict[int, E] = {}  # by the number that torch gives a running pass

    @abstractmethod
    def _new(self, number: int, thread: int) -> E:
        """An event that begins."""

    def _began(self, event: E) -> None:
        """It has begun, in its backward pass."""

    def _has_raised(self, event: E) -> None:
        """Its pass is raising right now: take down what will not be the same later.  No torch operations."""

    @abstractmethod
    def _ended(self, event: E) -> None:
        """It has ended; or its pass has raised, some time ago."""

    def running(self) -> E:
        """The event of the backward pass that is running now; a pass inside of another belongs to the outer one."""
        task = current_backward()
        event = self._open.get(task)
        return self._begin(task) if event is None else event

    def _begin(self, task: int) -> E:
        if self._open:
            self._end_raised()
        thread = threading.get_ident()
        with self._lock:
            event = self._open.get(task)  # another device's thread may have been quicker
            if event is not None:
                return event
            event = next((e for e in self._open.values() if e.thread == thread and e.certain_end), None)
            if event is not None:
                self._open[task] = event
                return event
            event = self._open[task] = self._new(self.begun, thread)
            self.begun += 1
        end = _End(self, event, self.rounds)
        event.certain_end = at_end_of_backward(end)
        if event.certain_end:
            event.watched = weakref.ref(end, lambda _: self._let_go(event))
        self._began(event)
        return event

    def _let_go(self, event: E) -> None:
        if event in self._open.values():
            event.raised = True
            self._has_raised(event)

    def _end_raised(self) -> None:
        for event in dict.fromkeys(e for e in tuple(self._open.values()) if e.raised):
            self.end(event)

    def close_events(self) -> None:
        """End the events that torch did not announce the end of, and those whose pass raised.

        Called before a forward and a read.  What runs in this very moment goes on.
        """
        if not self._open:
            return
        self._end_raised()
        thread = threading.get_ident()
        for event in dict.fromkeys(e for e in tuple(self._open.values()) if e.thread == thread and not e.certain_end):
            self.end(event)

    def end(self, event: E) -> None:
        """End an event, if that was not done before."""
        with self._lock:
            tasks = [task for task, found in self._open.items() if found is event]
            for task in tasks:
                del self._open[task]
        event.watched = None  # it has not raised
        if tasks:
            self._ended(event)

    def forget(self) -> None:
        """Nobody is interested in the open events any more."""
        with self._lock:
            self._open.clear()


class _End:
    """What a backward pass calls when it ends, and lets go of in any case.  Nobody else holds it."""

    __slots__ = ("__weakref__", "event", "events", "rounds")

    def __init__(self, events: Events[E], event: E, rounds: int) -> None:
        self.events: Any = events
        self.event = event
        self.rounds = rounds

    def __call__(self) -> None:
        """The pass has ended."""
        if self.rounds:
            self.rounds -= 1
            if at_end_of_backward(self):
                return
        self.events.end(self.event)


class Begin:
    """A hook on what a model returns: the backward pass begins here, and not in a pass inside of it."""

    __slots__ = ("_events",)
    __torch_unserializable__ = True

    def __init__(self, events: Events[Any]) -> None:
        self._events = events

    def __call__(self, gradient: Tensor) -> None:
        """Open the event."""
        del gradient
        self._events.running()

    def put(self, returned: Any) -> None:
        """On all tensors that were returned and can carry a gradient."""
        for _, tensor in tensors_in(returned):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self)  # type: ignore[no-untyped-call]


__all__ = ["Begin", "Event", "Events"]
