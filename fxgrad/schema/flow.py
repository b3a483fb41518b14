"""The flow: the measured facts of one backward event over the whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fxgrad.schema.failure import Failure
from fxgrad.schema.findings import Diagnosis, Finding, NotChecked
from fxgrad.schema.late import late as _late
from fxgrad.schema.records import BlindSpot, Edge, ModuleCall, ModuleFlow, Node, ParameterRecord, Site
from fxgrad.schema.values import BufferRecord, OptimizerFacts
from fxgrad.schema.words import FrontEnd, Level, SiteKind

if TYPE_CHECKING:
    import networkx as nx
    from rich.table import Table


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


class _Judged:
    """What was worked out of a flow; no field, so that flows are compared, copied and written without it."""

    __slots__ = ("_diagnosis",)
    _diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class GradientFlow(_Judged):
    """The measured facts of one backward event over the whole graph.  Immutable and comparable.

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
        found: Site = _late("fxgrad.graph", "find_site")(self, name)
        return found

    def modules(self) -> tuple[ModuleFlow, ...]:
        """Gradient in, gradient out and gain of every module call, by full path, in forward order."""
        found: tuple[ModuleFlow, ...] = _late("fxgrad.graph", "module_flows")(self)
        return found

    @property
    def diagnosis(self) -> Diagnosis:
        """What the rules say of this one flow, with the default thresholds; worked out at the first access."""
        try:
            return self._diagnosis
        except AttributeError:
            found: Diagnosis = _late("fxgrad.diagnosis", "diagnose")(self)
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
        graph: nx.DiGraph[str] = _late("fxgrad.graph", "to_networkx")(self)
        return graph

    def to_dot(self, path: str | Path | None = None, **options: Any) -> str:
        """Graphviz DOT text (see ``fxgrad.render.dot.PictureOptions``), also written to ``path`` if given.

        ``findings`` are those of this flow unless others are given (those of a series, or ``()`` for none).
        """
        text: str = _late("fxgrad.render.dot", "to_dot")(self, path, **self._with_findings(options))
        return text

    def to_svg(self, path: str | Path | None = None, **options: Any) -> str:
        """The picture as SVG text, also written to ``path`` if given; options as for ``to_dot``."""
        text: str = _late("fxgrad.render.svg", "to_svg")(self, path, **self._with_findings(options))
        return text

    def to_json(self, path: str | Path | None = None) -> str:
        """Versioned strict JSON, also written to ``path`` if given."""
        text: str = _late("fxgrad.store", "to_json")(self, path)
        return text

    def table(self, **options: Any) -> Table:
        """A rich table in backward order with the drops that matter and the culprits of findings marked."""
        found: Table = _late("fxgrad.render.text", "table")(self, **self._with_findings(options))
        return found

    def _with_findings(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.get("findings")
        return options | {"findings": self.findings if given is None else given}

    def __rich__(self) -> Table:
        """What rich prints for a flow: its table."""
        return self.table()

    def _repr_html_(self) -> str:
        """What a notebook shows for a flow: the picture, or the table where Graphviz is missing, and the findings."""
        text: str = _late("fxgrad.render.svg", "notebook_html")(self, self.diagnosis)
        return text


class Sink(Protocol):
    """What a probe calls with a gradient."""

    def __call__(self, site: int, gradient: Any) -> Any | None:
        """Take the ``gradient`` (a tensor) of the site with this number.

        Returns None to leave the gradient alone, or a replacement of the same shape, dtype and device.
        """
        ...
