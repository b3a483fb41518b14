"""The only place that uses names of torch which are not public API (those of single passes: ``private_passes``).

Each function says which name it uses, why no public one does, and what happens where it is missing.
``tests/test_torch_private.py`` exercises every one on the installed torch.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx
import torch.nn.modules.module as _module
from torch import Tensor, nn
from torch.utils import _python_dispatch

from fxgrad.errors import CaptureError, OptionError


def without_torch_function() -> AbstractContextManager[Any]:
    """A context in which our own tensor calls do not come back to us through a TorchFunctionMode.

    ``torch._C.DisableTorchFunction``: the documented ``DisableTorchFunctionSubclass`` leaves modes on.  Without
    it our calls are seen by our own mode, which ignores them (slower, not wrong).
    """
    switch = getattr(torch._C, "DisableTorchFunction", None)  # noqa: SLF001
    context: AbstractContextManager[Any] = switch() if switch is not None else nullcontext()
    return context


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which the operators of our own statistics are seen by no ``TorchDispatchMode`` of the user's.

    ``torch.utils._python_dispatch._disable_current_modes``; without it, or the count of modes, they are seen.
    """
    if not _count_modes():
        return nullcontext()
    off = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
    context: AbstractContextManager[Any] = off()
    return context


_count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # noqa: SLF001


def _no_transform() -> None:
    return None


# ``torch._C._functorch.peek_interpreter_stack``: there is no public question.  Without it, no transform is ever seen.
_transform: Callable[[], object | None] = getattr(
    getattr(torch._C, "_functorch", None),  # noqa: SLF001
    "peek_interpreter_stack",
    _no_transform,
)


def functorch_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) is running in this thread."""
    return _transform() is not None


def version_of(tensor: Tensor) -> int:
    """How often the memory of ``tensor`` was changed in place (``Tensor._version``, shared with its views).

    An inference tensor does not count; its version is 0.
    """
    try:
        return tensor._version  # noqa: SLF001
    except RuntimeError:
        return 0


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that ``tensor`` is a differentiable view of, or None (``Tensor._base``)."""
    return tensor._base  # noqa: SLF001


def storage_of(tensor: Tensor) -> object | None:
    """A stand-in for the memory of ``tensor``: equal for one memory, and while it lives no other memory gets its place.

    ``torch.multiprocessing.reductions.StorageWeakRef``, which torch's own compiler uses for the same end; it keeps no
    memory alive.  None where it is missing: every tensor then counts as one with memory of its own.
    """
    kind = getattr(torch.multiprocessing.reductions, "StorageWeakRef", None)
    return None if kind is None else kind(tensor.untyped_storage())


_foreach_norm: Callable[..., Iterable[Tensor]] | None = getattr(torch, "_foreach_norm", None)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> Iterable[Tensor]:
    """The l2 norm of each of ``tensors``, all of one dtype and device, accumulated in ``dtype``.

    ``torch._foreach_norm``, which torch's own ``clip_grad_norm_`` uses: the public multi-tensor calls give one norm of
    all.  It takes a dtype since torch 2.4.  Without it, one call each: slower, not wrong.
    """
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    return _foreach_norm(tensors, 2, dtype)


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the running backward pass ends; False where torch offers no way.

    ``Variable._execution_engine.queue_callback``, which DistributedDataParallel uses for the same end.  Where it
    is missing, an event ends at the next forward call, at a second gradient of one site, or when it is read.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:
        return False
    try:
        queue(callback)
    except RuntimeError:  # called outside of a backward pass
        return False
    return True


def _thread_number() -> int:
    return -2 - threading.get_ident()


#: A number of the backward pass that runs in this thread, the same in all its device threads.
#: ``torch._C._current_graph_task_id``: two concurrent backwards cannot be told apart without it, so the fall-back is
#: the thread, which is right for one device.
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _thread_number)  # noqa: SLF001


