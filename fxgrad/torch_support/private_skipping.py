"""Our own code stays Python where a backward pass runs inside of a function that is compiled.

Dynamo looks at every Python frame that runs below a compiled function, and so at the hooks of a backward pass that is
called there: it would make graphs of them, break them, and warn of what they call.  ``torch.compiler.disable`` puts a
frame around each call; ``skip_code`` of ``torch._dynamo.eval_frame`` marks code, which then costs nothing.  Where it is
missing, dynamo compiles our hooks: slower, not wrong.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

#: What runs in a backward pass or between two; not what a compiler has to see (``fxgrad.probes.function``).
_ROOMS = (
    "fxgrad.record.", "fxgrad.engine.", "fxgrad.courses.", "fxgrad.native.", "fxgrad.rewriting.",
    "fxgrad.torch_support.", "fxgrad.handles.compiled_watch", "fxgrad.handles.dynamo_", "fxgrad.handles.watching",
)  # fmt: skip
#: Where a compiled forward comes to a watched one: dynamo has to see it, to say why it makes no graph of it.
_SEEN = ("fxgrad.engine.face", "fxgrad.engine.forward_patch")
_done: set[str] = set(_SEEN)


def leave_to_python() -> None:
    """Mark the functions of those of our modules that are loaded by now.  May be called often."""
    from torch._dynamo import eval_frame

    skip: Callable[[types.CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is None:
        return
    for name in [name for name in tuple(sys.modules) if name.startswith(_ROOMS) and name not in _done]:
        _done.add(name)
        for code in _codes(sys.modules[name]):
            skip(code)


def _codes(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of all functions that a module defines, those inside of others too."""
    for value in tuple(vars(module).values()):
        members = (value, *vars(value).values()) if isinstance(value, type) else (value,)
        for member in members:
            for function in _functions(member):
                if function.__module__ == module.__name__:
                    yield from _with_inner(function.__code__)


def _functions(member: object) -> Iterator[types.FunctionType]:
    found: tuple[object, ...] = (member,)
    if isinstance(member, property):
        found = (member.fget, member.fset)
    elif isinstance(member, (staticmethod, classmethod)):
        found = (member.__func__,)
    for one in found:
        inner = getattr(one, "__wrapped__", None)  # of functools.wraps and contextmanager
        yield from (function for function in (one, inner) if isinstance(function, types.FunctionType))


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


__all__ = ["leave_to_python"]
