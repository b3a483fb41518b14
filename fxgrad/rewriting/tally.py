"""What rules did, by forward call: for the flow of that call.  Counts stay on the device until they are read."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxgrad.rewriting.audit import Did, Noted
from fxgrad.rewriting.state import State
from fxgrad.schema import Rewritten, Statistics
from fxgrad.torch_support.private import version_of

Who = tuple[str, int, int]  # the moment at which rules act, their rewrite, and a number in it
_NONE_CAME = "no gradient came to the rules between this forward call and the next, or the first reading of the flow"


class Tally:
    """What rules at sites and edges did in the backward passes through one forward call, by place there."""

    def __init__(self) -> None:
        self._ran: Counter[Hashable] = Counter()
        self._changed: dict[Hashable, list[Tensor | int]] = {}
        self._latest: dict[Hashable, Noted] = {}
        self._read: tuple[int, dict[Hashable, Did]] = (-1, {})

    def note(self, key: Hashable, noted: Noted | None) -> None:
        """A rule ran; ``noted`` is what ``Audit.note`` returned."""
        self._ran[key] += 1
        if noted is not None:
            self._changed.setdefault(key, []).append(noted.changed)
            self._latest[key] = noted

    def of(self, names: Iterable[str], keys: Sequence[Hashable], audited: Sequence[bool]) -> Rewritten:
        """What the rules with these names and keys did; ``audited``: whether their entries are counted."""
        found = self._on_host()
        did = [
            found.get(key, Did(self._ran[key], 0, 0)) if known else Did(self._ran[key])
            for key, known in zip(keys, audited, strict=True)
        ]
        return rewritten(tuple(names), did)

    def _on_host(self) -> dict[Hashable, Did]:
        """All that was noted; what is on one device is copied together."""
        total = sum(self._ran.values())
        if self._read[0] != total:
            there: dict[torch.device, list[Tensor]] = {}
            norms = [norm for noted in self._latest.values() for norm in (noted.before, noted.after)]
            for tensor in (*itertools.chain.from_iterable(self._changed.values()), *norms):
                if isinstance(tensor, Tensor):
                    there.setdefault(tensor.device, []).append(tensor)
            values: dict[int, float] = {}
            for device, tensors in there.items():
                wide = torch.float32 if device.type == "mps" else torch.float64
                numbers = torch.stack([tensor.detach().to(wide) for tensor in tensors]).tolist()
                values.update(zip(map(id, tensors), numbers, strict=True))
            self._read = (total, {key: self._did(key, values) for key in self._changed})
        return self._read[1]

    def _did(self, key: Hashable, values: Mapping[int, float]) -> Did:
        changed, latest = self._changed[key], self._latest[key]
        counts = [int(values[id(one)]) if isinstance(one, Tensor) else one for one in changed]
        fired = sum(count > 0 for count in counts)
        return Did(self._ran[key], fired, sum(counts), values[id(latest.before)], values[id(latest.after)])


def rewritten(names: tuple[str, ...], did: Sequence[Did]) -> Rewritten:
    """The schema's record of what rules did; what none of them has is left empty."""
    none = all(one.changed is None for one in did)
    return Rewritten(
        names,
        tuple(one.ran for one in did),
        fired=() if none else tuple(one.fired for one in did),
        changed=() if none else tuple(one.changed for one in did),
        norms_before=() if none else tuple(one.before for one in did),
        norms_after=() if none else tuple(one.after for one in did),
    )


class Measure(Protocol):
    """Takes statistics of single gradients; they stay on the device until they are read."""

    def take(self, index: int, gradient: Tensor) -> None:
        """Measure a gradient, in place of an earlier one with this number.  Never raises."""

    def read(self) -> tuple[list[Statistics | None], dict[int, str]]:
        """The statistics by number, and why there are none."""


class Window:
    """What rules at parameters did from one forward call of the model to the next.

    Args:
        states: of the model's rewrites.
        measure: for the gradients before and after.
    """

    def __init__(self, states: Iterable[State], measure: Measure) -> None:
        self._states = [state for state in states if state.of_parameters]
        self._before = [state.audit.snapshot() for state in self._states]
        self._after: list[Any] | None = None
        self._measure = measure
        self._numbers: dict[int, int] = {}
        self._latest: dict[int, tuple[weakref.ref[Tensor], int, set[Who]]] = {}
        for state in self._states:
            state.windows.add(self)

    def note(self, parameter: Tensor, before: Tensor, after: Tensor, who: Who) -> None:
        """The rules ``who`` at a parameter got ``before`` and made ``after``, the same object where none changed it.

        What other rules of the same moment have just made is not what came to the first.
        """
        number = self._numbers.setdefault(id(parameter), 2 * len(self._numbers))
        latest = self._latest.get(number)
        chain: set[Who] = set()
        if latest is not None and latest[0]() is before and latest[1] == version_of(before):
            chain = latest[2]
        if who in chain or {moment for moment, *_ in chain} != {who[0]}:
            chain = set()
            self._measure.take(number, before)
        self._measure.take(number + 1, after)
        self._latest[number] = weakref.ref(after), version_of(after), chain | {who}

    def close(self) -> None:
        """The model is called again; what comes belongs to that call.  May be called twice."""
        if self._after is None:
            self._after = [state.audit.snapshot() for state in self._states]
            for state in self._states:
                state.windows.discard(self)

    def recorded(self) -> dict[int, Rewritten]:
        """What the rules did, by id of a parameter that they act on."""
        self.close()
        names: dict[int, list[str]] = {}
        lines: dict[int, list[Did]] = {}
        for state, before, after in zip(self._states, self._before, self._after or (), strict=True):
            done = after.since(before)
            for _, number, rule in state.of_parameters:
                for unit in state.units_of(number):
                    for key in dict.fromkeys(id(parameter) for _, parameter in unit.members):
                        names.setdefault(key, []).append(rule.name)
                        lines.setdefault(key, []).append(done.get((number, unit.name), Did(0)))
        measured, failures = self._measure.read()
        return {key: self._with_norms(key, rewritten(tuple(names[key]), lines[key]), measured, failures)
                for key in names}  # fmt: skip

    def _with_norms(
        self, key: int, recorded: Rewritten, measured: Sequence[Statistics | None], failures: Mapping[int, str]
    ) -> Rewritten:
        number = self._numbers.get(key)
        if number is None:
            return dataclasses.replace(recorded, reason=_NONE_CAME)
        before, after = measured[number : number + 2]
        failed = [failures[n] for n in (number, number + 1) if n in failures]
        return dataclasses.replace(recorded, before=before, after=after, reason=failed[0] if failed else None)


class Windows:
    """The windows of one model, one after the other."""

    def __init__(self) -> None:
        self._open: weakref.ref[Window] | None = None

    def close(self) -> None:
        """The model is called."""
        window = None if self._open is None else self._open()
        if window is not None:
            window.close()
        self._open = None

    def open(self, model: nn.Module, mark: str, measure: Callable[[], Measure]) -> Window | None:
        """A window from now on, where rules act at parameters of ``model``, which keeps its rules at ``mark``."""
        rules = model.__dict__.get(mark)
        states = [] if rules is None else [state for state in rules.states if state.of_parameters]
        if not states:
            return None
        window = Window(states, measure())
        self._open = weakref.ref(window)
        return window