def forget_empty_hooks(tensor: Tensor) -> None:
    """Give a leaf whose last hook was removed back as it was before the first.

    ``Tensor._backward_hooks``: torch keeps the empty dictionary, and every backward pass looks into it (0.5 us each,
    3 % of a step of 66 tiny parameters).  Where the name is missing, that stays.
    """
    if getattr(tensor, "_backward_hooks", None) == {}:
        tensor._backward_hooks = None  # noqa: SLF001


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The registry of submodules itself (``Module._modules``): ``named_children`` skips duplicates and None."""
    return module._modules  # noqa: SLF001


def registries_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The non-empty registries of submodules, parameters and buffers themselves, to see a swap at little cost."""
    own = module.__dict__
    for name in ("_modules", "_parameters", "_buffers"):
        if own.get(name):
            yield own[name]


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` carries hooks of its own around its call; torch offers no public question."""
    own = module.__dict__
    return bool(
        own.get("_forward_hooks")
        or own.get("_forward_pre_hooks")
        or own.get("_backward_hooks")
        or own.get("_backward_pre_hooks")
    )


def tampered(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its class's forward: hooks of its own, or a forward put in place."""
    return has_hooks(module) or "forward" in module.__dict__


def global_hooks() -> Iterator[object]:
    """The process-wide module hooks that are registered now; torch offers no public question."""
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    ):
        yield from getattr(_module, name, {}).values()


def remove_global_hook(handle: Any) -> None:
    """Remove a global module hook, with the entry that ``RemovableHandle.remove`` leaves behind.

    torch 2.14 keeps the number of a hook that takes keyword arguments in ``_global_forward_hooks_with_kwargs``, and
    then believes for good that there are global hooks.
    """
    handle.remove()
    getattr(_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


def acts_after_accumulation(parameter: Tensor) -> bool:
    """Whether a post-accumulate hook is registered on ``parameter`` (an optimizer that steps in the backward)."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def loss_scale_of(scaler: Any) -> Tensor | None:
    """The tensor that a ``torch.amp.GradScaler`` keeps its scale in, None before its first use (``GradScaler._scale``).

    The public ``get_scale`` waits for the device, and ``scale`` would set an unused scaler up on the device of what it
    is given.  Where the name is missing, flows have no loss scale.
    """
    scale = getattr(scaler, "_scale", None)
    return scale.detach() if isinstance(scale, Tensor) else None


def compiled_original(module: nn.Module) -> nn.Module | None:
    """The model inside of a ``torch.compile``d module, or None (``OptimizedModule._orig_mod``)."""
    return children_of(module).get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def graph_in_the_making() -> bool:
    """Whether ``torch.jit.trace``, ``torch.export`` or ``torch.fx`` writes down what runs now.

    ``torch._C._is_tracing`` is ``torch.jit.is_tracing`` without its detour; of torch.fx there is no documented
    question, and without this one a watched submodule is observed while a parent is traced.  It is slow, and asked only
    where somebody has replaced ``nn.Module.__call__``, as torch.fx does for the time of a trace.
    """
    if torch._C._is_tracing() or _compiles_here():  # noqa: SLF001
        return True
    return nn.Module.__call__ is not _MODULE_CALL and _fx_traces()


def _compiles_here() -> bool:
    """Whether dynamo or torch.export is at work in this thread; ``torch.compiler.is_compiling`` answers for all.

    ``torch._guards.TracingContext`` and ``CompileContext``, which are kept by thread.  Without them, any thread counts.
    """
    if not torch.compiler.is_compiling():
        return False
    home = sys.modules.get("torch._guards")
    asks = [getattr(getattr(home, name, None), "try_get", None) for name in ("TracingContext", "CompileContext")]
    return any(ask is None or ask() is not None for ask in asks)


_MODULE_CALL = nn.Module.__call__
_fx_traces: Callable[[], bool] = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: False)  # noqa: SLF001


#: How many autograd nodes this thread has made; the same number twice means that no differentiable code ran between.
#: ``torch._C._autograd._get_sequence_nr``, which AOTAutograd uses to match forward and backward; no public question.
#: Without it every reading differs from the one before, so that hidden code is always suspected.
sequence_number: Callable[[], int] = getattr(
    getattr(torch._C, "_autograd", None),  # noqa: SLF001
    "_get_sequence_nr",
    itertools.count().__next__,
)


@contextlib.contextmanager
def entering_wrapped_functions() -> Iterator[None]:
    """Functions given to ``torch.fx.wrap`` are traced like any others, not kept as one node.

    ``torch.fx._symbolic_trace._wrapped_fns_to_patch``, the register that a Tracer patches module globals from; it
    offers no switch.  Where it is missing, such functions stay one node, and a model that calls one is refused.
    """
    register = getattr(torch.fx._symbolic_trace, "_wrapped_fns_to_patch", {})  # noqa: SLF001
    saved = dict(register)
    register.clear()
    try:
        yield
    finally:
        register.update(saved)


def checkpointing_entry() -> tuple[Any, str]:
    """Where every non-reentrant checkpoint passes: a module and the name of a function in it.

    ``torch.utils.checkpoint._checkpoint_without_reentrant_generator``; users import the public ``checkpoint`` itself,
    so that putting another in its place would not reach them.  Where the name is missing, the public one is taken, and
    a checkpoint in a model that is traced may be lost, as it is with ``torch.fx.symbolic_trace``.
    """
    import torch.utils.checkpoint as home

    name = "_checkpoint_without_reentrant_generator"
    return home, name if hasattr(home, name) else "checkpoint"


def show_graph(module: Any, graph: Any, code: str) -> None:
    """Make ``graph``, whose code is generated already, the one that an ``fx.GraphModule`` shows.

    ``GraphModule._graph`` and ``_code``: the public way, assigning ``graph``, generates the code again (10 ms for a
    ResNet-50), at every change between train and eval.
    """
    graph.owning_module = module
    module.__dict__["_graph"] = graph
    module.__dict__["_code"] = code


def under_a_mode() -> bool:
    """Whether a Python mode would see our calls (fake tensors, functionalisation, a TorchDispatchMode).

    ``torch.utils._python_dispatch._get_current_dispatch_mode``.  Without it, none is ever seen; a kernel is compared
    with plain torch before it is used in any case.
    """
    module = getattr(torch.utils, "_python_dispatch", None)
    current = getattr(module, "_get_current_dispatch_mode", None)
    return current is not None and current() is not None


def fake_mode() -> Any:
    """A new ``torch._subclasses.FakeTensorMode``, which ``torch.compile`` itself stands on; no public name has it.

    Raises:
        CaptureError: this torch has none; the function engine cannot work then.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        message = f"torch {torch.__version__} has no fake tensors, which engine='function' needs; use engine='hook'"
        raise CaptureError(message) from error
    return FakeTensorMode(allow_non_fake_inputs=True)


def clear_hooks(module: nn.Module) -> None:
    """Take all hooks off ``module``, a copy of ours, without handles (the registries that ``has_hooks`` reads)."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        registry = module.__dict__.get(name)
        if registry:
            registry.clear()


def inner_compiler(name: Any) -> Any:
    """The backend of this name (``torch._dynamo.lookup_backend``); a function is one already.

    Raises:
        OptionError: torch knows no such backend.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend as error:
        message = f"inner={name!r} is not a backend of torch.compile; torch.compiler.list_backends() names them"
        raise OptionError(message) from error


def plain_number(value: Any) -> Any:
    """The number that a ``torch.SymInt`` stood for when its graph was made (``.node.hint``); else the value.

    ``int()`` would tell dynamo that the graph is good for this number only.
    """
    return getattr(value.node, "hint", None) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


#: The code of ``Module._call_impl``, in whose frame the module that is being called is ``self``: while an operator
#: runs, nothing public says inside of which modules.  Without it, operators belong to the model itself.
_CALL_CODE: types.CodeType | None = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)


def module_called_in(frame: types.FrameType) -> Any:
    """The module whose call ``frame`` is; None for any other frame."""
    return frame.f_locals.get("self") if frame.f_code is _CALL_CODE else None


def module_has_returned(frame: types.FrameType) -> bool:
    """Whether the forward of the module whose call ``frame`` is has returned: its forward hooks are running."""
    return frame.f_code is _CALL_CODE and frame.f_locals.get("result") is not None


def compiled_autograd_on() -> bool:
    """Whether backward passes are compiled now (``torch._dynamo.compiled_autograd``), which takes Python hooks only.

    Where the name is missing, such passes are not recorded by C++ hooks: their sites are told as not reached.
    """
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def compiled_code() -> bool:
    """Whether dynamo has compiled anything in this process since it was last reset.

    ``torch._dynamo.convert_frame.FRAME_COUNTER``: there is no public question.  Where the name is missing, the answer
    is yes, once dynamo is loaded.
    """
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return loaded is not None and getattr(loaded, "FRAME_COUNTER", 1) > 0


def referenced(tensor: Tensor) -> bool:
    """Whether anything but the caller's two references (a container, a variable) holds a tensor: Python or autograd.

    ``Tensor._use_count`` counts what C++ holds, such as a graph; where it is missing, the answer is always yes.
    """
    count = getattr(tensor, "_use_count", None)
    return count is None or sys.getrefcount(tensor) > _UNREFERENCED or count() > 1


_UNREFERENCED = 4  # references: the caller's two, the parameter above, and that of ``getrefcount``
