"""The flow of a forward call whose statistics came by slots: of a graph for the compiler, or of graphs of dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxgrad.capture.captured import CallGraph
from fxgrad.engine.assembly import assemble
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slot_recorder import EventRuns, SlotFacts, event_record_of
from fxgrad.schema import CaptureReport


@dataclass(frozen=True, slots=True)
class SlotRun:
    """One forward call.

    Attributes:
        number: of the call.
        call_graph, report: its graph of calls, and how that was obtained.
        parameters: of the model, as (number, names, tensor).
        shapes: of the value at each site.
        not_required: sites whose value required no gradient.
        slots: what arrived, by slot; ``slot_of``: of each site that has one.
        unprobed: why a site has none.
        accumulating: whether parameters had a gradient when the forward began; None where unknown.
    """

    number: int
    call_graph: CallGraph
    report: CaptureReport
    parameters: list[tuple[int, tuple[str, ...], Tensor]]
    shapes: list[tuple[int, ...]]
    not_required: set[int]
    slots: Tensor
    slot_of: Mapping[int, int]
    unprobed: Mapping[int, str]
    accumulating: bool | None = None


def assemble_slots(event: EventRuns, run: SlotRun) -> EventRecord:
    """One forward call in a backward event, with its flow."""
    forward_record = ForwardRecord(None, run.number, 0)
    forward_record.call_graph, forward_record.report = run.call_graph, run.report
    forward_record.parameters, forward_record.shapes = run.parameters, run.shapes
    forward_record.not_required, forward_record.unprobed = run.not_required, run.unprobed
    forward_record.accumulating = run.accumulating
    event_record = event_record_of(
        forward_record, run.slots, SlotFacts(len(run.call_graph.sites), run.slot_of, run.shapes)
    )
    event_record.event, event_record.parameters, event_record.raised = event.number, event.parameters, event.raised
    if event_record.raised is not None:
        event_record.raised.parts.append(event_record)
    event_record.flow = assemble(event_record, "the caller's own backward pass", "norm")
    return event_record


__all__ = ["SlotRun", "assemble_slots"]
