"""The flow of a forward call whose statistics came by slots: of a graph for the compiler, or of graphs of dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxgrad.capture.captured import CallGraph
from fxgrad.engine.assembly import assemble
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.recorder import EventRecord
from fxgrad.record.slot_recorder import KeptRuns, SlotFacts, kept_of
from fxgrad.schema import CaptureReport


@dataclass(frozen=True, slots=True)
class SlotRun:
    """One forward call.

    Attributes:
        number: of the call.
        plan, report: its graph of calls, and how that was obtained.
        parameters: of the model, as (number, names, tensor).
        shapes: of the value at each site.
        not_required: sites whose value required no gradient.
        slots: what arrived, by slot; ``slot_of``: of each site that has one.
        unprobed: why a site has none.
        accumulating: whether parameters had a gradient when the forward began; None where unknown.
    """

    number: int
    plan: CallGraph
    report: CaptureReport
    parameters: list[tuple[int, tuple[str, ...], Tensor]]
    shapes: list[tuple[int, ...]]
    not_required: set[int]
    slots: Tensor
    slot_of: Mapping[int, int]
    unprobed: Mapping[int, str]
    accumulating: bool | None = None


def assemble_slots(event: KeptRuns, run: SlotRun) -> EventRecord:
    """One forward call in a backward event, with its flow."""
    recording: Any = ForwardRecord(None, run.number, 0)
    recording.plan, recording.report, recording.parameters = run.plan, run.report, run.parameters
    recording.shapes, recording.not_required, recording.unprobed = run.shapes, run.not_required, run.unprobed
    recording.accumulating = run.accumulating
    kept = kept_of(recording, run.slots, SlotFacts(len(run.plan.sites), run.slot_of, run.shapes))
    kept.event, kept.parameters, kept.raised = event.number, event.parameters, event.raised
    if kept.raised is not None:
        kept.raised.parts.append(kept)
    kept.flow = assemble(kept, "the caller's own backward pass", "norm")
    return kept


__all__ = ["SlotRun", "assemble_slots"]
