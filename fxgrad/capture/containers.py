"""Containers with proxies in them: what a forward is given and what it returns while it is traced."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Gives what a graph returns the container types that the model's own forward returned.

    Attributes:
        kind: the type of the container; None: the value stays as it is.
        parts: of its items.
        keys: of a mapping.
    """

    kind: Any = None
    parts: tuple[Rebuild, ...] = ()
    keys: tuple[Any, ...] | None = None

    def __call__(self, value: Any) -> Any:
        """The value in its container."""
        if self.kind is None:
            return value
        if self.keys is not None:
            return self.kind((key, part(value[key])) for key, part in zip(self.keys, self.parts, strict=True))
        items = [part(item) for part, item in zip(self.parts, value, strict=True)]
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


_AS_IT_IS = Rebuild()


def rebuilder(traced: Any) -> Rebuild:
    """How to give what a graph returns the types of ``traced``; torch.fx turns every mapping into a plain dict.

    Raises:
        CaptureError: a container of a type that cannot be made again.
    """
    kind = type(traced)
    if kind in (tuple, list) or (isinstance(traced, tuple) and hasattr(traced, "_fields")):
        parts = tuple(rebuilder(item) for item in traced)
        return _AS_IT_IS if all(part.kind is None for part in parts) else Rebuild(kind, parts)
    if kind in (dict, OrderedDict):
        parts = tuple(rebuilder(item) for item in traced.values())
        if kind is dict and all(part.kind is None for part in parts):
            return _AS_IT_IS
        return Rebuild(kind, parts, tuple(traced))
    if not isinstance(traced, fx.Proxy) and _has_proxy_inside(traced) and not dataclasses.is_dataclass(traced):
        message = f"cannot be traced symbolically: forward returns a {kind.__name__}, which a graph cannot make again"
        raise CaptureError(message)
    return _AS_IT_IS


def _has_proxy_inside(value: Any) -> bool:
    return has_proxy(list(value.values()) if isinstance(value, Mapping) else value)
