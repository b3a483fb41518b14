"""The probe: an identity that returns the same tensor object and puts a tensor hook on it.

The hook belongs to the value as it is now: torch keeps it with the autograd node that a later in-place change replaces.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.torch_support.leaf_hooks import hook_in_front

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord


def put(recording: ForwardRecord, value: Tensor, index: int) -> Any:
    """Put the hook of site ``index`` on ``value``, which requires grad."""
    # torch 2.14 crashes where a view that an item assignment changed gets a hook before its new node was asked for.
    node = value.grad_fn
    if recording.rewriting is not None:
        return recording.rewriting.put(value, index)
    if node is None and value.is_leaf:
        return recording.leaves.of(value).add(recording, index)
    recording.computed = True
    if recording.record is not None:
        return recording.record.put(value, index, index in recording.escalated)
    hook = recording.sink.hook(recording, index)
    hook_in_front(value, hook)
    return hook


class Current(threading.local):
    """The recording that probes of the generated code write into, one per thread."""

    recording: ForwardRecord | None = None


current = Current()


def probe(value: Any, site: int) -> Any:
    """The node that the pass inserts: returns ``value`` itself; ``site`` is the number of the probed node.

    Without a running recording it does nothing at all.
    """
    recording = current.recording
    if recording is not None:
        recording.probe(value, site)
    return value


probe.fxgrad_probe = True  # type: ignore[attr-defined]  # what front ends know a probe by
