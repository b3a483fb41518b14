"""A backward pass that raised: where it stopped, and why."""

from __future__ import annotations

from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Failure, FailureCause, Finding

_MENDS: dict[FailureCause, str] = {
    "changed_in_place": "use the operation that is not in place (h = h + 1 for h += 1), change a clone(), or take the "
    "optimizer step behind the backward pass; with max_norm, use table.weight.clone() before the lookup",
    "second_backward": "detach() what is carried from step to step, add the losses and call backward() once, or pass "
    "retain_graph=True to the first one",
    "custom_function": "return one gradient of the input's shape for each argument of forward, None for those that "
    "need none; torch.autograd.gradcheck tests it",
    "python": "mend the hook or function that raised",
    "unknown": "read the watch inside of the except block, which shows fxgrad the exception; "
    "torch.autograd.set_detect_anomaly(True) shows the forward call",
}


def backward_failed(evidence: Evidence) -> Iterator[Finding]:
    """The latest backward pass that raised.  Exact: what was not reached is known, and is judged by no other check."""
    if not evidence.failed:
        return
    latest = evidence.failed[-1].flow.event.backward
    views = [view for view in evidence.failed if view.flow.event.backward == latest]
    view = next((view for view in views if view.flow.event.failed and view.flow.event.failed.node), views[0])
    failure = view.flow.event.failed
    if failure is None:
        return
    node = None if failure.node is None else view.nodes[failure.node]
    at = f"at {view.source_words(failure.node)}" if failure.node is not None else _behind(view, failure)
    error = "an exception that fxgrad did not see" if failure.exception is None else failure.exception
    times = len({view.flow.event.backward for view in evidence.failed})
    message = f"the backward pass raised {error} {at}: {failure.detail}"
    draft = Draft(evidence, "backward_failed", "error", message, _MENDS[failure.cause], {"events": times})
    path = tuple(key for key in (failure.node, failure.culprit) if key is not None)
    parameter = failure.value if node is None and failure.value in view.parameters else None
    yield draft.at(node, view=view, path=path, parameter=parameter, confidence="exact")


def _behind(view: FlowView, failure: Failure) -> str:
    """Where no node of the model stopped it."""
    if failure.site is None:
        return "outside of the model"
    return f"behind {view.source_words(view.by_id[failure.site].key)}"
