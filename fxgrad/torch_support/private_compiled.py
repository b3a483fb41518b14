"""What a compiled module calls, and the same compiled once more with another backend.

``torch.compile`` says of nothing that it returns with which backend and options it was made.  ``OptimizedModule`` keeps
that in ``dynamo_ctx``, and what ``Module.compile`` made has it in its closure; ``innermost_backend`` takes dynamo's own
wrappers off.  Where a name is missing, a compiled model cannot be watched, and the error says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxgrad.torch_support.private import compiled_original


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """The compiled code that a module runs when it is called.

    Attributes:
        owner: the module that is called: what ``torch.compile`` returned, or the one whose ``compile`` was called.
        model: the original.
        attribute: of ``owner``, under which the code stands in its ``__dict__``.
        backend: what compiles its graphs, with its own options; None where that cannot be told.
        options: further arguments of ``torch.compile``.
    """

    owner: nn.Module
    model: nn.Module
    attribute: str
    backend: str | Callable[..., Any] | None
    options: dict[str, Any]

    @property
    def code(self) -> Callable[..., Any]:
        """What stands there now."""
        found: Callable[..., Any] = self.owner.__dict__[self.attribute]
        return found

    def again(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """The same, compiled with another backend; nothing is compiled before the first call."""
        made: Any = self.model if self.attribute == "forward" else self.model._call_impl  # noqa: SLF001
        # Lightning stands in front of torch.compile, and writes what was given into the model.
        compiled: Any = inspect.unwrap(torch.compile)(made, backend=backend, **self.options)
        found: Callable[..., Any] = compiled.forward if self.attribute == "forward" else compiled
        return found


def compiled_call_of(module: Any) -> CompiledCall | None:
    """The compiled code that ``module(...)`` runs, or None where its call is Python."""
    if not isinstance(module, nn.Module):
        return None
    original = compiled_original(module)
    if original is not None:
        return _call(module, original, "forward", getattr(module, "dynamo_ctx", None))
    code = module.__dict__.get("_compiled_call_impl")
    if code is None:
        return None
    return _call(module, module, "_compiled_call_impl", _context_in(code))


def called_as_compiled(module: nn.Module) -> bool:
    """Whether a call that reaches the Python of ``module`` now was made of code that is compiled.

    ``torch._dynamo.eval_frame._is_in_optimized_module``, and ``_compiled_call_impl`` of the module itself.  Where a
    name is missing, nobody is told.
    """
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    asked = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_is_in_optimized_module", None)
    return bool(asked is not None and asked())


def _call(owner: nn.Module, model: nn.Module, attribute: str, context: Any) -> CompiledCall:
    options = {"fullgraph": bool(getattr(context, "fullgraph", False)), "dynamic": getattr(context, "_dynamic", None)}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # else both share one limit of compilations
        options["isolate_recompiles"] = True
    return CompiledCall(owner, model, attribute, _backend_of(context), options)


def _context_in(code: Any) -> Any:
    cells = (cell.cell_contents for cell in getattr(code, "__closure__", None) or ())
    return next((one for one in cells if hasattr(one, "callback") and hasattr(one, "fullgraph")), None)


def _backend_of(context: Any) -> str | Callable[..., Any] | None:
    callback: Any = getattr(context, "callback", None)
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend  # noqa: SLF001
    if getattr(callback, "kwargs", None) == {} and getattr(callback, "compiler_name", None) in ("eager", "aot_eager"):
        return str(callback.compiler_name)
    return callback if callable(callback) else None


__all__ = ["CompiledCall", "called_as_compiled", "compiled_call_of"]
