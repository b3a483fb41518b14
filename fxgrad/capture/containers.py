"""Containers with proxies in them: what a forward is given and what it returns while it is traced."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fxgrad.errors import CaptureError


def has_proxy(value: Any) -> bool:
    """Whether a Proxy is somewhere in a structure of arguments."""
    if isinstance(value, fx.Proxy):
        return True
    if isinstance(value, (tuple, list)):
        return any(has_proxy(item) for item in value)
    if isinstance(value, dict):
        return any(has_proxy(item) for item in value.values())
    return isinstance(value, slice) and any(map(has_proxy, (value.start, value.stop, value.step)))


def rebuilder(traced: Any) -> Callable[[Any], Any]:
    """Gives what a graph returns the container types that the model's own forward returned.

    torch.fx turns every mapping into a plain dict.

    Raises:
        CaptureError: a container of a type that cannot be made again.
    """
    kind = type(traced)
    if kind in (tuple, list) or (isinstance(traced, tuple) and hasattr(traced, "_fields")):
        parts = [rebuilder(item) for item in traced]
        if all(part is _as_it_is for part in parts):
            return _as_it_is
        make = kind if kind in (tuple, list) else lambda items: kind(*items)
        return lambda value: make([part(item) for part, item in zip(parts, value, strict=True)])
    if kind in (dict, OrderedDict):
        inner = {key: rebuilder(item) for key, item in traced.items()}
        if kind is dict and all(part is _as_it_is for part in inner.values()):
            return _as_it_is
        return lambda value: kind((key, part(value[key])) for key, part in inner.items())
    if not isinstance(traced, fx.Proxy) and _has_proxy_inside(traced) and not dataclasses.is_dataclass(traced):
        message = f"cannot be traced symbolically: forward returns a {kind.__name__}, which a graph cannot make again"
        raise CaptureError(message)
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _has_proxy_inside(value: Any) -> bool:
    return has_proxy(list(value.values()) if isinstance(value, Mapping) else value)
