"""What most steps of a run share, as text: one whole, and the others as what is different in them.

A value that is now measured in full and now not, or an expert that gets no sample in some steps, makes a prototype of
its own in many steps; all but a few of its records are those of another one.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from fxgrad.plain import flow_plain
from fxgrad.schema import GradientFlow
from fxgrad.store import flow_of_plain

__all__ = ["difference", "patched", "read", "whole"]


def whole(flow: GradientFlow) -> str:
    """JSON of a prototype."""
    return _text(flow_plain(flow, {node: number for number, node in enumerate(flow.nodes)}))


def difference(flow: GradientFlow, base: GradientFlow) -> str | None:
    """JSON of what is different from another prototype; None where that has other nodes."""
    if flow.nodes != base.nodes:
        return None
    index = {node: number for number, node in enumerate(flow.nodes)}
    changed: dict[str, Any] = {}
    for one in fields(flow):
        new, old = getattr(flow, one.name), getattr(base, one.name)
        if new == old:
            continue
        if isinstance(new, tuple) and len(new) == len(old):
            pairs = enumerate(zip(new, old, strict=True))
            changed[one.name] = {str(n): flow_plain(a, index) for n, (a, b) in pairs if a != b}
        else:
            changed[one.name] = [flow_plain(new, index)]
    return _text(changed)


def patched(text: str, base: str) -> str:
    """The whole prototype again.

    Raises:
        ValueError, LookupError, TypeError: the text is damaged.
    """
    content = json.loads(base)
    for name, change in json.loads(text).items():
        if isinstance(change, list):
            content[name] = change[0]
            continue
        for place, item in change.items():
            content[name][int(place)] = item
    return _text(content)


def read(text: str) -> GradientFlow:
    """The prototype of its whole JSON.

    Raises:
        ValueError: it is damaged.
    """
    return flow_of_plain(json.loads(text))


def _text(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
