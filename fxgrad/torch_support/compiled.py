"""What looks on at a forward call, and looks away while code that dynamo compiled runs.

Dynamo traces global module hooks and ``TorchFunctionMode`` like the user's own code: it breaks the graph at them, warns
of them, refuses them under ``fullgraph=True``, and compiles again once they are gone.  So nothing of ours is up while
compiled code may be traced or run: that code is then what it is without us.

There is no public word for where compiled code begins.  Every function that ``torch.compile`` returns begins with
``torch._dynamo.eval_frame.set_eval_frame`` and ends with ``_maybe_set_eval_frame``, and a compiled module is called by
``OptimizedModule.__call__``; while a call is looked on, we stand in front of these three.  Where a name is missing,
dynamo sees our hooks: noisier, not wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from fxgrad.torch_support.private import remove_global_hook

_NAMES = ("set_eval_frame", "_maybe_set_eval_frame", "OptimizedModule")
_LOCK = threading.Lock()


class Looking:
    """A function mode and a pair of global module hooks, up for the time of a ``with`` but for compiled code.

    Args:
        mode: sees functions.
        enter, leave: forward pre-hook and forward hook (with keyword arguments, also called after an error); they are
            told of a compiled module like of any other.
    """

    def __init__(self, mode: TorchFunctionMode, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self.mode = mode
        self.enter = enter
        self.leave = leave
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        """Look on."""
        self.hook()
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        _THREAD.lookings.append(self)
        _Entry.use(+1)

    def __exit__(self, *error: object) -> None:
        """Look on no longer."""
        if self in _THREAD.unhooked:  # a compiled call that began inside of this one, and that dynamo never ended
            _THREAD.ends()
        _Entry.use(-1)
        _THREAD.lookings.remove(self)
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.unhook()

    def hook(self) -> None:
        """Put the global module hooks up."""
        self._handles = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def unhook(self) -> None:
        """Take them down."""
        for handle in self._handles:
            remove_global_hook(handle)
        self._handles = []


class _Thread(threading.local):
    """Those that look on in this thread, outer ones first, and the compiled call that they look away from."""

    def __init__(self) -> None:
        self.lookings: list[Looking] = []
        self.away: Any = None
        self.unhooked: tuple[Looking, ...] = ()  # for its time
        self.put_back: Callable[[], None] | None = None

    def begins(self, call: Any) -> None:
        self.away, self.unhooked = call, tuple(self.lookings)
        for looking in reversed(self.unhooked):
            looking.unhook()
        self.put_back = _take_modes_out({id(looking.mode) for looking in self.lookings})

    def ends(self) -> None:
        if self.put_back is not None:
            self.put_back()
        unhooked, self.unhooked = self.unhooked, ()
        self.away = self.put_back = None
        for looking in unhooked:
            looking.hook()


_THREAD = _Thread()


class _Entry:
    """Stands where compiled code begins and ends, for as long as anybody looks on."""

    users = 0
    there: _Entry | None = None

    @classmethod
    def use(cls, change: int) -> None:
        """One more, or one less, looks on."""
        with _LOCK:
            cls.users += change
            if cls.users and cls.there is None:
                dynamo = sys.modules.get("torch._dynamo.eval_frame")  # else nothing is compiled yet
                if dynamo is not None and all(hasattr(dynamo, name) for name in _NAMES):
                    cls.there = cls(dynamo)
            elif not cls.users and cls.there is not None:
                cls.there.remove()
                cls.there = None

    def __init__(self, dynamo: Any) -> None:
        self._dynamo = dynamo
        self._set, self._maybe = dynamo.set_eval_frame, dynamo._maybe_set_eval_frame  # noqa: SLF001
        self._kind = dynamo.OptimizedModule
        self._call = original = self._kind.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return _compiled_module(original, module, args, kwargs)

        dynamo.set_eval_frame, dynamo._maybe_set_eval_frame = self._begins, self._ends  # noqa: SLF001
        self._kind.__call__ = call

    def remove(self) -> None:
        self._dynamo.set_eval_frame, self._dynamo._maybe_set_eval_frame = self._set, self._maybe  # noqa: SLF001
        self._kind.__call__ = self._call

    def _begins(self, callback: Any) -> Any:
        prior = self._set(callback)
        thread = _THREAD
        if thread.lookings and thread.away is None:
            frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files
            if _compiles(frame.f_code) and callable(getattr(frame.f_locals.get("self"), "callback", None)):
                thread.begins(frame)
        return prior

    def _ends(self, callback: Any) -> Any:
        prior = self._maybe(callback)
        thread = _THREAD
        # Under ``torch.compiler.set_stance("force_eager")`` the function runs as it was written: we look on.
        if thread.away is not None and not callable(callback) and thread.away is sys._getframe(1):  # noqa: SLF001
            thread.ends()
        return prior


def _compiles(code: CodeType) -> bool:
    return code.co_name in ("compile_wrapper", "_fn") and code.co_filename.endswith("eval_frame.py")


def _compiled_module(original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    thread = _THREAD
    if not thread.lookings or thread.away is not None:
        return original(module, *args, **kwargs)
    lookings = tuple(thread.lookings)
    for looking in lookings:
        looking.enter(module, args)
    result = None
    try:
        thread.begins(module)
        try:
            result = original(module, *args, **kwargs)
        finally:
            thread.ends()
    finally:
        for looking in lookings:
            looking.leave(module, args, kwargs, result)
    return result


def _take_modes_out(modes: set[int]) -> Callable[[], None]:
    """Take those of ``modes`` (ids) out of the stack of function modes; what is returned puts them back in place.

    ``torch.overrides._pop_mode`` and ``_push_mode``: a mode that lies below another cannot be left by its ``__exit__``.
    Where a name is missing, they stay.
    """
    overrides: Any = torch.overrides
    if not all(hasattr(overrides, name) for name in ("_pop_mode", "_push_mode", "_len_torch_function_stack")):
        return lambda: None

    def swap(kept: list[Any]) -> list[Any]:
        before = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())][::-1]  # noqa: SLF001
        for mode in kept or [mode for mode in before if id(mode) not in modes]:
            overrides._push_mode(mode)  # noqa: SLF001
        return before

    before = swap([])

    def put_back() -> None:
        swap(before)

    return put_back
