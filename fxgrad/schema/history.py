"""The flows of a training run, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.late import late
from fxgrad.schema.words import NormWord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["History"]


class History(tuple[GradientFlow, ...]):
    """A tuple of flows, oldest first, that reads as one line for each of them."""

    __slots__ = ()

    def reduced(self, *, timeout: float = 120.0, group: Any = None) -> History:
        """The same of all ranks of a distributed run, event by event; on each of them, by one collective.

        Every rank has to call this, as any collective.  A flow of it tells by ``ranks`` how the ranks differ.  Without
        ``torch.distributed`` it is that of one rank.

        Args:
            timeout: seconds that ranks wait for each other.
            group: the process group; None for all ranks.

        Raises:
            RanksError: a rank did not come in time, or made another call; the process group can be used as before.
        """
        return History(late("fxgrad.record.distributed", "flows_of_ranks")(self, timeout=timeout, group=group))

    def to_csv(self, path: str | Path | None = None, *, of: Literal["values", "parameters"] = "values") -> str:
        """A row for each step and value (or parameter); also written to ``path`` if given."""
        text: str = late("fxgrad.frames", "to_csv")(self, of)
        if path is not None:
            late("fxgrad.store", "write_whole")(Path(path), text)
        return text

    def to_pandas(self, *, of: Literal["values", "parameters"] = "values") -> pd.DataFrame:
        """The same as a frame (needs pandas), for ``to_parquet`` and plots of your own.

        Raises:
            OptionError: pandas is not installed, or ``of`` is unknown.
        """
        frame: pd.DataFrame = late("fxgrad.frames", "to_pandas")(self, of)
        return frame

    def plot(
        self, path: str | Path | None = None, *, norm: NormWord = "l2_norm", values: Sequence[str] = ()
    ) -> Figure:  # fmt: skip
        """A heat map of blocks over steps, the loss side and ``values`` above it, as a matplotlib figure.

        Saved to ``path`` if given.  ``fxgrad plot`` draws it in a terminal, too, without matplotlib.

        Raises:
            OptionError: matplotlib is not installed, there is no flow, or ``norm`` is unknown or was not measured.
            SiteNotFoundError: the latest flow has no value of that name.
        """
        figure: Figure = late("fxgrad.render.plots", "plot_history")(self, path, norm=norm, values=values)
        return figure

    def __repr__(self) -> str:
        """How many there are, and which."""
        if not self:
            return "History(no flow yet)"
        first, last = self[0].event.backward, self[-1].event.backward
        return f"History({len(self)} flows of {self[-1].capture.model[:40]}, backward {first} to {last})"

    def __str__(self) -> str:
        """A line for each backward pass: what went in at the loss side, what came to the inputs, and NaN or Inf."""
        text: str = late("fxgrad.render.lines", "history_text")(self)
        return text
