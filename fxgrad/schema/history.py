"""The flows of a training run, oldest first: in memory, or in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fxgrad.presenting import Displayed, presenter
from fxgrad.schema.drawing import PageWords
from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.ranks import path_here
from fxgrad.schema.words import NormWord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from typing_extensions import Unpack

__all__ = ["FlowSeries", "History", "Series"]


@in_a_line("name", "statistic")
@dataclass(frozen=True, slots=True)
class Series:
    """One number over the steps of a run.

    Attributes:
        name: id of the site, name of the parameter, or of what was noted.
        statistic: which of its statistics; ``""`` for what was noted.
        steps: numbers of the backward passes, ascending; one comes several times where it has several flows.
        values: the number at each of them; None where it was not measured.
    """

    name: str
    statistic: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.steps)


class FlowSeries(Sequence[GradientFlow]):
    """Flows of one model, oldest first, wherever they are kept: ``History`` in memory, ``Run`` in a file.

    What takes a history takes any of them.  A step is the number of a backward pass.
    """

    __slots__ = ()

    @property
    def notes(self) -> Mapping[str, Series]:
        """What was noted (``watch.note(loss=loss)``), by name."""
        return {}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a flow, ascending."""
        return tuple(dict.fromkeys(flow.event.backward for flow in self))

    def flow(self, step: int) -> GradientFlow:
        """The flow of this step; of several forward calls in it, that of the latest.

        Raises:
            NoFlowError: there is none; the message says which there are.
        """
        return presenter().flow_at(self, step)

    def series(self, key: str, statistic: str = "l2_norm") -> Series:
        """One statistic of one value or parameter over all steps.

        Args:
            key: ``Site.id``, or else the key or torch.fx name of a value, or the full name of a parameter.
            statistic: a field of ``Statistics``, or ``"rms"``.

        Raises:
            SiteNotFoundError: there is no value or parameter of that name.
            OptionError: there is no such statistic.
        """
        return presenter().series_of(self, key, statistic)

    def sampled(self, most: int) -> Sequence[GradientFlow]:
        """At most so many of the flows, evenly spread; the first and the last are among them."""
        return presenter().sampled(self, most)

    def to_html(self, path: str | Path | None = None, **options: Unpack[PageWords]) -> str:
        """An interactive page of the run in one file: a slider over its events, and a heat map of blocks over them.

        It shows all statistics of the latest flow, and the norms of every other one; of more than 20,000 flows an even
        sample.  Also written to ``path`` if given; options as of ``GradientFlow.to_html``.

        Raises:
            OptionError: there is no flow, an unknown option or value, or a norm that was not measured.
            FlowFileError: the file cannot be written.
        """
        return presenter().series_page(self, path, options)

    def show(self, *, height: int = 640, **options: Unpack[PageWords]) -> Displayed:
        """The page for a notebook; see ``GradientFlow.show``."""
        return presenter().shown(self, height, options)

    def to_csv(self, path: str | Path | None = None, *, of: Literal["values", "parameters"] = "values") -> str:
        """A row for each step and value (or parameter); also written to ``path`` if given."""
        text: str = presenter().to_csv(self, of)
        path = path_here(self[-1].ranks if path is not None and len(self) else None, path)
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
        """A heat map of blocks over steps; above it the loss (if noted), the loss side and ``values``; in matplotlib.

        Saved to ``path`` if given.  Of more than 400 flows an even sample is shown.  ``fxgrad plot`` draws it in a
        terminal, too, without matplotlib.

        Raises:
            OptionError: matplotlib is not installed, there is no flow, or ``norm`` is unknown or was not measured.
            SiteNotFoundError: the latest flow has no value of that name.
        """
        shown = self.sampled(_PLOTTED)
        path = path_here(self[-1].ranks if path is not None and len(self) else None, path)
        return presenter().plot_history(shown, path, norm=norm, values=values, notes=self.notes)

    def __str__(self) -> str:
        """A line for each backward pass: what went in at the loss side, what came to the inputs, and NaN or Inf."""
        return presenter().history_text(self)


_PLOTTED = 400  # flows of a heat map: more than it has room for


class History(tuple[GradientFlow, ...], FlowSeries):  # noqa: SLOT001  # it holds its notes
    """A tuple of flows, oldest first, that reads as one line for each of them."""

    _notes: Mapping[str, Series] = MappingProxyType({})
    _unreached: str | None = None

    @property
    def unreached(self) -> str | None:
        """Why there is no flow, where the watched optimizer was stepped all the same; else None."""
        return self._unreached

    @classmethod
    def without_flows(cls, why: str | None) -> History:
        """No flow, and why: ``diagnose`` makes a finding of it."""
        made = cls()
        made._unreached = why
        return made

    @property
    def notes(self) -> Mapping[str, Series]:
        """What was noted (``watch.note(loss=loss)``) at the steps that have a flow, by name."""
        return self._notes

    def with_notes(self, notes: Mapping[str, Series]) -> History:
        """The same flows, with these."""
        made = History(self)
        made._notes = notes
        return made

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
        return History(presenter().flows_of_ranks(self, timeout=timeout, group=group))

    __str__ = FlowSeries.__str__

    def __repr__(self) -> str:
        """How many there are, and which."""
        if not self:
            return "History(no flow yet)"
        first, last = self[0].event.backward, self[-1].event.backward
        return f"History({len(self)} flows of {self[-1].capture.model[:40]}, backward {first} to {last})"
