"""The probe: an identity that returns the same tensor object and puts a tensor hook on it.

The hook belongs to the value as it is now: torch keeps it with the autograd node that a later in-place change replaces.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from fxgrad.instrumentation.recording import Recording


def put(recording: Recording, value: Tensor, index: int) -> Any:
    """Put the hook of site ``index`` on ``value``, which requires grad.

    The hook of a leaf tensor would outlive the graph, so the recording takes it off again.
    """
    if recording.rewriting is not None:
        return recording.rewriting.put(value, index)
    hook = recording.sink.hook(recording, index)
    handle: RemovableHandle = value.register_hook(hook)  # type: ignore[no-untyped-call]
    if value.is_leaf:
        recording.leaf_handles.append(handle)
    return hook


class Current(threading.local):
    """The recording that probes of the generated code write into, one per thread."""

    recording: Any = None


current = Current()


def probe(value: Any, site: int) -> Any:
    """The node that the pass inserts: returns ``value`` itself; ``site`` is the number of the probed node.

    Without a running recording it does nothing at all.
    """
    recording = current.recording
    if recording is not None:
        recording.probe(value, site)
    return value
