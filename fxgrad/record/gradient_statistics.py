"""Statistics of single gradients outside of backward events: what rules at parameters got and made."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.record.full import write_any_norm, write_full
from fxgrad.record.library import library
from fxgrad.record.reading import read_gradients
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slots import BufferKey, Reading, Slots
from fxgrad.record.statistics import accumulator, dense
from fxgrad.schema import Level, Statistics


class GradientStatistics:
    """Keeps scalars on the device, by number, until they are read; the latest gradient of a number counts.

    Args:
        level: as of the recorder; ``"histogram"`` is measured at ``"full"`` here.
        native: whether the native library may be used.
    """

    def __init__(self, level: Level, *, native: bool = True) -> None:
        self._level = level
        self._library = library() if native else None
        self._slots = Slots()
        self._readings: list[Reading | None] = []
        self._failures: dict[int, str] = {}

    def take(self, index: int, gradient: Tensor) -> None:
        """Measure a gradient.  Never raises: a statistic that cannot be computed is noted with its reason."""
        missing = index + 1 - len(self._readings)
        if missing > 0:
            self._readings.extend([None] * missing)
        self._failures.pop(index, None)
        try:
            with torch.no_grad():
                self._readings[index] = self._write(index, gradient)
        except Exception as error:  # noqa: BLE001  # the user's step must go on, whatever the gradient is
            self._readings[index] = None
            self._failures[index] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _write(self, index: int, gradient: Tensor) -> Reading:
        if self._level != "norm":
            return write_full(gradient, self._slots, (index, index + 1), self._library)
        values = gradient if gradient.layout is torch.strided else dense(gradient)
        wide = accumulator(values.dtype) is torch.float64
        key: BufferKey = (values.device, "norm64" if wide else "norm")
        write_any_norm(values, self._slots.views(key, index + 1)[index], self._library)
        return key, gradient.shape, gradient.numel(), index

    def read(self) -> tuple[list[Statistics | None], dict[int, str]]:
        """The statistics by number, None where there are none, and why; one copy to the host per device."""
        event_record = EventRecord(None, 0, dict(self._slots.buffers), list(self._readings), self._failures, None)
        return read_gradients([event_record])[0], self._failures
