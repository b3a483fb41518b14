"""The loss scale of ``torch.amp.GradScaler`` by backward event, kept on its device until somebody reads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler

from fxgrad.torch_support.private import loss_scale_of

_KEPT = 512  # events of which the scale is known
ASKED = 100  # steps over which skipped ones are counted


@dataclass(frozen=True, slots=True)
class Reading:
    """The scale at one backward event.

    Attributes:
        event: its number.
        calls: how often the optimizers had stepped before.
        scale: None where the scaler had not been used yet.
    """

    event: int
    calls: int
    scale: float | None


class Scales:
    """Notes the scale when a backward pass begins: one kernel that copies one number."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._ring: Tensor | None = None
        self._noted: deque[tuple[int, int, int | None]] = deque(maxlen=_KEPT)
        self._next = 0
        self._read: tuple[Reading, ...] = ()

    def note(self, event: int, calls: int) -> None:
        """A backward pass begins."""
        self._read = ()
        scale = loss_scale_of(self.scaler) if self.scaler.is_enabled() else None
        place = None
        if scale is not None:
            with torch.no_grad():
                if self._ring is None or self._ring.device != scale.device:
                    old, self._ring = self._ring, torch.zeros(_KEPT, dtype=torch.float32, device=scale.device)
                    if old is not None:
                        self._ring.copy_(old)
                place, self._next = self._next, (self._next + 1) % _KEPT
                self._ring[place].copy_(scale)
        self._noted.append((event, calls, place))

    def read(self) -> tuple[Reading, ...]:
        """The readings so far, oldest first; copied to the host once for all of them."""
        if not self._read and self._noted:
            self._read = self._readings(self._ring, self._noted)
        return self._read

    def _readings(self, ring: Tensor | None, noted: Iterable[tuple[int, int, int | None]]) -> tuple[Reading, ...]:
        scales = [] if ring is None else ring.tolist()
        off = None if self.scaler.is_enabled() else 1.0  # a scaler that is switched off multiplies by nothing
        return tuple(Reading(event, calls, off if place is None else scales[place]) for event, calls, place in noted)

    def kept(self, calls: int) -> Callable[[], tuple[Reading, ...]]:
        """Readings and the scale as they are now, for another thread to copy to the host, once."""
        noted = tuple(self._noted)
        scale = loss_scale_of(self.scaler) if self.scaler.is_enabled() else None
        with torch.no_grad():
            ring, now = (None if one is None else one.detach().clone() for one in (self._ring, scale))

        def read() -> tuple[Reading, ...]:
            return (*self._readings(ring, noted), Reading(-1, calls, None if now is None else float(now)))

        return read

    def present(self, calls: int) -> Reading:
        """The scale now, as if a further event began.  Copies one number to the host."""
        scale = loss_scale_of(self.scaler) if self.scaler.is_enabled() else None
        return Reading(-1, calls, None if scale is None else float(scale))

    def skipped(self, readings: tuple[Reading, ...], *, in_kernel: bool) -> tuple[int, int]:
        """How many steps were skipped, and among how many: the last, at most ``ASKED``, between these readings.

        A skipped step is one that never comes to the optimizer, and after which the scale is smaller by the scaler's
        backoff factor.  ``in_kernel``: calls of the optimizer include those that its fused kernel skips.
        """
        asked = total = 0
        backoff = -math.log(self.scaler.get_backoff_factor())
        for before, after in zip(reversed(readings[:-1]), reversed(readings[1:]), strict=True):
            steps, skips = after.calls - before.calls, 0
            if before.scale and after.scale and after.scale < before.scale:
                skips = max(1, round(math.log(before.scale / after.scale) / backoff))
            here = max(steps, skips) if in_kernel else steps + skips
            if asked + here > ASKED:
                return total + min(skips, ASKED - asked), ASKED
            asked, total = asked + here, total + skips
        return total, asked
