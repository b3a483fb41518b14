"""The flow: the measured facts of one backward event over the whole graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fxgrad.errors import OptionError
from fxgrad.presenting import Displayed, presenter
from fxgrad.schema.drawing import PageWords, PictureWords, TableWords
from fxgrad.schema.failure import Failure
from fxgrad.schema.findings import Diagnosis, Finding, NotChecked
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.precision import DTYPES, Precision, precision_row
from fxgrad.schema.ranks import Ranks, path_here
from fxgrad.schema.records import BlindSpot, Edge, ModuleCall, ModuleFlow, Node, ParameterRecord, Site
from fxgrad.schema.statistics import Statistics
from fxgrad.schema.values import BufferRecord, LossOp, OptimizerFacts
from fxgrad.schema.words import FrontEnd, Level, NormWord, SiteKind

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table
    from typing_extensions import Unpack

_NAME = 40  # characters of a model's name in the short form


@in_a_line("model", "front_end", "training", "recorder")
@dataclass(frozen=True, slots=True)
class CaptureReport:
    """How the graph was obtained.

    Attributes:
        front_end: which one ran in the measured step.
        reason: why that one, in words.
        asked: whether the forward asked for the value of a tensor (``if``, ``.item()``), so that it may go another way
            for another input.
        refused: what was tried and could not be used, each with its reason in words.
        model: class name of the model.
        training: the model's ``training`` flag during the measured forward.
        torch_version: version of torch that ran it.
        recorder: what put the hooks: ``"python"``; ``"slots"`` where the graph itself computes the statistics.
    """

    front_end: FrontEnd
    reason: str
    model: str
    training: bool
    torch_version: str
    refused: tuple[tuple[str, str], ...] = ()
    asked: bool = False
    recorder: str = "python"


@in_a_line("backward", "forward", "level", "sites", "loss")
@dataclass(frozen=True, slots=True)
class EventInfo:
    """Which backward event was measured.

    Attributes:
        backward: number of the backward event since watching began, from 0.
        forward: number of the forward call that it ran through, from 0.
        loss: how the loss came about, in words.
        level: statistics level.
        sites: ``"edge"`` where the parts that consumers send back were measured too, else ``"node"``.
        values: whether statistics of the values themselves were taken in the forward pass.
        loss_scale: what the loss was multiplied by before the backward, as the scaler said; None without a scaler.
            Gradients are as measured: it is not divided out.
        accumulating: whether parameters had a gradient already when the forward began; None where unknown.
        failed: how the backward pass raised; None for one that ended.  Checks look at flows of those only.
        differentiated: whether a backward pass through the forward was itself recorded (``create_graph``), as that of a
            gradient penalty is: what enters linearly has no second derivative, and gets zeros by construction.
        margins_met: whether the loss was exactly 0 behind a cut-off (triplet, hinge, ranking), so that there is nothing
            to learn from these samples; known in a one-shot call only, a watch does not see the loss.
        loss_ops: what made the loss of the model's outputs, from the loss on, as seen in the first backward pass
            through this graph; empty where unknown, and where the model returned the loss.
    """

    backward: int
    forward: int
    loss: str
    level: Level
    sites: SiteKind = "node"
    values: bool = False
    loss_scale: float | None = None
    accumulating: bool | None = None
    failed: Failure | None = None
    differentiated: bool = False
    margins_met: bool = False
    loss_ops: tuple[LossOp, ...] = ()


class _Judged:
    """What was worked out of a flow; no field, so that flows are compared, copied and written without it."""

    __slots__ = ("_diagnosis",)
    _diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class GradientFlow(_Judged):
    """The measured facts of one backward event over the whole graph.  Immutable and comparable.

    A flow that was reduced over the ranks of a distributed run is on all of them; files are written by rank 0 alone.

    Attributes:
        nodes: every node that returned a tensor, and the output, in the order in which they ran.
        sites: every floating or complex tensor that a node returned, in that order, measured or not.
        edges: which value goes from which node to which.
        parameters: one record per parameter.
        blind_spots: everything without a measured gradient, with its reason.
        calls: the module calls, in the order in which they returned.
        capture: which front end ran, and why.
        event: which backward event this is.
        buffers: the floating buffers as the forward found them, where forward statistics were asked for.
        optimizer: the optimizer that was given to ``watch``.
        ranks: of a flow that was reduced over the ranks of a distributed run, what each had to do with it; else None.
    """

    nodes: tuple[Node, ...]
    sites: tuple[Site, ...]
    edges: tuple[Edge, ...]
    parameters: tuple[ParameterRecord, ...]
    blind_spots: tuple[BlindSpot, ...]
    capture: CaptureReport
    event: EventInfo
    calls: tuple[ModuleCall, ...] = field(default=())
    buffers: tuple[BufferRecord, ...] = ()
    optimizer: OptimizerFacts | None = None
    ranks: Ranks | None = None

    def __iter__(self) -> Iterator[Site]:
        """The sites, in forward order."""
        return iter(self.sites)

    def __len__(self) -> int:
        """Number of sites."""
        return len(self.sites)

    def site(self, name: str) -> Site:
        """The node site with this id (``"lstm[0]"``), or else this key or torch.fx name.

        Raises:
            fxgrad.errors.SiteNotFoundError: there is none; the message lists near names.
        """
        return presenter().find_site(self, name)

    def modules(self) -> tuple[ModuleFlow, ...]:
        """Gradient in, gradient out and gain of every module call, by full path, in forward order."""
        return presenter().module_flows(self)

    def precision(
        self, dtypes: Sequence[str] = DTYPES, *, of: Literal["gradients", "parameters", "values"] = "gradients",
        scale: float | None = None,
    ) -> Precision:  # fmt: skip
        """Each gradient against the dtype that it has and those that it could have; prints as a table.

        Exact with ``statistics="histogram"`` for limits that are powers of two, else bounds (``Statistics.fits``).

        Args:
            dtypes: to ask about.
            of: the gradients of the values, those of the parameters, or the values themselves (``forward=True``).
            scale: the loss scale to suppose; None: the one under which the gradients were measured.  Values are
                multiplied by it as they are.

        Raises:
            OptionError: a dtype or ``of`` is not known, or the scale is not a positive number.
        """
        if of not in ("gradients", "parameters", "values"):
            message = f"of={of!r} is not known; it is 'gradients', 'parameters' or 'values'"
            raise OptionError(message)
        measured = (1.0 if of == "values" else self.event.loss_scale) or 1.0
        factor = 1.0 if scale is None else scale / measured
        named: list[tuple[str, str, Statistics | None]]
        if of == "parameters":
            named = [(record.name, record.dtype, record.statistics) for record in self.parameters]
        else:
            named = [(s.id, s.dtype, s.value if of == "values" else s.statistics) for s in self.sites]
        return Precision(precision_row(name, dtype, s, dtypes, factor) for name, dtype, s in named if s is not None)

    def unscaled(self) -> GradientFlow:
        """The same with the loss scale divided out of all norms, sums and extrema, for reading and comparing.

        The flow itself where no scale is known.  Rules judge what was measured: diagnose the flow, not this.
        """
        scale = self.event.loss_scale
        if scale is None or scale == 1.0:
            return self
        event = replace(self.event, loss_scale=1.0)
        return replace(
            self, event=event, sites=_divided(self.sites, scale), edges=_divided(self.edges, scale),
            parameters=_divided(self.parameters, scale),
        )  # fmt: skip

    @property
    def diagnosis(self) -> Diagnosis:
        """What the rules say of this one flow, with the default thresholds; worked out at the first access."""
        try:
            return self._diagnosis
        except AttributeError:
            found: Diagnosis = presenter().diagnose(self)
            object.__setattr__(self, "_diagnosis", found)
            return found

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The ranked findings of ``diagnosis``."""
        return self.diagnosis.findings

    @property
    def not_checked(self) -> tuple[NotChecked, ...]:
        """The rules that could not be judged, and what they lack."""
        return self.diagnosis.not_checked

    def to_networkx(self) -> nx.DiGraph[str]:
        """A DiGraph with one node per graph node and all statistics as plain attributes (GraphML-ready)."""
        return presenter().to_networkx(self)

    def to_dot(self, path: str | Path | None = None, **options: Unpack[PictureWords]) -> str:
        """Graphviz DOT text (options: see ``fxgrad.schema.PictureWords``), also written to ``path`` if given.

        ``findings`` are those of this flow unless others are given (those of a series, or ``()`` for none).
        """
        return presenter().to_dot(self, path_here(self.ranks, path), self._with_findings(options))

    def to_svg(self, path: str | Path | None = None, **options: Unpack[PictureWords]) -> str:
        """The picture as SVG text, also written to ``path`` if given; options as for ``to_dot``."""
        return presenter().flow_svg(self, path_here(self.ranks, path), self._with_findings(options))

    def to_html(self, path: str | Path | None = None, **options: Unpack[PageWords]) -> str:
        """An interactive page in one file, opened without a network; also written to ``path`` if given.

        Options: see ``fxgrad.schema.PageWords``.

        Raises:
            OptionError: an unknown option or value, or a norm that was not measured at this level.
            FlowFileError: the file cannot be written.
        """
        given = {"findings": self.diagnosis} if options.get("findings") is None else {}
        return presenter().flow_page(self, path_here(self.ranks, path), {**options, **given})

    def show(self, *, height: int = 640, **options: Unpack[PageWords]) -> Displayed:
        """The page for a notebook: what it displays as the last value of a cell, or by ``display(...)``.

        A sandboxed frame in which the page's script runs, of this height in CSS pixels; no widget server, no network.
        Where a viewer allows no frame or no script, the picture is seen.  Options as of ``to_html``.

        Raises:
            OptionError: the height is none, or an option is unknown.
        """
        return presenter().shown(self, height, options)

    def to_json(self, path: str | Path | None = None) -> str:
        """Versioned strict JSON, also written to ``path`` if given."""
        return presenter().to_json(self, path_here(self.ranks, path))

    def to_csv(self, path: str | Path | None = None, *, of: Literal["values", "parameters"] = "values") -> str:
        """A row for each value (or parameter) and a column for each statistic; also written to ``path`` if given."""
        text: str = presenter().to_csv([self], of)
        path = path_here(self.ranks, path)
        if path is not None:
            presenter().write_whole(Path(path), text)
        return text

    def to_pandas(self, *, of: Literal["values", "parameters"] = "values") -> pd.DataFrame:
        """The same as a frame (needs pandas), for ``to_parquet`` and plots of your own.

        Raises:
            OptionError: pandas is not installed, or ``of`` is unknown.
        """
        return presenter().to_pandas([self], of)

    def plot(self, path: str | Path | None = None, *, norm: NormWord = "l2_norm") -> Figure:
        """The depth profile as a matplotlib figure: norm against depth on a log scale; saved to ``path`` if given.

        Raises:
            OptionError: matplotlib is not installed, or ``norm`` is unknown or was not measured.
        """
        return presenter().plot_flow(self, path_here(self.ranks, path), norm=norm)

    def table(self, **options: Unpack[TableWords]) -> Table:
        """A rich table in backward order with the drops that matter and the culprits of findings marked."""
        return presenter().table(self, **self._with_findings(options))

    def _with_findings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given = options.get("findings")
        return {**options, "findings": self.findings if given is None else given}

    def __repr__(self) -> str:
        """The model, how many values there are and were measured, and which backward pass it was."""
        measured = sum(site.measured for site in self.sites)
        model = self.capture.model if len(self.capture.model) <= _NAME else f"{self.capture.model[:_NAME]}…"
        return f"GradientFlow({model}: {measured} of {len(self)} values measured, backward {self.event.backward})"

    def __str__(self) -> str:
        """The answer in words: verdict, findings, and a profile of the model, as wide as the terminal."""
        return presenter().flow_text(self)

    def __rich__(self) -> RenderableType:
        """What rich prints for a flow: the words of ``str``, in colour."""
        return presenter().report(self, self.findings)

    def _repr_html_(self) -> str:
        """What a notebook shows: the picture and the profile, or the words alone where Graphviz is missing."""
        return presenter().notebook_html(self, self.diagnosis)


def _divided(records: Sequence[Any], scale: float) -> tuple[Any, ...]:
    return tuple(
        record if record.statistics is None else replace(record, statistics=record.statistics.divided(scale))
        for record in records
    )


class Sink(Protocol):
    """What a probe calls with a gradient."""

    def __call__(self, site: int, gradient: Any) -> Any | None:
        """Take the ``gradient`` (a tensor) of the site with this number.

        Returns None to leave the gradient alone, or a replacement of the same shape, dtype and device.
        """
        ...
