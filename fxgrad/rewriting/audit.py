"""What the rules did, counted where it happens and kept on the device until somebody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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

    def row(self, place: Place) -> int:
        row = self.rows.setdefault(place, len(self.rows))
        if row >= len(self.counts):
            self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)])
            self.norms = torch.cat([self.norms, torch.zeros_like(self.norms)])
        return row


class Snapshot:
    """Counts as they were at one moment."""

    def __init__(
        self, ran: dict[Place, int], counts: dict[torch.device, tuple[dict[Place, int], Tensor]], *, audited: bool
    ) -> None:
        self._ran = ran
        self._counts = counts
        self._audited = audited

    def since(self, earlier: Snapshot) -> dict[Place, tuple[int, int | None, int | None]]:
        """By place: how often its rule ran since an earlier moment, how often it fired and what it changed."""
        now, then = self._on_host(), earlier._on_host()
        found: dict[Place, tuple[int, int | None, int | None]] = {}
        for place, ran in self._ran.items():
            times = ran - earlier._ran.get(place, 0)
            new, old = now.get(place, (0, 0)), then.get(place, (0, 0))
            found[place] = (times, new[0] - old[0], new[1] - old[1]) if self._audited else (times, None, None)
        return found

    def _on_host(self) -> dict[Place, tuple[int, int]]:
        found: dict[Place, tuple[int, int]] = {}
        for rows, counts in self._counts.values():
            values = counts.tolist()
            found |= {place: (values[row][0], values[row][1]) for place, row in rows.items()}
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

    def note(self, place: Place, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor | int | None:
        """A rule ran, and made ``after`` of ``before``; unchanged gradients are the same objects.

        Returns how many entries it changed, on the device; None at level ``count``.
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
            slots.norms[row, 0] = joint_norm(map(_dense, before.values()))
            slots.norms[row, 1] = joint_norm(map(_dense, after.values()))
        return total

    def snapshot(self) -> Snapshot:
        """The counts so far; those on a device are copied there."""
        counts = {device: (dict(slots.rows), slots.counts.clone()) for device, slots in self._slots.items()}
        return Snapshot(dict(self._ran), counts, audited=self.level == "full")

    def records(self, names: Mapping[int, str]) -> tuple[RuleRecord, ...]:
        """One per rule and place; copies what is on each device to the host, once."""
        rows: dict[Place, list[float]] = {}
        for slots in self._slots.values():
            joined = torch.cat([slots.counts.to(slots.norms.dtype), slots.norms], dim=1).to("cpu").tolist()
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
