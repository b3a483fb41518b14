"""Forward statistics under the native observer: which values Python has to look at, and what it finds there.

The statistics themselves are taken in C++ as each operator ends, and the active units of activations counted there.
Python counts those of activations with settings, and takes what the loops in C++ do not.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.capture.activations import from_settings, gate_of
from fxgrad.capture.captured import CallGraph
from fxgrad.record.values import ForwardValues, Units

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord
    from fxgrad.record.native import Written

TAKE, SHOW = 4, 8  # as the extension marks what it takes the statistics of, and what it shows to Python


def wanted(
    call_graph: CallGraph, slots: Sequence[Sequence[int]], make: Callable[..., Any]
) -> tuple[dict[int, int], dict[int, Any]]:
    """By value, whether its statistics are taken and whether Python looks at it; and the gates that C++ counts by.

    ``make``: the extension's ``Gate``.
    """
    found, gates = {}, {}
    for value, sites in enumerate(slots):
        if sites:
            gate = gate_of(call_graph.calls, call_graph.sites[sites[0]].call)
            simple = None if gate is None else gate.simple
            if simple is not None:
                gates[value] = make(*simple)
            found[value] = TAKE | (SHOW if gate is not None and simple is None else 0)
    return found, gates


def unfit(
    call_graph: CallGraph, noted: Sequence[tuple[int, int]], first_values: Sequence[int],
    ranges: Sequence[tuple[int, int]], same: Container[int],
) -> str | None:  # fmt: skip
    """Why the values of such a forward cannot be measured by the native observer; None where they can.

    ``noted``: pairs of value and site; ``first_values``: by operator; ``ranges``: by call, its operators;
    ``same``: sites that are the very tensor of another.
    """
    for value, site in noted:
        call = call_graph.sites[site].call
        if call_graph.calls[call].op not in ("placeholder", "external") and (
            bisect.bisect_right(first_values, value) - 1 < ranges[call][0]
        ):
            return f"{call_graph.calls[call].key_stem} changed a value in a way that no operator returns"
    seen = {site for _, site in noted}
    for site, spec in enumerate(call_graph.sites):
        if site not in seen and site not in same:
            return f"no operator returns the value of {call_graph.calls[spec.call].key_stem}"
    for number, one in enumerate(call_graph.calls):
        if one.op != "call_module" and gate_of(call_graph.calls, number) is not None and from_settings(one):
            return f"the limits of {one.key_stem} are arguments, which may differ from call to call"
    return None


def finished(
    taken: ForwardValues, forward_record: ForwardRecord, written: Written, units: Sequence[tuple[int, int, Tensor]]
) -> None:
    """The forward has returned: what C++ took becomes a part of what was kept of its values."""
    event_record = taken.sites
    if event_record is None:
        return
    event_record.forward_record = weakref.proxy(
        forward_record
    )  # which holds it; its sites may get other names until they are read
    event_record.native = [written]
    for slot, axis, counts in units:
        for site in forward_record.sites_of(slot)[:1]:
            taken.units[site] = Units(counts, axis, math.prod(forward_record.sizes.at(slot)) // max(len(counts), 1))
            event_record.buffers["units", site] = counts
