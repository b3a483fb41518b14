"""A training run in MLflow."""

from __future__ import annotations

from fxgrad.errors import OptionError
from fxgrad.frames import Of
from fxgrad.integrations.needs import needing
from fxgrad.integrations.pictures import Pictures
from fxgrad.integrations.scalars import scalars
from fxgrad.schema import LogEntry, NormWord

with needing("MlflowLog", "mlflow"):
    import mlflow

__all__ = ["MlflowLog"]

_AT_ONCE = 1000  # metrics that a tracking server takes in one request


class MlflowLog:
    """A log in a run of MLflow.

    Metrics are named as by ``TensorBoardLog``; findings and pictures are artifacts of the run, below ``fxgrad/``, with
    the step in their names.

    Args:
        run_id: of the run; None for the one that is active when the log is made.  It stays open.
        of: ``"values"`` or ``"parameters"``.
        norm: which norm the metrics are of.
        pictures: whether pictures are drawn, as SVG (needs Graphviz).

    Raises:
        OptionError: no run is active.
    """

    def __init__(
        self, run_id: str | None = None, *, of: Of = "values", norm: NormWord = "l2_norm", pictures: bool = True
    ) -> None:  # fmt: skip
        active = mlflow.active_run()
        if run_id is None and active is None:
            message = "MlflowLog() found no active run: call mlflow.start_run() first, or give a run_id"
            raise OptionError(message)
        self._run_id: str = run_id or active.info.run_id
        self._of, self._norm = of, norm
        self._pictures = Pictures(on=pictures)

    def write(self, entry: LogEntry) -> None:
        """Log an entry to the run."""
        found = list(scalars(entry, self._of, self._norm).items())
        for first in range(0, len(found), _AT_ONCE):
            mlflow.log_metrics(dict(found[first : first + _AT_ONCE]), step=entry.step, run_id=self._run_id)
        if entry.fresh:
            mlflow.log_text(f"{entry.diagnosis}\n", f"fxgrad/findings-{entry.step:08}.txt", run_id=self._run_id)
        picture = self._pictures.svg(entry)
        if picture is not None:
            mlflow.log_text(picture, f"fxgrad/gradient_flow-{entry.step:08}.svg", run_id=self._run_id)

    def close(self) -> None:
        """Nothing is open.  The run is yours."""
