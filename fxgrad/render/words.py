"""How numbers, shapes and special gradients are put in words, the same in text and pictures."""

from __future__ import annotations

import math
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from fxgrad.errors import OptionError
from fxgrad.schema import GradientFlow, NormWord, Rewritten, Site, Statistics

_NEED_NONE = ("no_grad_required", "integer")
NORMS: tuple[NormWord, ...] = ("l2_norm", "rms", "max_abs")
#: What a gradient is, beyond its norm; each kind has its own look.
Look = Literal["measured", "zero", "nonfinite", "outside_range", "not_measured"]


def check_norm(flow: GradientFlow, norm: str) -> NormWord:
    """``norm`` as one of the norms that the flow's level fills.

    Raises:
        OptionError: an unknown norm, or one that was not measured at this level.
    """
    if norm not in NORMS:
        message = f"norm={norm!r} is not known; it is one of {', '.join(map(repr, NORMS))}"
        raise OptionError(message)
    if norm == "max_abs" and flow.event.level == "norm":
        message = "norm='max_abs' was not measured in this flow; measure with statistics='full'"
        raise OptionError(message)
    return next(known for known in NORMS if known == norm)


def look_of(statistics: Statistics | None) -> Look:
    """Which kind of gradient the statistics show."""
    if statistics is None:
        return "not_measured"
    if statistics.nonfinite:
        return "nonfinite"
    if statistics.outside_range:
        return "outside_range"
    return "zero" if statistics.all_zero else "measured"


def number(value: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.3g}"


def norm_words(statistics: Statistics | None, norm: NormWord) -> str:
    """The norm of a gradient, and what is special about it."""
    look = look_of(statistics)
    if statistics is None:
        return "not measured"
    if look == "nonfinite":
        counts = [f"{n} {word}" for n, word in ((statistics.nan_count, "NaN"), (statistics.inf_count, "Inf")) if n]
        return ", ".join(counts) or "NaN"
    if look == "outside_range":
        side = "below" if statistics.l2_norm == 0 else "above"
        return f"{number(statistics.l2_norm)} ({side} float32's range)"
    if look == "zero":
        return "0 (all zero)"
    return number(statistics.norm(norm))


def rewritten_words(site: Site, norm: NormWord) -> str:
    """What rewrite rules made of a site's gradient, and which ones; empty where none stands."""
    if site.rewritten is None:
        return ""
    after = "did not run" if site.rewritten.after is None else f"-> {norm_words(site.rewritten.after, norm)}"
    return f"rewritten {after} by {rule_words(site.rewritten)}"


def before_after(rewritten: Rewritten, norm: NormWord) -> str:
    """``2 -> 1``: the norm that came to the rules and the one that went on, or why they are not known."""
    if rewritten.before is None or rewritten.after is None:
        return rewritten.reason or "not measured"
    return f"{norm_words(rewritten.before, norm)} -> {norm_words(rewritten.after, norm)}"


def way_words(rewritten: Rewritten, norm: NormWord) -> str:
    """The same with the name of the norm."""
    words = before_after(rewritten, norm)
    return words if rewritten.before is None or rewritten.after is None else f"{norm} {words}"


def audit_lines(rewritten: Rewritten) -> list[str]:
    """What each of the rules did, where it was counted."""
    lines = []
    for place, name in enumerate(rewritten.rules if rewritten.norms_after else ()):
        before, after = rewritten.norms_before[place], rewritten.norms_after[place]
        if after is not None:
            words = f"changed {rewritten.changed[place]} entries, l2_norm {number(before)} -> {number(after)}"
            lines.append(f"{name}: fired {rewritten.fired[place]} of {rewritten.ran[place]}, {words}")
    return lines


def rule_words(rewritten: Rewritten) -> str:
    """The rules of a site, edge or parameter, and how many entries they changed where that was counted."""
    changed = [count for count in rewritten.changed if count is not None]
    words = f" ({sum(changed)} entries changed)" if changed else ""
    return ", ".join(rewritten.rules) + words


def rewritten_counts(flow: GradientFlow) -> str:
    """``2 edges, 1 parameter`` where rules stand, besides the sites; empty where none do."""
    counts = {
        "edge": sum(edge.rewritten is not None for edge in flow.edges),
        "parameter": sum(record.rewritten is not None for record in flow.parameters),
    }
    return ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for word, count in counts.items() if count)


def shape_words(site: Site) -> str:
    """``8x64x32x32 float32``; ``scalar`` for no dimensions."""
    return f"{'x'.join(map(str, site.shape)) or 'scalar'} {site.dtype}"


def short_source(source: str | None) -> str:
    """``resnet.py:92`` of a full path and line."""
    return "" if source is None else source.replace("\\", "/").rpartition("/")[2]


def blind_counts(flow: GradientFlow) -> str:
    """``3 detached, 1 frozen``, most frequent first: values that lack a gradient; those that need none do not count."""
    spots = [spot for spot in flow.blind_spots if spot.consumer is None and spot.reason not in _NEED_NONE]
    counts = Counter(spot.reason.replace("_", " ") for spot in spots)
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item)))


def printable(words: str) -> str:
    """``words`` in which nothing steers the terminal: control characters are shown as their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def tool_version() -> str | None:
    """The version of the installed fxgrad; None where it runs from a folder that is not installed."""
    try:
        return version("fxgrad")
    except PackageNotFoundError:
        return None
