"""A step of a training run in one line: step, loss, worst gradient, findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from fxgrad.render.findings import at, severity_counts
from fxgrad.render.scale import scale_of
from fxgrad.render.words import look_of, norm_words, number, printable
from fxgrad.schema import Finding, GradientFlow, LogEntry, Site

__all__ = ["StatusLine", "status_text", "worst"]

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}


def worst(flow: GradientFlow) -> Site | None:
    """The value whose gradient is farthest from ordinary: not finite, else farthest from that at the loss side."""
    measured = [site for site in flow.sites if site.statistics is not None]
    size = scale_of(flow)

    def distance(site: Site) -> float:
        look = look_of(site.statistics)
        if look in ("nonfinite", "outside_range"):
            return math.inf
        return 0.0 if look == "zero" or site.statistics is None else abs(size.decades(site.statistics.l2_norm))

    # Of several the one nearest to the loss, where a NaN came in first.
    return max(reversed(measured), key=distance, default=None)


def status_text(entry: LogEntry) -> Text:
    """``step 150  loss 0.31  worst gradient 2.1e-09 (x4e-09) at fc1  1 error: vanishing at fc1``, in colour."""
    return Text("  ").join(_parts(entry))


def _parts(entry: LogEntry) -> Iterator[Text]:
    yield Text(f"step {entry.step}", "bold")
    for name, value in entry.notes.items():
        yield Text(printable(f"{name} {number(value)}"))
    site = worst(entry.flow)
    if site is None or site.statistics is None:
        yield Text("no gradient measured")
    else:
        size = scale_of(entry.flow).words(site.statistics.l2_norm)
        times = f" ({size})" if size and look_of(site.statistics) == "measured" else ""
        yield Text(printable(f"worst gradient {norm_words(site.statistics, 'l2_norm')}{times} at {site.id}"))
    bad = [finding for finding in entry.diagnosis.findings if finding.severity != "info"]
    yield _findings(bad) if bad else Text("nothing wrong found", "green")


def _findings(bad: list[Finding]) -> Text:
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return Text(printable(f"{severity_counts(bad)}: {bad[0].rule} {at(bad[0])}{more}"), _STYLES[bad[0].severity])


class StatusLine:
    """A ``fxgrad.schema.Log`` that prints each entry as one line.

    Args:
        console: where; None for standard error, so that the output of a program stays what it is.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console

    def write(self, entry: LogEntry) -> None:
        """Print it; on a terminal in place of a progress bar in this line, which draws itself again below."""
        if self._console.is_terminal:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._console.print(status_text(entry), no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(status_text(entry), soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""
