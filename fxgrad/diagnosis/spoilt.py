"""Weights that a step of the optimizer made non-finite, though what it was given was finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, listed, number
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Finding, ParameterRecord

#: Below these, a number rounds to 0 in the dtype: half of the smallest number above 0.
_ZERO_BELOW = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}


def spoilt_by_step(evidence: Evidence, view: FlowView) -> Iterator[Finding]:
    """Parameters that the step behind this flow left NaN or infinite, though they and their gradient were finite."""
    spoilt = [record for record in view.flow.parameters if made_nonfinite(record)]
    if not spoilt:
        return
    names = tuple(record.name for record in spoilt)
    lost = [record for record in spoilt if _epsilon_is_zero(record)]
    record = (lost or spoilt)[0]
    update = record.update
    epsilon = (update.epsilon if update is not None else None) or 0.0
    rate = (update.learning_rate if update is not None else None) or 0.0
    if lost:
        why = f"its epsilon {number(epsilon)} is 0 in {record.dtype}, so that it divides by 0"
        mend = (
            "keep the parameters in float32 (torch.autocast for the compute), or give an eps that "
            f"{record.dtype} holds (1e-4)"
        )
    else:
        why = f"learning rate {number(rate)}"
        mend = "lower the learning rate, clip the gradient norm; check what the optimizer divides by"
    draft = Draft(
        evidence, "nonfinite", "error",
        f"the step behind backward {view.flow.event.backward} made {listed(names)} NaN or Inf, whose values and "
        f"gradients were finite: the optimizer did it; {why}",
        mend, {"parameters": len(names), "learning_rate": rate, "epsilon": epsilon},
    )  # fmt: skip
    yield draft.at(None, view=view, parameter=record.name, affected=names, confidence="exact")


def made_nonfinite(record: ParameterRecord) -> bool:
    """Whether a step left a parameter NaN or infinite, though it and its gradient were finite."""
    update = record.update
    if update is None or math.isfinite(update.l2_norm) or not math.isfinite(update.weight_norm):
        return False
    return record.statistics is None or not record.statistics.nonfinite


def _epsilon_is_zero(record: ParameterRecord) -> bool:
    epsilon = record.update.epsilon if record.update is not None else None
    return epsilon is not None and epsilon <= _ZERO_BELOW.get(record.dtype, 0.0)
