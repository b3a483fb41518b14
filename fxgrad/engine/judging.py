"""When the flows of a run are judged while it runs: at once where something is not finite, else now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from fxgrad.diagnosis import diagnose
from fxgrad.schema import Finding, GradientFlow

__all__ = ["Judge"]

_SERIES = 8  # flows that are judged together, the latest last: checks that need a series need a few of them
_SHARE = 1 / 500  # of the time may be spent on it, where nothing is wrong at first sight


class Judge:
    """Looks at the flows of one run, one after the other."""

    def __init__(self) -> None:
        self._recent: deque[Callable[[], GradientFlow]] = deque(maxlen=_SERIES)
        self._known: set[tuple[str, str]] = set()
        self._began = time.monotonic()
        self._spent = 0.0
        self._was_bad = False

    def told(self, findings: Iterable[Finding]) -> None:
        """Findings that came from elsewhere."""
        self._known.update((finding.rule, finding.place) for finding in findings)

    def look(self, flow: Callable[[], GradientFlow] | None, *, bad: bool = False, last: bool = False) -> list[Finding]:
        """What is found now that was not before, by rule and place.

        Args:
            flow: gives the flow of the event that came; None where none did.
            bad: whether something is not finite in it.
            last: whether the run is over.
        """
        became_bad, self._was_bad = bad and not self._was_bad, bad
        if flow is not None:
            self._recent.append(flow)
        now = time.monotonic()
        if not self._recent or not (last or became_bad or self._spent <= (now - self._began) * _SHARE):
            return []
        series = tuple(make() for make in self._recent)
        found = (series[0].diagnosis if len(series) == 1 else diagnose(series)).findings
        self._spent += time.monotonic() - now
        fresh = [finding for finding in found if (finding.rule, finding.place) not in self._known]
        self.told(fresh)
        return fresh
