"""A training run in Weights & Biases."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.frames import Of
from fxgrad.integrations.needs import needing
from fxgrad.integrations.pictures import Pictures
from fxgrad.integrations.scalars import scalars
from fxgrad.schema import LogEntry, NormWord

with needing("WandbLog", "wandb"):
    import wandb
    from PIL import Image

__all__ = ["WandbLog"]

_STEP = "fxgrad/step"


class WandbLog:
    """A log in a run of Weights & Biases.

    Metrics are named as by ``TensorBoardLog``, below ``fxgrad/``, over ``fxgrad/step``.  The step counter of the run is
    yours: an entry goes into the row that your next ``run.log`` completes, or into one of its own where none came since
    the entry before.

    Args:
        run: what ``wandb.init()`` returned; None for the run that is active when the log is made.  It stays open.
        of: ``"values"`` or ``"parameters"``.
        norm: which norm the metrics are of.
        pictures: whether pictures are drawn (needs Graphviz, and CairoSVG or ``rsvg-convert``).

    Raises:
        OptionError: no run is active.
    """

    def __init__(
        self, run: Any = None, *, of: Of = "values", norm: NormWord = "l2_norm", pictures: bool = True
    ) -> None:  # fmt: skip
        found = wandb.run if run is None else run
        if found is None:
            message = "WandbLog() found no active run: call wandb.init() first, or give a run"
            raise OptionError(message)
        self._run: Any = found
        self._of, self._norm = of, norm
        self._pictures = Pictures(on=pictures)
        self._pending: int | None = None  # step of the row that holds an entry of ours and is not complete
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("fxgrad/*", step_metric=_STEP)

    def write(self, entry: LogEntry) -> None:
        """Add an entry to the row that is open."""
        row: dict[str, Any] = {f"fxgrad/{name}": x for name, x in scalars(entry, self._of, self._norm).items()}
        if entry.fresh:
            row["fxgrad/findings_text"] = wandb.Html(entry.diagnosis._repr_html_(), inject=False)  # IPython's protocol
        picture = self._pictures.png(entry)
        if picture is not None:
            row["fxgrad/gradient_flow"] = wandb.Image(Image.open(BytesIO(picture)))
        self._complete()
        self._run.log({_STEP: entry.step, **row}, commit=False)
        self._pending = self._run.step

    def _complete(self) -> None:
        if self._pending is not None and self._run.step == self._pending:
            self._run.log({}, commit=True)
        self._pending = None

    def close(self) -> None:
        """Complete the last row.  The run stays open."""
        self._complete()
