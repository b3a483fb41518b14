"""What ``str`` gives of a site and of a history: a few lines to read."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.graph import backward_order
from fxgrad.render.ranks import spread_line
from fxgrad.render.report import text_width
from fxgrad.render.scale import scale_of
from fxgrad.render.words import look_of, norm_words, number, printable, rewritten_words, shape_words, short_source
from fxgrad.schema import GradientFlow, Site

__all__ = ["flow_line", "history_text", "site_text"]

_SHOWN = 30  # flows of a history


def site_text(site: Site) -> str:
    """The site's name and what made it, its gradient, and its value."""
    made = site.node.module_type if site.op == "call_module" else site.target
    where = f", {short_source(site.source)}" if site.source else ""
    lines = [f"{site.id}: {shape_words(site)}, by {made}{where}"]
    found = site.statistics
    if found is None:
        lines.append("gradient: not measured")
    else:
        words = [f"l2_norm {norm_words(found, 'l2_norm')}", f"rms {number(found.rms)}"]
        if found.max_abs is not None:
            words.append(f"max_abs {number(found.max_abs)}")
        if found.zero_count:
            words.append(f"{found.zero_count} of {found.numel} zero")
        lines.append(f"gradient: {', '.join(words)}")
    if site.rewritten is not None:
        lines.append(rewritten_words(site, "l2_norm"))
    if site.value is not None:
        lines.append(f"value: l2_norm {norm_words(site.value, 'l2_norm')}, rms {number(site.value.rms)}")
    if site.spread is not None:
        lines.append(spread_line(site.spread))
    return "\n".join(map(printable, lines))


def history_text(flows: Sequence[GradientFlow]) -> str:
    """A line for each flow: its number, the norm at the loss side and at the inputs, and what is not finite."""
    if not flows:
        return "no flow yet"
    lines = [f"{len(flows)} flows of {flows[-1].capture.model}, oldest first (l2_norm)"]
    lines += [f"backward {flow.event.backward}: {flow_line(flow)}" for flow in flows[-_SHOWN:]]
    width = text_width()
    cut = [line if len(line) <= width else f"{line[: width - 1]}…" for line in map(printable, lines)]
    return "\n".join([*cut, f"and {len(flows) - _SHOWN} before" if len(flows) > _SHOWN else ""]).rstrip()


def flow_line(flow: GradientFlow) -> str:
    """The norm at the loss side and at the inputs of one flow, and what is not finite."""
    size = scale_of(flow)
    measured = [site for site in backward_order(flow) if look_of(site.statistics) == "measured"]
    bad = sum(look_of(site.statistics) == "nonfinite" for site in flow.sites)
    words = [f"{number(size.reference) if size.relative else '-'} at the loss side"]
    if measured:
        words.append(f"{number(measured[-1].l2_norm)} at {measured[-1].id}")
    if bad:
        words.append(f"{bad} values with NaN or Inf")
    return ", ".join(words)
