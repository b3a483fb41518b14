"""The ``symbolic`` front end: a torch.fx Tracer that is faithful, or refuses.

Against ``torch.fx.symbolic_trace``: augmented assignments and item assignments stay in place, gradient switches
become nodes, tensors made and random numbers drawn become nodes, nothing is removed as dead, and what cannot be
kept (autocast regions, custom autograd functions, checkpointed regions, hooks and modules made in forward, attributes
written, hooks on inlined modules) is refused with its reason.
"""

from __future__ import annotations

import dis
import io
import operator
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fxgrad.capture.calls import named_arguments
from fxgrad.capture.containers import has_proxy, rebuilder
from fxgrad.capture.guards import Guards, ModuleGuard, NameGuard, class_guards, code_guards
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.names import METADATA, from_torch, is_leaf, of_the_user, source_line
from fxgrad.capture.surroundings import random_state, without_collector
from fxgrad.errors import CaptureError
from fxgrad.structure import tensors_in
from fxgrad.torch_private import global_hooks, has_hooks

_AUGMENTED = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift",
)  # fmt: skip
_REFUSED = frozenset({"register_hook", "backward", "register_post_accumulate_grad_hook", "requires_grad_", "grad"})
# Functions of torch whose effect a trace would lose, by file and name.
_LOSSY = {
    ("checkpoint.py", "checkpoint"): "activation checkpointing",
    ("module.py", "register_forward_hook"): "a hook registered in forward",
    ("module.py", "register_forward_pre_hook"): "a hook registered in forward",
    ("module.py", "register_full_backward_hook"): "a hook registered in forward",
    ("graph.py", "__enter__"): "a context of torch.autograd.graph",
    ("_trace.py", "trace"): "torch.jit.trace",
}
_CLOCKS = frozenset({"time", "posix", "nt", "_random", "_datetime", "_secrets", "select"})


@dataclass(slots=True)
class Span:
    """A call of an inlined module: its arguments and result, and the graph nodes around it."""

    path: str
    type: str
    first: int
    last: int
    inputs: Any
    outputs: Any


@dataclass(slots=True)
class Trace:
    """A faithful trace of one model for one structure of arguments."""

    graph: fx.Graph
    spans: list[Span]
    guards: Guards
    rebuild: Callable[[Any], Any]


class FaithfulProxy(fx.Proxy):
    """A Proxy on which ``h += x`` and ``h[i] = x`` stay what they are."""

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


def set_grad(mode: bool) -> None:  # noqa: FBT001  # a node of the graph takes positional arguments
    """Switch gradients on or off; the node that a ``no_grad`` region becomes."""
    torch.set_grad_enabled(mode)


class _NodesForConstants(TorchFunctionMode):
    """While tracing: a torch function without a Proxy among its arguments becomes a node instead of a constant."""

    def __init__(self, tracer: FaithfulTracer) -> None:
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


# torch.fx patches nn.Module while it traces; two traces at once would restore each other's patches.
_ONE_AT_A_TIME = threading.RLock()


