"""What became of a model's gradient from one flow to another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxgrad.presenting import Displayed, presenter
from fxgrad.schema.drawing import PageWords, PictureWords
from fxgrad.schema.findings import Finding
from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.history import FlowSeries
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.words import NormWord

if TYPE_CHECKING:
    from typing_extensions import Unpack


@in_a_line("id", "before", "after", "ratio")
@dataclass(frozen=True, slots=True)
class Change:
    """The gradient of one value in both flows.

    Attributes:
        id: of the site.
        before, after: its norm; None where it was not measured.
        ratio: ``after / before``; None where one of them is not measured, not finite or 0.
        source: ``file:line`` in the second flow, or else in the first.
    """

    id: str
    before: float | None
    after: float | None
    ratio: float | None
    source: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two flows of one model, side by side.  Made by ``fxgrad.compare``.

    Attributes:
        before, after: the flows.
        norm: which norm the numbers mean.
        changes: the values that are in both, those that changed most first.
        gone: findings of the first flow that the second one does not have, by rule and place.
        new: findings that only the second one has.
        left: findings of the second flow that the first one has, too.
        removed, added: ids of the sites that only the first or only the second flow has.
        runs: the two runs, where runs were compared; then ``before`` and ``after`` are their flows of the latest step
            that both have.
    """

    before: GradientFlow
    after: GradientFlow
    norm: NormWord
    changes: tuple[Change, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    left: tuple[Finding, ...]
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    runs: tuple[FlowSeries, FlowSeries] | None = None

    @property
    def worse(self) -> bool:
        """Whether the second flow has an error or a warning that the first one does not have."""
        return any(finding.severity != "info" for finding in self.new)

    def to_svg(self, path: str | Path | None = None, **options: Unpack[PictureWords]) -> str:
        """The second flow as SVG text, coloured by what became of each gradient; also written to ``path`` if given.

        Neutral is as large as in the first flow, blue is smaller and red is larger.  Options as of
        ``GradientFlow.to_svg``; ``findings`` are those of the second flow unless others are given.
        """
        return presenter().comparison_svg(self, path, options)

    def to_html(self, path: str | Path | None = None, **options: Unpack[PageWords]) -> str:
        """The interactive page of the second flow, coloured by what became of each gradient, changed most first.

        Of two runs, with a slider over the steps that both have.  Also written to ``path`` if given; options as of
        ``GradientFlow.to_html``.

        Raises:
            OptionError: an unknown option or value, or a norm that was not measured.
            FlowFileError: the file cannot be written.
        """
        return presenter().comparison_page(self, path, options)

    def show(self, *, height: int = 640, **options: Unpack[PageWords]) -> Displayed:
        """The page for a notebook; see ``GradientFlow.show``."""
        return presenter().shown(self, height, options)

    def __repr__(self) -> str:
        """How many findings are gone, new and left."""
        counts = f"{len(self.gone)} findings gone, {len(self.new)} new, {len(self.left)} left"
        return f"Comparison({self.after.capture.model[:40]}: {counts})"

    def __str__(self) -> str:
        """What changed, in lines: findings first, then the values that changed most."""
        return presenter().comparison_text(self)
