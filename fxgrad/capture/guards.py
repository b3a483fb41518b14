"""Guards: what the Python of a forward read while it was traced, and whether it is still so.

A trace bakes Python state in.  Rather than find out which attribute was read, all non-tensor state of every module
whose forward was inlined is guarded, and every global that the executed code names.  A guard that trips without need
costs a capture, never a wrong number.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.torch_private import children_of, global_hooks, has_hooks

_SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_OURS = frozenset({"forward", "__deepcopy__", "__reduce_ex__", "_fxgrad_watch"})
_DEPTH = 4


class Missing:
    """Stands for an attribute or global that is not there."""


def snapshot(value: Any, depth: int = 0) -> Any:  # noqa: PLR0911  # one return a type
    """A comparable picture of Python state: simple values by value, containers and plain objects by content."""
    if isinstance(value, _SIMPLE):
        return (type(value), value)
    if isinstance(value, Tensor):
        return Tensor  # read by name at every call
    if isinstance(value, (nn.Module, types.ModuleType, *_FUNCTIONS)) or depth >= _DEPTH:
        return ("same", id(value))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(snapshot(item, depth + 1) for item in value))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(item for item in value if isinstance(item, _SIMPLE)), len(value))
    if isinstance(value, dict):
        return (type(value), tuple((str(key), snapshot(item, depth + 1)) for key, item in value.items()))
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict):
        content = tuple((key, snapshot(item, depth + 1)) for key, item in inner.items())
        return ("object", id(value), content)
    return ("same", id(value))


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
        self._simple = [(name, own[name]) for name in names if isinstance(own[name], _SIMPLE)]
        self._other = [(name, snapshot(own[name])) for name in names if not isinstance(own[name], _SIMPLE)]
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
        self._simple = isinstance(self._value, _SIMPLE)
        self._picture = None if self._simple else snapshot(self._value)
        self._saved = self._value.copy() if isinstance(self._value, (dict, list, set)) else None

    def broken(self) -> str | None:
        """What changed, in words; None where nothing did."""
        now = self._read()
        if now is self._value and (self._simple or isinstance(now, _FUNCTIONS)):
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
            getattr(self._value, "extend" if isinstance(self._saved, list) else "update")(self._saved)


class Guards:
    """All guards of one trace."""

    def __init__(self, guards: Iterable[ModuleGuard | NameGuard]) -> None:
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
            for attribute in code.co_names if not isinstance(value, _FUNCTIONS[:3]) else ():
                if isinstance(getattr(value, attribute, Missing), (*_SIMPLE, list, dict, tuple)):
                    read = lambda v=value, a=attribute: getattr(v, a, Missing)  # noqa: E731
                    guards.setdefault((id(value), attribute), NameGuard(f"{name}.{attribute}", read))
    return list(guards.values())


def class_guards(kinds: Iterable[type]) -> list[NameGuard]:
    """Guards for plain class attributes of the inlined modules' classes."""
    guards: dict[tuple[type, str], NameGuard] = {}
    for kind in kinds:
        for base in kind.__mro__:
            if base is nn.Module or base is object:
                break
            for name, value in vars(base).items():
                if not name.startswith("__") and isinstance(value, (*_SIMPLE, list, dict, tuple)):
                    read = lambda b=base, k=name: vars(b).get(k, Missing)  # noqa: E731
                    guards.setdefault((base, name), NameGuard(f"class attribute {base.__name__}.{name}", read))
    return list(guards.values())


def _from_library(value: Any) -> bool:
    """Torch's own modules, classes and functions don't change under a running program."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.split(".")[0] in {"torch", "math", "builtins", "typing", "collections"}
