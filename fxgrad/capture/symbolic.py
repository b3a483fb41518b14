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

from fxgrad.capture.calls import named_arguments
from fxgrad.capture.containers import rebuilder
from fxgrad.capture.guards import Guards, LeafGuard, ModuleGuard, NameGuard, class_guards, code_guards
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.names import from_torch, is_leaf, of_the_user, source_line
from fxgrad.capture.pictures import FUNCTIONS, SIMPLE
from fxgrad.capture.proxies import FaithfulProxy, NodesForConstants, set_grad
from fxgrad.capture.surroundings import random_state, without_collector
from fxgrad.errors import CaptureError
from fxgrad.structure import tensors_in
from fxgrad.torch_private import entering_wrapped_functions, global_hooks, has_hooks

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
    doubts: list[str]
    rebuild: Callable[[Any], Any]


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
        self.doubts: list[str] = []
        self.guards = {
            key: ModuleGuard(place.path, place.module, root=place.module is modules.root)
            for key, place in modules.places.items()
            if not place.leaf or place.module is modules.root
        }
        self._given: list[tuple[Any, Any]] = []
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
        seen: set[int] = set()

        def fill(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) in seen:
                    self.refuse("one tensor given as several arguments")
                seen.add(id(value))
                word = self._words[len(made)]
                made.append(self.create_proxy("placeholder", "".join(c if c.isalnum() else "_" for c in word), (), {}))
                return made[-1]
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return tuple(fill(item) for item in value)
            if type(value) in (list, dict):
                filled: Any = list(map(fill, value)) if type(value) is list else {k: fill(v) for k, v in value.items()}
                self._given.append((filled, filled.copy()))
                return filled
            if any(True for _ in tensors_in(value)):
                self.refuse(f"an argument of type {type(value).__name__} that holds tensors")
            return value

        args = fill(self._arguments[0])
        kwargs = fill(self._arguments[1])

        def run(root: nn.Module, *_: Any) -> Any:
            outer = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                with NodesForConstants(self):
                    self.returned = root_fn(root, *args, **kwargs)
                    return self.returned
            finally:
                sys.setprofile(outer)

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
        self.refuse_unknown(m)
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
            self._guard_names(code_guards([(code, frame.f_globals)]))  # as they are before the code runs
            asked = set(code.co_names)
            if "is_tensor" in asked or {"isinstance", "Tensor"} <= asked:
                self.doubts.append(f"forward asks whether a value is a tensor ({file}:{code.co_firstlineno})")
        self._closure(frame)

    def refuse_unknown(self, m: nn.Module) -> None:
        """A module with state that nothing can compare (an iterator, a random generator) is not even entered."""
        guard = self.guards[id(m)]
        if guard.unknown is not None:
            self._stop(f"attribute {guard.unknown!r} of {guard.path} holds state that cannot be compared")

    def _refuse_outer_writes(self, frame: types.FrameType) -> None:
        """Code that binds a global or a variable of an outer function is refused before it runs, even once."""
        free = set(frame.f_code.co_freevars)
        for step in dis.get_instructions(frame.f_code):
            bound = step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            if bound or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in free):
                self._stop(f"forward binds {step.argval!r} outside of itself ({frame.f_code.co_filename})")

    def _guard_names(self, guards: list[NameGuard]) -> None:
        self.names += guards
        for guard in guards:
            if not guard.known:
                self._stop(f"{guard.where} holds state that cannot be compared")

    def _stop(self, what: str) -> None:
        self.refusals.append(what)
        raise CaptureError(what)

    def _closure(self, frame: types.FrameType) -> None:
        """What the code takes from an outer function that has returned: constants, which nothing guards, containers."""
        free = frame.f_code.co_freevars
        if not free or not of_the_user(frame.f_code.co_filename):
            return
        for name in free:
            value = frame.f_locals.get(name)
            if isinstance(value, (Tensor, fx.Proxy, nn.Module, *FUNCTIONS)):
                continue
            outer = frame.f_back
            while outer is not None and name not in outer.f_code.co_cellvars:
                outer = outer.f_back
            if outer is None and isinstance(value, SIMPLE):
                self.refusals.append(f"{name!r} comes from a closure ({frame.f_code.co_filename})")
            elif outer is None:
                self._guard_names([NameGuard(f"{name!r} of a closure", lambda v=value: v)])  # type: ignore[misc]

    def leaf_guards(self) -> list[LeafGuard]:
        """Guards for attributes of leaf modules that the user's code names."""
        words: set[str] = set()
        for code in self.executed:
            words.update(code.co_names, (word for word in code.co_consts if isinstance(word, str)))
        leaves = (place for place in self.modules.places.values() if place.leaf and place.module is not self.root)
        guards = (LeafGuard(place.path, place.module, words) for place in leaves)
        return [guard for guard in guards if guard]

    def changed_outside(self) -> list[str]:
        """What the code changed outside of the model while it was traced; containers get their entries back."""
        changes = []
        if not all(_same_entries(filled, before) for filled, before in self._given):
            changes.append("forward changes a list or dict that it was given")
        for guard in self.names:
            reason = guard.broken()
            if reason is not None:
                changes.append(f"forward writes outside of the model: {reason}")
                guard.restore()
        return changes


def _same_entries(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(two) and all(one[key] is two[key] for key in one)
    return len(one) == len(two) and all(map(operator.is_, one, two))


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
    try:
        tracer.refuse_unknown(root)
        with _ONE_AT_A_TIME, entering_wrapped_functions(), without_collector(), torch.enable_grad():
            graph = tracer.trace(root)
    except Exception as error:
        tracer.changed_outside()
        reasons = "; ".join(dict.fromkeys(tracer.refusals)) or f"{type(error).__name__}: {str(error).splitlines()[0]}"
        message = f"{name} cannot be traced symbolically: {reasons}"
        raise CaptureError(message) from error
    if before != random_state():
        tracer.refusals.append("random numbers drawn in forward outside of torch's functions")
    tracer.refusals += tracer.changed_outside()
    # Containers such as ModuleList are entered without being called, so every module that may be entered is guarded.
    entered = list(tracer.guards.values())
    written = [reason for guard in entered if (reason := guard.broken()) is not None]
    if written and not tracer.refusals:  # hooks are refused by name already
        tracer.refusals.append(f"forward writes into the model: {written[0]}")
    if tracer.refusals:
        message = f"{name} cannot be traced symbolically: {'; '.join(dict.fromkeys(tracer.refusals))}"
        raise CaptureError(message)
    named = tracer.names + class_guards({type(m) for _, m in tracer.inlined.values()} | {type(root)})
    guards = Guards([*entered, *tracer.leaf_guards(), *named])
    return Trace(graph, tracer.spans, guards, tracer.doubts, rebuilder(tracer.returned))
