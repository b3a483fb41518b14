"""Guards: what the Python of a forward read while it was traced, and whether it is still so.

A trace bakes Python state in.  Rather than find out which attribute was read, all non-tensor state of every module
whose forward was inlined is guarded, and every global that the executed code names.  A guard that trips without need
costs a capture, never a wrong number.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from torch import nn

from fxgrad.capture.pictures import CONTAINERS, FUNCTIONS, SIMPLE, Same, pictured, snapshot
from fxgrad.torch_private import children_of, global_hooks, has_hooks

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_OURS = frozenset({"forward", "__deepcopy__", "__reduce_ex__", "_fxgrad_host", "_fxgrad_rewriting"})
_READABLE = (*SIMPLE, *CONTAINERS, tuple)


class Missing:
    """Stands for an attribute or global that is not there."""


class ModuleGuard:
    """The non-tensor state of one module whose forward was inlined."""

    def __init__(self, path: str, module: nn.Module, *, root: bool) -> None:
        self.path = path or "the model"
        self.module = module
        self._skip = _INTERNAL | _OURS if root else _INTERNAL
        self._root = root
        self._forward = type(module).forward
        self._children = tuple(children_of(module).values())
        own = module.__dict__
        names = [name for name in own if name not in self._skip]
        self._count = len(own)
        self._simple = [(name, own[name]) for name in names if isinstance(own[name], SIMPLE)]
        pictures = {name: pictured(own[name]) for name in names if not isinstance(own[name], SIMPLE)}
        #: An attribute that cannot be pictured: where the module's forward is inlined, nothing could guard it.
        self.unknown = next((name for name, (_, complete) in pictures.items() if not complete), None)
        self._other = [(name, picture) for name, (picture, complete) in pictures.items() if complete]
        self._present = self._presence()

    def _presence(self) -> tuple[bool, ...]:
        own = self.module.__dict__
        if not own["_parameters"] and not own["_buffers"]:
            return ()
        return tuple(v is None for v in (*own["_parameters"].values(), *own["_buffers"].values()))

    def broken(self) -> str | None:
        """What changed, in words; None where nothing did."""
        own = self.module.__dict__
        for name, value in self._simple:
            now = own.get(name, Missing)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"attribute {name!r} of {self.path} changed from {value!r} to {now!r}"
        for name, value in self._other:
            if snapshot(own.get(name, Missing)) != value:
                return f"attribute {name!r} of {self.path} changed"
        children = own["_modules"]
        if len(children) != len(self._children) or not all(map(is_, children.values(), self._children)):
            return f"a submodule of {self.path} was swapped, added or removed"
        if not self._root and (has_hooks(self.module) or "forward" in own):
            return f"{self.path} got a hook or a forward of its own"
        if type(self.module).forward is not self._forward or self._presence() != self._present:
            return f"the forward, a parameter or a buffer of {self.path} was replaced"
        return f"{self.path} got or lost an attribute" if len(own) != self._count else None


class NameGuard:
    """A global, a class attribute, or an attribute of an object that the executed code names."""

    def __init__(self, where: str, read: Callable[[], Any]) -> None:
        self._where = where
        self._read = read
        self._value = read()
        self._simple = isinstance(self._value, SIMPLE)
        self._picture: Any = None
        self.known = True
        if not self._simple:
            self._picture, self.known = pictured(self._value)
        self._saved = self._value.copy() if isinstance(self._value, CONTAINERS) else None

    def broken(self) -> str | None:
        """What changed, in words; None where nothing did."""
        now = self._read()
        if now is self._value and (self._simple or isinstance(now, FUNCTIONS)):
            return None
        if self._simple and type(now) is type(self._value) and now == self._value:
            return None
        if not self._simple and snapshot(now) == self._picture:
            return None
        return f"{self._where} changed"

    def restore(self) -> None:
        """Give a container its entries back: a trace must not leave a proxy in the user's own dict."""
        if self._saved is not None:
            self._value.clear()
            getattr(self._value, "extend" if isinstance(self._saved, (list, deque)) else "update")(self._saved)

    @property
    def where(self) -> str:
        """What is guarded, in words."""
        return self._where


class Guards:
    """All guards of one trace."""

    def __init__(self, guards: Iterable[ModuleGuard | NameGuard | LeafGuard]) -> None:
        self._guards = list(guards)

    def broken(self) -> str | None:
        """The first guard that trips, in words; None where the trace may be used."""
        if next(iter(global_hooks()), None) is not None:
            return "a global module hook is registered"
        for guard in self._guards:
            reason = guard.broken()
            if reason is not None:
                return reason
        return None


def code_guards(executed: Iterable[tuple[types.CodeType, dict[str, Any]]]) -> list[NameGuard]:
    """Guards for the globals that executed code objects name."""
    guards: dict[tuple[int, str], NameGuard] = {}
    for code, names in executed:
        for name in code.co_names:
            value = names.get(name, Missing)
            if value is Missing or _from_library(value):
                continue
            where = f"global {name!r} used at {code.co_filename}:{code.co_firstlineno}"
            if not isinstance(value, types.ModuleType):
                guards.setdefault((id(names), name), NameGuard(where, lambda n=names, k=name: n.get(k, Missing)))  # type: ignore[misc]
            for attribute in code.co_names if not isinstance(value, types.FunctionType) else ():
                if isinstance(getattr(value, attribute, Missing), _READABLE):
                    read = lambda v=value, a=attribute: getattr(v, a, Missing)  # noqa: E731
                    guards.setdefault((id(value), attribute), NameGuard(f"{name}.{attribute}", read))
    return list(guards.values())


def class_guards(kinds: Iterable[type]) -> list[NameGuard]:
    """Guards for what the inlined modules' classes hold: plain attributes by value, methods by identity."""
    guards: dict[tuple[type, str], NameGuard] = {}
    methods = (types.FunctionType, property, staticmethod, classmethod)
    for kind in kinds:
        for base in kind.__mro__:
            if base is nn.Module or base is object:
                break
            for name, value in vars(base).items():
                if not name.startswith("__") and isinstance(value, (*_READABLE, *methods)):
                    held = isinstance(value, methods)
                    read = lambda b=base, k=name, h=held: (  # noqa: E731
                        Same(vars(b).get(k, Missing)) if h else vars(b).get(k, Missing)
                    )
                    guards.setdefault((base, name), NameGuard(f"class attribute {base.__name__}.{name}", read))
    return list(guards.values())


class LeafGuard:
    """The attributes of a leaf module that the executed code names: ``F.dropout(x, self.drop.p)`` reads ``p``."""

    def __init__(self, path: str, module: nn.Module, names: Iterable[str]) -> None:
        self._path = path
        self._own = module.__dict__
        self._read = [
            (name, snapshot(self._own[name])) for name in names if name in self._own and name not in _INTERNAL
        ]

    def __bool__(self) -> bool:
        return bool(self._read)

    def broken(self) -> str | None:
        """What changed, in words; None where nothing did."""
        for name, picture in self._read:
            if snapshot(self._own.get(name, Missing)) != picture:
                return f"attribute {name!r} of {self._path} changed"
        return None


def _from_library(value: Any) -> bool:
    """Torch's own modules, classes and functions don't change under a running program."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__
    elif isinstance(value, FUNCTIONS):
        name = getattr(value, "__module__", None)
    else:
        return False  # an instance of a library's class is the user's
    return isinstance(name, str) and name.split(".")[0] in {"torch", "math", "builtins", "typing", "collections"}
