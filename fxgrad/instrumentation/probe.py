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


class SiteHook:
    """The tensor hook of one site.  Observes, returns None, keeps nothing."""

    __slots__ = ("index", "recording")
    __torch_unserializable__ = True  # torch.save of a watched model's output: no warning about our hook

    def __init__(self, recording: Recording, index: int) -> None:
        self.recording = recording
        self.index = index

    def __call__(self, gradient: Tensor) -> None:
        """Hand the gradient to the sink."""
        if self.index < 0:  # put on before its site was known, and it never became known
            return
        recording = self.recording
        recording.sink.observe(recording, self.index, gradient, escalate=self.index in recording.escalated)


class ParameterHook:
    """The tensor hook of one parameter; sees what this backward contributes, before it is added to ``.grad``."""

    __slots__ = ("index", "sink")
    __torch_unserializable__ = True

    def __init__(self, sink: Any, index: int) -> None:
        self.sink = sink
        self.index = index

    def __call__(self, gradient: Tensor) -> None:
        """Hand the gradient to the sink."""
        if self.sink.on:
            self.sink.observe(self.sink.parameters, self.index, gradient, escalate=self.index in self.sink.escalated)


def put(recording: Recording, value: Tensor, index: int) -> Any:
    """Put the hook of site ``index`` on ``value``, which requires grad.

    The hook of a leaf tensor would outlive the graph, so the recording takes it off again.
    """
    if recording.rewriting is not None:
        return recording.rewriting.put(value, index)
    hook = SiteHook(recording, index)
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
