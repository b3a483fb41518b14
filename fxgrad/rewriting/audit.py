"""What the rules did, counted where it happens and kept on the device until somebody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxgrad.rewriting.rules import joint_norm
from fxgrad.schema import RuleRecord

Level = Literal["count", "full"]
Place = tuple[int, str]  # number of the rule, id of the site or name of the unit
_BLOCK = 64


class _Slots:
    """Counts and norms of the places whose gradients are on one device."""

    def __init__(self, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64  # that device has no float64
        self.rows: dict[Place, int] = {}
        self.counts = torch.zeros((_BLOCK, 2), dtype=torch.int64, device=device)
        self.norms = torch.zeros((_BLOCK, 2), dtype=wide, device=device)

    def joined(self) -> Tensor:
        """A copy of counts and norms, shape (rows, 4)."""
        return torch.cat([self.counts.to(self.norms.dtype), self.norms], dim=1)

    def row(self, place: Place) -> int:
        row = self.rows.setdefault(place, len(self.rows))
        if row >= len(self.counts):
            self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)])
            self.norms = torch.cat([self.norms, torch.zeros_like(self.norms)])
        return row


class Noted(NamedTuple):
    """What one run of a rule did, on the device: entries that it changed, l2 norms of what it got and made."""

    changed: Tensor | int
    before: Tensor
    after: Tensor


class Did(NamedTuple):
    """What a rule did at a place over some time.

    Attributes:
        ran: how often it ran.
        fired: how often it changed an entry; like all that follow, None without ``audit="full"``.
        changed: how many entries it changed.
        before, after: l2 norms at its latest run; None where it did not run.
    """

    ran: int
    fired: int | None = None
    changed: int | None = None
    before: float | None = None
    after: float | None = None


class Snapshot:
    """Counts and norms as they were at one moment."""

    def __init__(
        self, ran: dict[Place, int], slots: dict[torch.device, tuple[dict[Place, int], Tensor]], *, audited: bool
    ) -> None:
        self._ran = ran
        self._slots = slots
        self._audited = audited

    def since(self, earlier: Snapshot) -> dict[Place, Did]:
        """By place: what its rule did since an earlier moment."""
        now, then = self._on_host(), earlier._on_host()
        found: dict[Place, Did] = {}
        for place, ran in self._ran.items():
            times = ran - earlier._ran.get(place, 0)
            if not self._audited:
                found[place] = Did(times)
                continue
            fired, changed, *norms = now.get(place, (0, 0))
            fired_then, changed_then = then.get(place, (0, 0))[:2]
            found[place] = Did(times, int(fired - fired_then), int(changed - changed_then), *(norms if times else ()))
        return found

    def _on_host(self) -> dict[Place, tuple[float, ...]]:
        found: dict[Place, tuple[float, ...]] = {}
        for rows, joined in self._slots.values():
            values = joined.tolist()
            found |= {place: tuple(values[row]) for place, row in rows.items()}
        return found


class Audit:
    """Counts runs on the host; at level ``full``, changed entries and norms on the device.

    ``count`` launches no kernel.  ``full`` compares old and new entries and takes two norms, and never waits for the
    device.
    """

    def __init__(self, level: Level) -> None:
        self.level: Level = level
        self._ran: dict[Place, int] = {}
        self._slots: dict[torch.device, _Slots] = {}

    def expect(self, place: Place) -> None:
        """Have a record of this place, though nothing ran there yet."""
        self._ran.setdefault(place, 0)

    def note(self, place: Place, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Noted | None:
        """A rule ran, and made ``after`` of ``before``; unchanged gradients are the same objects.

        Returns what it did, on the device; None at level ``count``.
        """
        self._ran[place] = self._ran.get(place, 0) + 1
        if self.level == "count" or not before:
            return None
        total: Tensor | int = 0
        with torch.no_grad():
            device = next(iter(before.values())).device
            slots = self._slots.get(device)
            if slots is None:
                slots = self._slots[device] = _Slots(device)
            row = slots.row(place)
            changed = [_changed(old, after[name]).to(device) for name, old in before.items() if after[name] is not old]
            if changed:
                total = torch.stack(changed).sum()
                slots.counts[row, 0] += total > 0
                slots.counts[row, 1] += total
            norms = [joint_norm(map(_dense, gradients.values())) for gradients in (before, after)]
            slots.norms[row, 0], slots.norms[row, 1] = norms
        return Noted(total, *norms)

    def snapshot(self) -> Snapshot:
        """Counts and norms so far; those on a device are copied there."""
        copied = {device: (dict(slots.rows), slots.joined()) for device, slots in self._slots.items()}
        return Snapshot(dict(self._ran), copied, audited=self.level == "full")

    def records(self, names: Mapping[int, str]) -> tuple[RuleRecord, ...]:
        """One per rule and place; copies what is on each device to the host, once."""
        rows: dict[Place, list[float]] = {}
        for slots in self._slots.values():
            joined = slots.joined().to("cpu").tolist()
            rows |= {place: joined[row] for place, row in slots.rows.items()}
        found = []
        for place, ran in sorted(self._ran.items(), key=lambda item: item[0][0]):
            number, name = place
            if self.level == "count":
                found.append(RuleRecord(names[number], name, ran))
            elif place in rows:
                fired, changed, before, after = rows[place]
                found.append(RuleRecord(names[number], name, ran, int(fired), int(changed), before, after))
            else:
                found.append(RuleRecord(names[number], name, ran, 0, 0))
        return tuple(found)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _changed(old: Tensor, new: Tensor) -> Tensor:
    """How many entries differ, NaN equal to NaN."""
    old, new = _dense(old), _dense(new)
    return ((old != new) & ~(torch.isnan(old) & torch.isnan(new))).sum()
