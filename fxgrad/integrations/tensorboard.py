"""A training run in TensorBoard: curves in the module hierarchy, the picture as image, findings as text."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from fxgrad.frames import Of
from fxgrad.integrations.needs import needing
from fxgrad.integrations.pictures import Pictures
from fxgrad.integrations.scalars import scalars
from fxgrad.schema import LogEntry, NormWord

with needing("TensorBoardLog", "tensorboard"):
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLog"]


class TensorBoardLog:
    """A log in TensorBoard.

    Curves are named ``gradient/layer1/0/conv1``, ``note/loss`` and ``findings/error``; the picture is
    ``fxgrad/gradient_flow``, drawn at the first entry and whenever something is found for the first time; the text is
    ``fxgrad/findings``.

    Args:
        writer: a ``SummaryWriter`` of yours, which stays open; or the folder for one of its own.
        of: ``"values"`` or ``"parameters"``.
        norm: which norm the curves are of.
        pictures: whether pictures are drawn (needs Graphviz, and CairoSVG or ``rsvg-convert``).
    """

    def __init__(
        self, writer: SummaryWriter | str | Path, *, of: Of = "values", norm: NormWord = "l2_norm",
        pictures: bool = True,
    ) -> None:  # fmt: skip
        self._own = isinstance(writer, (str, Path))
        self._writer: SummaryWriter = SummaryWriter(str(writer)) if isinstance(writer, (str, Path)) else writer
        self._of, self._norm = of, norm
        self._pictures = Pictures(on=pictures)

    def write(self, entry: LogEntry) -> None:
        """Add an entry to the event file."""
        for name, value in scalars(entry, self._of, self._norm).items():
            self._writer.add_scalar(name, value, entry.step)
        if entry.fresh:
            words = "\n".join(f"- {finding}" for finding in entry.diagnosis.findings)
            self._writer.add_text("fxgrad/findings", words, entry.step)
        picture = self._pictures.png(entry)
        if picture is not None:
            pixels = np.asarray(Image.open(BytesIO(picture)).convert("RGB"))
            self._writer.add_image("fxgrad/gradient_flow", pixels, entry.step, dataformats="HWC")

    def close(self) -> None:
        """Close a writer of its own; write through one of yours."""
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()
