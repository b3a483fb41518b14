"""What stands for tensors while a model is traced, and what makes nodes of calls without any."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fxgrad.capture.containers import has_proxy
from fxgrad.capture.names import METADATA

_AUGMENTED = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift",
)  # fmt: skip
_OPTIONAL = frozenset({"grad", "grad_fn", "_base"})  # may be None, which a proxy never is


class FaithfulProxy(fx.Proxy):
    """A Proxy on which ``h += x`` and ``h[i] = x`` stay what they are."""

    @property
    def __class__(self) -> Any:
        """The class; asked for by ``isinstance`` where the answer is no, as for ``isinstance(x, Tensor)``."""
        frame = sys._getframe(1)  # noqa: SLF001  # who asks
        object.__getattribute__(self, "tracer").asked_for_class(frame)
        return FaithfulProxy

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            self.tracer.refuse(f".{name} of a tensor read in forward")  # type: ignore[attr-defined]
        return super().__getattr__(name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _augmented(name: str) -> Callable[[FaithfulProxy, Any], Any]:
    target = getattr(operator, name)

    def method(self: FaithfulProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    method.__name__ = f"__{name}__"
    return method


for _name in _AUGMENTED:
    setattr(FaithfulProxy, f"__{_name}__", _augmented(_name))


class Around(threading.local):
    """Whether gradients were on when the graph began to run, in this thread."""

    grad = True


around = Around()


def set_grad(mode: bool) -> None:  # noqa: FBT001  # a node of the graph takes positional arguments
    """Switch gradients off, or on again if they were on around the graph; what a ``no_grad`` region becomes."""
    torch.set_grad_enabled(mode and around.grad)


class NodesForConstants(TorchFunctionMode):
    """While tracing: a torch function without a Proxy among its arguments becomes a node instead of a constant."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if has_proxy((args, kwargs)) or name in METADATA or name.startswith(("_", "is_", "get_", "set_", "has_")):
            return func(*args, **kwargs)
        if torch.overrides.is_tensor_method_or_property(func):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)
