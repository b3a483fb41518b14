"""The findings of a watch as they come: limits that are judged in each backward pass, and who is told."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxgrad.diagnosis import Evidence, FlowView, Thresholds
from fxgrad.diagnosis.backward_failed import backward_failed
from fxgrad.diagnosis.limits import Limit, beyond
from fxgrad.errors import FindingWarning, OptionError
from fxgrad.record.distributed import is_distributed
from fxgrad.record.reading import read_gradients
from fxgrad.record.recorder import HISTORY, EventRecord
from fxgrad.schema import Finding, GradientFlow
from fxgrad.schema.ranks import rank_here
from fxgrad.torch_support.private import at_end_of_backward, current_backward

OnFinding = Callable[[Finding], Any]
_ROUNDS = 2  # torch's end-of-backward callbacks that let others, which queue again from there, come first


def checked_listener(on_finding: Any) -> OnFinding | None:
    """The ``on_finding`` of a watch.

    Raises:
        OptionError: it cannot be called.
    """
    if on_finding is not None and not callable(on_finding):
        message = f"on_finding= takes a function of a finding, but got {type(on_finding).__name__}"
        raise OptionError(message)
    listener: OnFinding | None = on_finding
    return listener


class Alarms:
    """Judges the limits at the end of each backward pass, and tells of findings.

    What a listener raises is raised at the very end of the backward pass, when every gradient is complete and all else
    that waits for that end has been done.

    Args:
        limits: by statistics word.
        on_finding: told of each alarm, and of each finding that was not reported before; None: alarms are warnings.
        flow_of: the flow of an event.
        scale_of: the loss scale of the event with this number.
    """

    def __init__(
        self, limits: Mapping[str, float], on_finding: OnFinding | None, flow_of: Callable[[EventRecord], GradientFlow],
        scale_of: Callable[[int], float | None],
    ) -> None:  # fmt: skip
        self.latest: deque[Finding] = deque(maxlen=HISTORY)
        self._limits = limits
        self._on_finding = on_finding
        self._flow_of = flow_of
        self._scale_of = scale_of
        self._reported: set[tuple[str, str]] = set()
        self._errors: list[Exception] = []
        #: Told of each alarm, and of what ``report`` is given, besides the listener.
        self.noted: Callable[[Finding], None] = lambda _: None

    def ended(self, event_record: list[EventRecord]) -> None:
        """A backward pass has ended, or raised some time ago: judge what was kept of it.

        One copy to the host, a second one for an alarm.
        """
        parts = [part for part in event_record if part.forward_record.call_graph is not None]
        try:
            found = self._failed(parts) if event_record[0].raised is not None else self._judged(parts)
        except Exception as error:  # noqa: BLE001  # the user's backward must go on
            self._try(self._warn, f"limits could not be judged: {type(error).__name__}: {error}")
            found = []
        for finding in found:
            self.latest.append(finding)
            self._reported.add((finding.rule, finding.place))
            self.noted(finding)
            if self._on_finding is None:
                self._try(self._warn, finding.message)
            else:
                self._try(self._on_finding, finding)
        self._raise(_ROUNDS)

    def _failed(self, parts: list[EventRecord]) -> list[Finding]:
        """A pass that raised: no limit is judged on the half of it that came."""
        views = [FlowView(self._flow_of(part)) for part in parts]
        return list(backward_failed(Evidence([], Thresholds(), views)))

    def _judged(self, parts: list[EventRecord]) -> list[Finding]:
        if not parts:
            return []
        scale = self._scale_of(parts[0].event) or 1.0
        limits = [Limit(word, most, scale) for word, most in self._limits.items()]
        own = parts[0].parameters
        everything = [one for part in read_gradients([*parts, *([] if own is None else [own])]) for one in part]
        found = []
        for limit in limits:
            if any(map(limit.exceeded, everything)):
                # The latest forward call is the nearest to the loss.
                findings = (beyond(self._flow_of(part), limit) for part in reversed(parts))
                found.append(next((finding for finding in findings if finding is not None), None))
        return [finding for finding in found if finding is not None]

    def report(self, findings: Iterable[Finding]) -> None:
        """Tell of the findings that were not reported before, by rule and place.

        Raises:
            Exception: what ``on_finding`` raised first, once it was told of all.
        """
        for finding in findings:
            key = (finding.rule, finding.place)
            if key not in self._reported:
                self._reported.add(key)
                self.noted(finding)
                if self._on_finding is not None:
                    self._try(self._on_finding, finding)
        self._raise(0)

    @staticmethod
    def _warn(message: str) -> None:
        who = f"rank {rank_here()}: " if is_distributed() else ""  # only the rank that it happens on knows of it
        warnings.warn(f"{who}{message}", FindingWarning, stacklevel=2)

    def _try(self, function: Callable[[Any], Any], given: Any) -> None:
        try:
            function(given)
        except Exception as error:  # noqa: BLE001  # raised in the end
            self._errors.append(error)

    def _raise(self, rounds: int) -> None:
        if not self._errors or (rounds and at_end_of_backward(lambda: self._raise(rounds - 1))):
            return
        if rounds and current_backward() >= 0:  # torch announces no end: at the next occasion
            return
        error, self._errors = self._errors[0], []
        raise error
