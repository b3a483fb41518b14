"""One forward call with the native observer on it.  Errors of ours are noted, never raised."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.capture.calls import named_arguments
from fxgrad.capture.captured import CallGraph
from fxgrad.capture.eager import Session
from fxgrad.capture.modules import ModuleMap
from fxgrad.courses.deviation import PARAMETERS
from fxgrad.courses.finding import Finder, Where
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.probes.leaves import Entry
from fxgrad.record.native import LEVELS
from fxgrad.torch_support.private import without_torch_function
from fxgrad.torch_support.structure import tensors_in

if TYPE_CHECKING:
    from fxgrad.courses.known import Observer


class _Nobody:
    """The owner of a record that is never written to: the Python recorder has the hooks."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is about to run: its tensors, what its course is known to depend on, and why it has to be learnt."""

    inputs: list[tuple[str, Tensor]]
    kind: Any
    learning: str | None


class Noting:
    """A context in which an error is noted with a run: the user's forward must go on."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Note what was raised, or what went wrong in C++."""
        run = self._run
        if isinstance(error, Exception):
            run.error = run.error or error
        elif run.native is not None and run.native.failed:
            run.error = run.error or run.native.failed
        return kind is None or isinstance(error, Exception)


class Run:
    """One call with the observer on it.  Errors of ours are noted, never raised."""

    def __init__(self, modules: ModuleMap) -> None:
        self.native: Any = None
        self.where: list[Where | None] = []
        self.given: frozenset[int] = frozenset()
        self.error: Exception | str | None = None
        self._modules = modules
        self._finder: Finder | None = None

    def noting(self) -> Noting:
        """Note what is raised inside, and what the observer noted itself."""
        return Noting(self)

    def start(self, inputs: Sequence[tuple[str, Tensor]], on_leaf: Any = None, on_value: Any = None) -> None:
        """From here on operators are seen."""
        words = "inputs " + " ".join([name for name, _ in inputs])
        self.native.begin(words, [tensor for _, tensor in inputs], self._step, on_leaf, on_value)

    def finish(self, result: Any) -> None:
        """The forward has returned this; operators are no longer seen."""
        if self.error is None:
            with self.noting():
                self.native.finish([tensor for _, tensor in tensors_in(result)])
        if self._finder is not None:
            self._finder.done()

    def leave(self) -> None:
        """Operators are no longer seen, and nothing keeps the autograd graph.  May be called twice."""
        if self._finder is not None:
            self._finder.done()
        if self.native is not None:
            with self.noting():
                self.native.leave()

    def _step(self, _: str) -> None:
        with self.noting():
            if self._finder is None:
                self._finder = Finder(self._modules)
            where = self._finder.find(sys._getframe(1))  # noqa: SLF001  # inspect.stack() reads source files
            if not self.where:
                self.given = frozenset(self.native.value_of(tensor) for tensor in self._finder.given())
            self.where.append(where)


class Learning(Run):
    """One call under the Python recorder, with the observer beside it."""

    def __init__(self, observer: Observer, inputs: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__(observer.modules)
        self.sessions: list[Session] = []
        with self.noting(), without_torch_function():
            record = observer.extension.Record(_Nobody(), observer.level)
            self.native = observer.forward(record, learning=True)
            self.start(inputs)

    def session(
        self, modules: ModuleMap, forward_record: Any, put: Callable[..., Any], previous: CallGraph | None
    ) -> Session:
        """The session of the Python recorder."""
        beside = self.native if self.error is None else None
        self.sessions.append(Session(modules, forward_record, put, previous, beside))
        return self.sessions[-1]


class Following(Run):
    """One call under the observer alone."""

    def __init__(self, observer: Observer, forward_record: ForwardRecord) -> None:
        super().__init__(observer.modules)
        self.forward_record = forward_record
        self.record: Any = None
        self._courses = observer.courses
        self._leaves: list[tuple[int, Entry, Tensor]] = []

    def begin(self, observer: Observer, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Before the model's forward runs."""
        self.record = observer.record_of(self.forward_record)
        self.native = observer.forward(self.record, learning=False)
        values = self.forward_record.values
        if values is not None:
            self.record.take_values(observer.extension.Level(LEVELS[values.taken.level]))
        self.start(inputs, self._leaf, None if values is None else self._value)

    def _value(self, value: Tensor, slot: int) -> None:
        """A value at which Python has to look; the course so far is that of the one that is nearby."""
        with self.noting(), without_torch_function():
            if self.native.differs_at < 0:
                course = self._courses[self.native.plan_nearby]
                site = course.slots[slot][0]
                self.forward_record.values.shown(
                    course.call_graph.calls, course.call_graph.sites[site].call, value, site
                )

    def _leaf(self, leaf: Tensor, value: int) -> None:
        with self.noting(), without_torch_function():
            find = functools.partial(self._site_so_far, value)
            self._leaves.append((value, self.forward_record.leaves.of(leaf).add(self.forward_record, -1, find), leaf))

    def _site_so_far(self, value: int) -> int:
        """While the forward runs, the site of a leaf; the course so far is that of the one that is nearby."""
        sites: Sequence[int] = ()
        with self.noting():
            if self.native.differs_at < 0:
                sites = self._courses[self.native.plan_nearby].slots[value]
        return sites[0] if sites else -1

    def bind_leaves(self, parameters: Mapping[int, Sequence[int]], tensors: Sequence[Tensor]) -> dict[int, Any]:
        """Give leaf tensors their sites, now that these are known; the sites, by number of the value or parameter.

        ``parameters``: the sites that are a parameter, by its number; ``tensors``: all parameters.
        """
        slots, found = self.forward_record.slots or (), {}
        for value, entry, leaf in self._leaves:
            sites = slots[value] if value < len(slots) else ()
            entry.index, entry.find = (sites[0] if sites else -1), None
            self._hook(leaf, sites[1:])
            found[value] = tuple(sites)
        self._leaves.clear()
        for number, sites in parameters.items():
            self._hook(tensors[number], sites)
            slot = self.forward_record.sizes.add(list(tensors[number].shape))
            self.forward_record.slots = (*slots, *(() for _ in range(slot - len(slots))), tuple(sites))
            slots, found[PARAMETERS - number] = self.forward_record.slots, tuple(sites)
        return found

    def _hook(self, leaf: Tensor, sites: Sequence[int]) -> None:
        for site in sites:
            self.forward_record.leaves.of(leaf).add(self.forward_record, site)

    def leave(self) -> None:
        """As of every run."""
        for _, entry, _ in self._leaves:
            entry.find = None
        self._leaves.clear()
        super().leave()


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, with the names of their placeholders."""
    return [
        (name + position, tensor)
        for name, value in named_arguments(args, kwargs, names)
        for position, tensor in tensors_in(value)
    ]
