"""Traces of one model: what a trace depends on, and what it may not have done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.calls import positional_names
from fxgrad.capture.compare import node_word
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.names import METADATA
from fxgrad.capture.proxies import set_grad
from fxgrad.capture.symbolic import Trace, refusal, trace
from fxgrad.errors import CaptureError
from fxgrad.torch_support.preserve import modules_preserved
from fxgrad.torch_support.streams import random_streams
from fxgrad.torch_support.structure import tensors_in

_SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class _Object:
    """An argument of any other type, by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def modes_of(modules: ModuleMap) -> dict[str, bool]:
    """Which modules are training, by path."""
    return {place.path: place.module.training for place in modules.places.values()}


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a graph depends on besides the model: the structure of the arguments, and torch's own switches.

    Of a tensor nothing counts but which of the arguments are one and the same: forward may ask ``a is b``.
    """
    tensors = [id(tensor) for _, tensor in tensors_in((args, kwargs))]
    switches = (
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"), torch.get_default_dtype(), torch.get_default_device(),
    )  # fmt: skip
    return _structure((args, kwargs)), [tensors.index(tensor) for tensor in tensors], switches


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, _SIMPLE):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), [_structure(item) for item in value])
    if isinstance(value, dict):
        return (type(value), [(key, _structure(item)) for key, item in value.items()])
    if isinstance(value, slice):
        return (slice, _structure((value.start, value.stop, value.step)))
    return _Object(value)


def stand_ins(value: Any) -> Any:
    """The same arguments with tensors that have no numbers: tracing looks at the type only."""
    if isinstance(value, Tensor):
        return torch.empty(0)
    if isinstance(value, (tuple, list)):
        items = [stand_ins(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: stand_ins(item) for key, item in value.items()}
    return value


def example_of(model: nn.Module) -> tuple[Any, ...]:
    """Stand-ins for the required arguments of a model's forward.

    Raises:
        CaptureError: it has required keyword arguments, of which nothing is known before a call.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
        message = (
            f"{type(model).__name__} cannot be instrumented ahead of a call: it has required keyword arguments; "
            "use fxgrad.watch, which sees real arguments"
        )
        raise CaptureError(message)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(torch.empty(0) for p in required if p.kind in kinds)


def may_return_tensor(node: fx.Node) -> bool:
    """Whether a node of a trace can return a tensor, as far as its op tells."""
    if node.op in ("output", "get_attr") or node.target is set_grad or isinstance(node.target, type):
        return False
    return node.op in ("placeholder", "call_module") or node_word(node) not in METADATA


def faithful_trace(
    modules: ModuleMap, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, checked: bool
) -> Trace:  # fmt: skip
    """Trace a model, and give it and the random streams back as they were.

    Args:
        modules: of the model.
        forward: the model's own.
        args: positional arguments.
        kwargs: keyword arguments.
        checked: whether the trace will be compared with the model's own run, which settles doubts.

    Raises:
        CaptureError: the trace would not be faithful; the message says why.
    """
    model = modules.root
    if getattr(forward, "__func__", None) is not type(model).forward:
        raise refusal(model, ["its forward was replaced"])
    with modules_preserved(model) as written, random_streams() as drawn:
        made = trace(modules, args, kwargs, positional_names(forward))
        changes = [f"forward writes into the model: {what}" for what in written() if not _in_place(what.value)]
        if drawn():
            changes.append("random numbers drawn in forward outside of torch's functions")
    if changes:
        raise refusal(model, changes[:1])
    if made.doubts and not checked:
        raise refusal(model, made.doubts)
    return made


def _in_place(value: Any) -> bool:
    """Whether what was bound is a parameter or buffer that was changed in place: ``self.count += 1``."""
    node = getattr(value, "node", None)
    while isinstance(node, fx.Node) and node.op != "get_attr":
        word = node_word(node) if node.op in ("call_function", "call_method") else ""
        if not word.endswith("_") or not node.args:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)
