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


def put(forward_record: ForwardRecord, value: Tensor, index: int) -> Any:
    """Put the hook of site ``index`` on ``value``, which requires grad."""
    # torch 2.14 crashes where a view that an item assignment changed gets a hook before its new node was asked for.
    node = value.grad_fn
    if forward_record.rewriting is not None:
        return forward_record.rewriting.put(value, index)
    if node is None and value.is_leaf:
        return forward_record.leaves.of(value).add(forward_record, index)
    forward_record.computed = True
    if forward_record.record is not None:
        return forward_record.record.put(value, index, index in forward_record.escalated)
    hook = forward_record.sink.hook(forward_record, index)
    hook_in_front(value, hook)
    return hook


class Current(threading.local):
    """The forward record that probes of the generated code write into, one per thread."""

    forward_record: ForwardRecord | None = None


current = Current()


def probe(value: Any, site: int) -> Any:
    """The node that the pass inserts: returns ``value`` itself; ``site`` is the number of the probed node.

    Without a running forward record it does nothing at all.
    """
    forward_record = current.forward_record
    if forward_record is not None:
        forward_record.probe(value, site)
    return value


probe.fxgrad_probe = True  # type: ignore[attr-defined]  # what front ends know a probe by
