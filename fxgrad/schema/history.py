"""The flows of a training run, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fxgrad.presenting import presenter
from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.words import NormWord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["History"]


class History(tuple[GradientFlow, ...]):
    """A tuple of flows, oldest first, that reads as one line for each of them."""

    __slots__ = ()

    def to_csv(self, path: str | Path | None = None, *, of: Literal["values", "parameters"] = "values") -> str:
        """A row for each step and value (or parameter); also written to ``path`` if given."""
        text: str = presenter().to_csv(self, of)
        if path is not None:
            presenter().write_whole(Path(path), text)
        return text

    def to_pandas(self, *, of: Literal["values", "parameters"] = "values") -> pd.DataFrame:
        """The same as a frame (needs pandas), for ``to_parquet`` and plots of your own.

        Raises:
            OptionError: pandas is not installed, or ``of`` is unknown.
        """
        return presenter().to_pandas(self, of)

    def plot(
        self, path: str | Path | None = None, *, norm: NormWord = "l2_norm", values: Sequence[str] = ()
    ) -> Figure:  # fmt: skip
        """A heat map of blocks over steps, the loss side and ``values`` above it, as a matplotlib figure.

        Saved to ``path`` if given.  ``fxgrad plot`` draws it in a terminal, too, without matplotlib.

        Raises:
            OptionError: matplotlib is not installed, there is no flow, or ``norm`` is unknown or was not measured.
            SiteNotFoundError: the latest flow has no value of that name.
        """
        return presenter().plot_history(self, path, norm=norm, values=values)

    def __repr__(self) -> str:
        """How many there are, and which."""
        if not self:
            return "History(no flow yet)"
        first, last = self[0].event.backward, self[-1].event.backward
        return f"History({len(self)} flows of {self[-1].capture.model[:40]}, backward {first} to {last})"

    def __str__(self) -> str:
        """A line for each backward pass: what went in at the loss side, what came to the inputs, and NaN or Inf."""
        return presenter().history_text(self)
