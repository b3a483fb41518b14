"""Two flows of one model side by side: before and after a fix, or two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxgrad.errors import OptionError
from fxgrad.schema import Change, Comparison, Finding, FlowSeries, GradientFlow, NormWord, Site

__all__ = ["compare"]

_NORMS = ("l2_norm", "rms", "max_abs")


def compare(
    before: GradientFlow | FlowSeries, after: GradientFlow | FlowSeries, *, norm: NormWord = "l2_norm"
) -> Comparison:
    """What became of the gradient of every value, and of every finding; values are matched by their id.

    Args:
        before: a flow, or a run: a history, or what ``open_run`` gives.
        after: another one, of the same model or of one that was changed.  Of runs, the flows of the latest step that
            both have are compared; ``to_html`` shows the other ones as well.
        norm: ``"l2_norm"``, ``"rms"`` or ``"max_abs"``, in the units of the gradient.

    Raises:
        OptionError: these are no flows, they have no value or step in common, or ``norm`` is unknown.
    """
    if isinstance(before, FlowSeries) and isinstance(after, FlowSeries):
        step = _latest_in_both(before.steps, after.steps)
        return replace(compare(before.flow(step), after.flow(step), norm=norm), runs=(before, after))
    if norm not in _NORMS:
        message = f"norm={norm!r} is not known; it is one of {', '.join(map(repr, _NORMS))}"
        raise OptionError(message)
    return _compared(_flow("before", before), _flow("after", after), norm)


def _flow(name: str, given: object) -> GradientFlow:
    if not isinstance(given, GradientFlow):
        message = (
            f"{name} must be a flow, such as fxgrad.gradient_flow or fxgrad.load return, but is {given!r:.80}; "
            "two runs can be compared as well"
        )
        raise OptionError(message)
    return given


def _compared(before: GradientFlow, after: GradientFlow, norm: NormWord) -> Comparison:
    first = {site.id: site for site in before.sites}
    second = {site.id: site for site in after.sites}
    both = [name for name in second if name in first]
    if not both:
        message = (
            f"the flows of {before.capture.model} and {after.capture.model} have no value in common; "
            "compare flows of one model, or of one that was changed a little"
        )
        raise OptionError(message)
    changes = sorted((_change(first[name], second[name], norm) for name in both), key=_size, reverse=True)
    known, found = _by_place(before), _by_place(after)
    return Comparison(
        before,
        after,
        norm,
        tuple(changes),
        gone=tuple(one for place, one in known.items() if place not in found),
        new=tuple(one for place, one in found.items() if place not in known),
        left=tuple(one for place, one in found.items() if place in known),
        removed=tuple(name for name in first if name not in second),
        added=tuple(name for name in second if name not in first),
    )


def _latest_in_both(one: Sequence[int], two: Sequence[int]) -> int:
    both = set(one).intersection(two)
    if not both:
        spans = " and ".join(f"{steps[0]} to {steps[-1]}" if steps else "none" for steps in (one, two))
        message = f"the runs have no step in common (steps {spans}); compare two of their flows, run.flow(step)"
        raise OptionError(message)
    return max(both)


def _by_place(flow: GradientFlow) -> dict[tuple[str, str], Finding]:
    return {(one.rule, one.place): one for one in flow.findings}


def _change(before: Site, after: Site, norm: NormWord) -> Change:
    one, two = _value(before, norm), _value(after, norm)
    ratio = two / one if one and two and math.isfinite(one) and math.isfinite(two) else None
    return Change(after.id, one, two, ratio, after.source or before.source)


def _value(site: Site, norm: NormWord) -> float | None:
    found = site.statistics
    if found is None:
        return None
    return math.nan if found.nonfinite else found.norm(norm)


def _size(change: Change) -> float:
    """How many decades a gradient moved; what began or ceased to be an ordinary number comes first."""
    if change.ratio is not None:
        return abs(math.log10(change.ratio))
    same = change.before == change.after or (_odd(change.before) and _odd(change.after))
    return -1.0 if same else math.inf


def _odd(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