class FaithfulTracer(fx.Tracer):
    """Traces one model.  Reasons against the trace gather in ``refusals``, since user code may swallow exceptions."""

    proxy_buffer_attributes = True

    def __init__(self, modules: ModuleMap) -> None:
        super().__init__()
        self.modules = modules
        self.refusals: list[str] = []
        self._named: set[str] = set()
        self.spans: list[Span] = []
        self.inlined: dict[int, tuple[str, nn.Module]] = {}
        self.executed: dict[types.CodeType, dict[str, Any]] = {}
        self.names: list[NameGuard] = []
        self._stack: list[tuple[str, str]] = [("", modules.places[id(modules.root)].type)]
        self.returned: Any = None
        self._grad_mode = True
        self._autocast = _autocast_state()
        self._thread = threading.get_ident()

    # ---- the arguments ---------------------------------------------------------------------------------------

    def use(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> None:
        """The arguments of the call to trace: tensors become placeholders, everything else stays as it is."""
        self._arguments = (args, kwargs)
        self._words = [
            word + position for word, value in named_arguments(args, kwargs, names) for position, _ in tensors_in(value)
        ]

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: FBT001  # fx's signature
        concrete_args: Any = None,  # fx's signature
    ) -> Any:
        """Placeholders in the structure of the real arguments."""
        del is_module, concrete_args
        made: list[fx.Proxy] = []

        def fill(value: Any) -> Any:
            if isinstance(value, Tensor):
                word = self._words[len(made)]
                made.append(self.create_proxy("placeholder", "".join(c if c.isalnum() else "_" for c in word), (), {}))
                return made[-1]
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return tuple(fill(item) for item in value)
            if isinstance(value, list):
                return [fill(item) for item in value]
            if type(value) is dict:
                return {key: fill(item) for key, item in value.items()}
            if any(True for _ in tensors_in(value)):
                self.refuse(f"an argument of type {type(value).__name__} that holds tensors")
            return value

        args = fill(self._arguments[0])
        kwargs = fill(self._arguments[1])

        def run(root: nn.Module, *_: Any) -> Any:
            sys.setprofile(self._profile)
            try:
                with _NodesForConstants(self):
                    self.returned = root_fn(root, *args, **kwargs)
                    return self.returned
            finally:
                sys.setprofile(None)

        return run, [self.root, *made]

    # ---- what happens during the trace -----------------------------------------------------------------------

    def refuse(self, what: str) -> None:
        """Note a reason against the trace, with the line of the user's code."""
        if what in self._named:
            return
        self._named.add(what)
        line = source_line()
        self.refusals.append(f"{what} ({line})" if line else what)

    def proxy(self, node: fx.Node) -> FaithfulProxy:
        """Our proxies, for nodes of this tracer."""
        return FaithfulProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers become nodes, in the thread that traces."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """The leaf policy of all front ends."""
        del module_qualified_name
        return is_leaf(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A leaf becomes a node; any other module is entered, unless that would hide something."""
        if threading.get_ident() != self._thread:  # torch.fx patches nn.Module for the whole process
            return forward(*args, **kwargs)
        place = self.modules.places.get(id(m))
        if place is None:
            self.refuse(f"a module made in forward ({type(m).__name__})")
            return forward(*args, **kwargs)
        if place.leaf:
            return self.create_proxy("call_module", place.path, args, kwargs)
        if has_hooks(m) or "forward" in m.__dict__ or type(m).__call__ is not nn.Module.__call__:
            self.refuse(f"module {place.path} has hooks or a forward of its own, which must see real tensors")
            raise CaptureError(self.refusals[-1])  # not to be run with proxies, not even once
        self.inlined[id(m)] = (place.path, m)
        span = Span(place.path, place.type, len(self.graph.nodes), 0, (args, kwargs), None)
        self._stack.append((place.path, place.type))
        try:
            span.outputs = forward(*args, **kwargs)
        finally:
            self._stack.pop()
        span.last = len(self.graph.nodes)
        self.spans.append(span)
        return span.outputs

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        """Note where a node comes from; put a node where the gradient mode was switched."""
        if kind not in ("placeholder", "get_attr", "output"):
            self._switch()
        word = target if kind == "call_method" else getattr(target, "__name__", "")
        if kind in ("call_method", "call_function") and word in _REFUSED:
            self.refuse(f"{word}() called in forward")
        node = super().create_node(kind, target, *rest, **named)
        path, type_name = self._stack[-1]
        node.meta["fxgrad"] = {
            "path": path, "type": type_name, "source": source_line(), "grad_enabled": torch.is_grad_enabled(),
        }  # fmt: skip
        return node

    def _switch(self) -> None:
        enabled = torch.is_grad_enabled()
        if enabled != self._grad_mode:
            self._grad_mode = enabled
            super().create_node("call_function", set_grad, (enabled,), {}).meta["fxgrad"] = {"switch": enabled}
        if torch.is_inference_mode_enabled():
            self.refuse("an inference_mode region in forward")
        if _autocast_state() != self._autocast:
            self.refuse("an autocast region in forward")

    def create_arg(self, a: Any) -> Any:
        """A tensor that is nobody's attribute would be baked in as a constant."""
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            owned = id(a) in self.modules.tensors or any(a is known for known in self.tensor_attrs)
            if not owned:
                self.refuse("a tensor that is neither an argument nor an attribute of the model")
        return super().create_arg(a)

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            if argument.__name__ == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                self.refuse(f"the custom autograd function {owner.__name__}")
            module = getattr(argument, "__module__", None) or type(getattr(argument, "__self__", None)).__module__
            writes = isinstance(owner, io.IOBase) and argument.__name__ in ("write", "writelines", "read", "readline")
            if writes or argument in (print, open, input):
                self._stop(f"{argument.__name__}() called in forward ({frame.f_code.co_filename}:{frame.f_lineno})")
            if module in _CLOCKS and of_the_user(frame.f_code.co_filename):
                self.refusals.append(f"{module}.{argument.__name__} called in forward ({frame.f_code.co_filename})")
            return
        if event != "call":
            return
        code = frame.f_code
        file = code.co_filename
        if from_torch(file):
            lossy = _LOSSY.get((file.replace(os.sep, "/").rpartition("/")[2], code.co_name))
            if lossy is not None:
                self.refuse(lossy)
        if of_the_user(file) and code not in self.executed:
            self.executed[code] = frame.f_globals
            self._refuse_outer_writes(frame)
            self.names += code_guards([(code, frame.f_globals)])  # as they are before the code runs
        self._closure(frame)

    def _refuse_outer_writes(self, frame: types.FrameType) -> None:
        """Code that binds a global or a variable of an outer function is refused before it runs, even once."""
        free = set(frame.f_code.co_freevars)
        for step in dis.get_instructions(frame.f_code):
            bound = step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            if bound or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in free):
                self._stop(f"forward binds {step.argval!r} outside of itself ({frame.f_code.co_filename})")

    def _stop(self, what: str) -> None:
        self.refusals.append(what)
        raise CaptureError(what)

    def _closure(self, frame: types.FrameType) -> None:
        """What the code takes from an outer function that has returned: numbers, which nothing guards, containers."""
        free = frame.f_code.co_freevars
        if not free or not of_the_user(frame.f_code.co_filename):
            return
        for name in free:
            value = frame.f_locals.get(name)
            if not isinstance(value, (int, float, dict, list, set)) or isinstance(value, bool):
                continue
            outer = frame.f_back
            while outer is not None and name not in outer.f_code.co_cellvars:
                outer = outer.f_back
            if outer is None and isinstance(value, (int, float)):
                self.refusals.append(f"the number {name!r} comes from a closure ({frame.f_code.co_filename})")
            elif outer is None:
                self.names.append(NameGuard(f"{name!r} of a closure", lambda v=value: v))  # type: ignore[misc]

    def changed_outside(self) -> list[str]:
        """What the code changed outside of the model while it was traced; containers get their entries back."""
        changes = []
        for guard in self.names:
            reason = guard.broken()
            if reason is not None:
                changes.append(f"forward writes outside of the model: {reason}")
                guard.restore()
        return changes


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def trace(modules: ModuleMap, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Trace:
    """Trace the model for arguments of this structure.

    The Python of ``forward`` runs once with proxies; what it wrote into the model is the caller's to undo.

    Raises:
        CaptureError: the trace would not be faithful, or torch.fx cannot make one; the message says why.
    """
    root = modules.root
    name = type(root).__name__
    if next(iter(global_hooks()), None) is not None:
        message = f"{name} cannot be traced symbolically: a global module hook is registered"
        raise CaptureError(message)
    tracer = FaithfulTracer(modules)
    tracer.use(args, kwargs, names)
    before = random_state()
    guards = {
        key: ModuleGuard(place.path, place.module, root=place.module is root)
        for key, place in modules.places.items()
        if not place.leaf or place.module is root
    }
    try:
        with _ONE_AT_A_TIME, without_collector(), torch.enable_grad():
            graph = tracer.trace(root)
    except Exception as error:
        tracer.changed_outside()
        reasons = "; ".join(dict.fromkeys(tracer.refusals)) or f"{type(error).__name__}: {str(error).splitlines()[0]}"
        message = f"{name} cannot be traced symbolically: {reasons}"
        raise CaptureError(message) from error
    if before != random_state():
        tracer.refusals.append("random numbers drawn in forward outside of torch's functions")
    tracer.refusals += tracer.changed_outside()
    inlined = [guards[key] for key in (id(root), *tracer.inlined)]
    written = [reason for guard in inlined if (reason := guard.broken()) is not None]
    if written and not tracer.refusals:  # hooks are refused by name already
        tracer.refusals.append(f"forward writes into the model: {written[0]}")
    if tracer.refusals:
        message = f"{name} cannot be traced symbolically: {'; '.join(dict.fromkeys(tracer.refusals))}"
        raise CaptureError(message)
    named = tracer.names + class_guards({type(m) for _, m in tracer.inlined.values()} | {type(root)})
    return Trace(graph, tracer.spans, Guards([*inlined, *named]), rebuilder(tracer.returned))
