"""What rules did, by forward call: for the flow of that call.  Counts stay on the device until they are read."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.rewriting.state import State
from fxgrad.schema import Rewritten

Changed = Tensor | int | None  # entries that a rule changed: a count on the device, or None without ``audit="full"``


class Tally:
    """What rules at sites and edges did in the backward passes through one forward call, by place there."""

    def __init__(self) -> None:
        self._ran: Counter[Hashable] = Counter()
        self._changed: dict[Hashable, list[Tensor | int]] = {}
        self._read: tuple[int, dict[Hashable, list[int]]] = (-1, {})

    def note(self, key: Hashable, changed: Changed) -> None:
        """A rule ran."""
        self._ran[key] += 1
        if changed is not None:
            self._changed.setdefault(key, []).append(changed)

    def of(self, names: Iterable[str], keys: Sequence[Hashable], audited: Sequence[bool]) -> Rewritten:
        """What the rules with these names and keys did; ``audited``: whether their entries are counted."""
        counts = self._on_host()
        changed = tuple(sum(counts.get(key, ())) if known else None for key, known in zip(keys, audited, strict=True))
        fired = tuple(
            sum(count > 0 for count in counts.get(key, ())) if known else None
            for key, known in zip(keys, audited, strict=True)
        )
        none = not any(audited)
        ran = tuple(self._ran[key] for key in keys)
        return Rewritten(tuple(names), ran, fired=() if none else fired, changed=() if none else changed)

    def _on_host(self) -> dict[Hashable, list[int]]:
        """All counts; those of one device are copied together."""
        total = sum(self._ran.values())
        if self._read[0] != total:
            found = {
                key: [0 if isinstance(one, Tensor) else one for one in them] for key, them in self._changed.items()
            }
            there: dict[torch.device, list[tuple[Hashable, int, Tensor]]] = {}
            for key, them in self._changed.items():
                for place, one in enumerate(them):
                    if isinstance(one, Tensor):
                        there.setdefault(one.device, []).append((key, place, one))
            for listed in there.values():
                values = torch.stack([one for _, _, one in listed]).tolist()
                for (key, place, _), value in zip(listed, values, strict=True):
                    found[key][place] = int(value)
            self._read = (total, found)
        return self._read[1]


class Window:
    """What rules at parameters did from one forward call of the model to the next."""

    def __init__(self, states: Iterable[State]) -> None:
        self._states = [state for state in states if state.of_parameters]
        self._before = [state.audit.snapshot() for state in self._states]
        self._after: list[Any] | None = None

    def close(self) -> None:
        """The model is called again; what comes belongs to that call.  May be called twice."""
        if self._after is None:
            self._after = [state.audit.snapshot() for state in self._states]

    def told(self) -> dict[int, Rewritten]:
        """What the rules did, by id of a parameter that they act on."""
        self.close()
        lines: dict[int, list[tuple[str, int, int | None, int | None]]] = {}
        for state, before, after in zip(self._states, self._before, self._after or (), strict=True):
            done = after.since(before)
            for _, number, rule in state.of_parameters:
                for unit in state.units_of(number):
                    line = (rule.name, *done.get((number, unit.name), (0, None, None)))
                    for key in dict.fromkeys(id(parameter) for _, parameter in unit.members):
                        lines.setdefault(key, []).append(line)
        return {key: _joined(listed) for key, listed in lines.items()}


def _joined(lines: list[tuple[str, int, int | None, int | None]]) -> Rewritten:
    names, ran, fired, changed = zip(*lines, strict=True)
    none = all(count is None for count in changed)
    return Rewritten(names, ran, fired=() if none else fired, changed=() if none else changed)


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

    def open(self, model: nn.Module, mark: str) -> Window | None:
        """A window from now on, where rules act at parameters of ``model``, which keeps its rules at ``mark``."""
        rules = model.__dict__.get(mark)
        states = [] if rules is None else [state for state in rules.states if state.of_parameters]
        if not states:
            return None
        window = Window(states)
        self._open = weakref.ref(window)
        return window
