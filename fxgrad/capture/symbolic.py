"""The ``symbolic`` front end: a torch.fx Tracer that is faithful, or refuses.

Against ``torch.fx.symbolic_trace``: augmented assignments and item assignments stay in place, gradient switches
become nodes, tensors made and random numbers drawn become nodes, nothing is removed as dead, and what cannot be
kept (autocast regions, custom autograd functions, checkpointed regions, hooks and modules made in forward, hooks on
inlined modules) is refused with its reason.  As with torch.fx, Python state is baked in: numbers, flags, entries of
dictionaries and globals are what they were when the model was traced.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.calls import named_arguments
from fxgrad.capture.containers import Rebuild, rebuilder
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.names import is_leaf, of_the_user, source_line
from fxgrad.capture.proxies import FaithfulProxy, NodesForConstants, set_grad
from fxgrad.errors import CaptureError
from fxgrad.torch_support.private import checkpointing_entry, entering_wrapped_functions, global_hooks, has_hooks
from fxgrad.torch_support.structure import tensors_in

_REFUSED = frozenset({"register_hook", "backward", "register_post_accumulate_grad_hook", "requires_grad_", "grad"})
_MODULE_HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


@dataclass(slots=True)
class Span:
    """A call of an inlined module: names of the graph nodes that it took and returned.

    The nodes that were made in it have its number among the ``spans`` of their facts.
    """

    path: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()


@dataclass(slots=True)
class Trace:
    """A faithful trace of one model for one structure of arguments.

    Attributes:
        graph: what ran.
        spans: the calls of inlined modules, in the order in which they began.
        doubts: what only a comparison with the model's own run can settle.
        rebuild: gives a result of the graph its own container types.
    """

    graph: fx.Graph
    spans: list[Span]
    doubts: list[str]
    rebuild: Rebuild


#: What users of a trace have to know.
BAKED = (
    "A graph has Python state baked in as it was when the model was traced (numbers, flags, globals, branches); "
    "fxgrad.watch takes any model, and runs its own Python"
)

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
        self.doubts: list[str] = []
        self._asked: set[types.CodeType] = set()
        self._read: set[types.CodeType] = set()
        self._given: list[tuple[Any, Any]] = []
        self._stack: list[tuple[str, str]] = [("", modules.places[id(modules.root)].type)]
        self._inside: tuple[int, ...] = ()
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
            self._refuse_outer_writes(root)
            with NodesForConstants(self):
                self.returned = root_fn(root, *args, **kwargs)
                return self.returned

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
        if not place.registered:
            self.refuse(
                f"module {place.path} ({place.type}) is in a plain Python list or dict, where torch does not find it: "
                "use nn.ModuleList, nn.ModuleDict, or an attribute"
            )
            return forward(*args, **kwargs)
        if place.leaf:
            return self.create_proxy("call_module", place.path, args, kwargs)
        if has_hooks(m) or "forward" in m.__dict__ or type(m).__call__ is not nn.Module.__call__:
            self.refuse(f"module {place.path} has hooks or a forward of its own, which must see real tensors")
            raise CaptureError(self.refusals[-1])  # not to be run with proxies, not even once
        self._refuse_outer_writes(m)
        span = Span(place.path, place.type, _names_in((args, kwargs)))
        outer = self._inside
        self._inside = (*outer, len(self.spans))
        self.spans.append(span)
        self._stack.append((place.path, place.type))
        try:
            result = forward(*args, **kwargs)
        finally:
            self._stack.pop()
            self._inside = outer
        span.outputs = _names_in(result)
        return result

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
            "spans": self._inside,
        }  # fmt: skip
        return node

    def _switch(self) -> None:
        enabled = torch.is_grad_enabled()
        if enabled != self._grad_mode:
            self._grad_mode = enabled
            super().create_node("call_function", set_grad, (enabled,), {}).meta["fxgrad"] = {"spans": self._inside}
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

    def asked_for_class(self, frame: types.FrameType) -> None:
        """``isinstance`` was asked about a proxy: where that may be whether it is a tensor, the answer is wrong."""
        code = frame.f_code
        if code.co_name == "is_tensor" and frame.f_back is not None:
            code = frame.f_back.f_code
        if code in self._asked or not of_the_user(code.co_filename):
            return
        self._asked.add(code)
        names = set(code.co_names)
        if "is_tensor" in names or {"isinstance", "Tensor"} <= names:
            self.doubts.append(f"forward asks whether a value is a tensor ({code.co_filename}:{code.co_firstlineno})")

    def stop(self, what: str) -> None:
        """Note a reason against the trace, and end it.

        Raises:
            CaptureError: always.
        """
        self.refuse(what)
        raise CaptureError(self.refusals[-1])

    def _refuse_outer_writes(self, m: nn.Module) -> None:
        """A forward that binds a global, or a variable of an outer function, is refused before it runs."""
        code = getattr(type(m).forward, "__code__", None)
        if code is None or code in self._read:
            return
        self._read.add(code)
        for bound in _outer_writes(code):
            self.stop(f"forward binds {bound!r} outside of itself ({code.co_filename})")

    @contextlib.contextmanager
    def lossy_calls_refused(self) -> Iterator[None]:
        """While tracing, in this thread: calls of torch whose effect a trace would lose end it."""
        home, name = checkpointing_entry()
        places: list[tuple[Any, str, Callable[[Any], str]]] = [
            (torch.autograd.Function, "apply", _function_word),
            (home, name, lambda _: "activation checkpointing"),
            (torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda _: "a context of torch.autograd.graph"),
            *((nn.Module, hook, lambda _: "a hook registered in forward") for hook in _MODULE_HOOKS),
        ]
        saved = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in places]
        for (owner, attribute, word), (_, _, own) in zip(places, saved, strict=True):
            setattr(owner, attribute, self._refusing(own, word))
        try:
            yield
        finally:
            for owner, attribute, own in saved:
                setattr(owner, attribute, own)

    def _refusing(self, own: Any, word: Callable[[Any], str]) -> Any:
        by_class = isinstance(own, classmethod)
        function = own.__func__ if by_class else own

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.stop(word(args[0] if args else None))
            return function(*args, **kwargs)

        return classmethod(call) if by_class else call

    def given_changed(self) -> bool:
        """Whether the code changed a list or dict that it was given."""
        return not all(_same_entries(filled, before) for filled, before in self._given)


def _function_word(kind: Any) -> str:
    name = kind.__name__
    return "activation checkpointing" if name == "CheckpointFunction" else f"the custom autograd function {name}"


@functools.cache
def _outer_writes(code: types.CodeType) -> tuple[str, ...]:
    """What the code, or a function in it, binds outside of itself."""
    free = set(code.co_freevars)
    found = [
        step.argval for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in free)
    ]  # fmt: skip
    return tuple(found)


def _names_in(structure: Any) -> tuple[str, ...]:
    """The names of the nodes of the proxies in a structure of arguments."""
    if isinstance(structure, fx.Proxy):
        return (structure.node.name,)
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, (tuple, list)):
        return ()
    return tuple(name for item in structure for name in _names_in(item))


def _same_entries(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(two) and all(one[key] is two[key] for key in one)
    return len(one) == len(two) and all(map(operator.is_, one, two))


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def trace(modules: ModuleMap, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Trace:
    """Trace the model for arguments of this structure.

    The Python of ``forward`` runs once with proxies; what it wrote into the model is the caller's to find and undo.

    Raises:
        CaptureError: the trace would not be faithful, or torch.fx cannot make one; the message says why.
    """
    root = modules.root
    if next(iter(global_hooks()), None) is not None:
        raise refusal(root, ["a global module hook is registered"])
    tracer = FaithfulTracer(modules)
    tracer.use(args, kwargs, names)
    try:
        with _ONE_AT_A_TIME, entering_wrapped_functions(), tracer.lossy_calls_refused(), torch.enable_grad():
            graph = tracer.trace(root)
    except Exception as error:
        reasons = tracer.refusals or [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        raise refusal(root, reasons) from error
    if tracer.given_changed():
        tracer.refusals.append("forward changes a list or dict that it was given")
    if tracer.refusals:
        raise refusal(root, tracer.refusals)
    return Trace(graph, tracer.spans, tracer.doubts, rebuilder(tracer.returned))


def refusal(model: nn.Module, reasons: Iterable[str]) -> CaptureError:
    """The error for a model that cannot be traced."""
    return CaptureError(
        f"{type(model).__name__} cannot be traced symbolically: {'; '.join(dict.fromkeys(reasons))}. {BAKED}"
    )
