"""Names that do not depend on the front end: op words, node keys, torch.fx names, source lines, the leaf policy.

A node key is ``module path``, ``/``, op word, and ``#n`` for the n-th repetition: ``layer1.0/relu#1`` is the second
``relu`` called in the forward of ``layer1.0``.  A leaf module's key is its path: ``layer1.0.conv1``.
"""

from __future__ import annotations

import operator
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

# The operator module, torch and Tensor name one op in several ways; a key must not depend on which one was caught.
_WORDS = {
    "truediv": "div", "itruediv": "div_", "rtruediv": "div", "rdiv": "div", "true_divide": "div", "divide": "div",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "idiv": "div_", "ipow": "pow_", "imatmul": "matmul_",
    "ifloordiv": "floordiv_", "imod": "remainder_", "iand": "and_", "ior": "or_", "ixor": "xor_",
    "ilshift": "lshift_", "irshift": "rshift_",
    "radd": "add", "rsub": "sub", "rmul": "mul", "rpow": "pow", "rmatmul": "matmul", "rfloordiv": "floordiv",
    "rmod": "remainder", "mod": "remainder", "rand": "and", "ror": "or", "rxor": "xor",
    "subtract": "sub", "multiply": "mul",
}  # fmt: skip
_LIBRARY = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_STOCK_MODELS = f"{_OURS}demo.py"  # written like a user's model, and to be shown like one
#: Ops that say nothing about a tensor's values, so that no node is made of them.
METADATA = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_floating_point", "is_complex",
    "is_contiguous", "element_size", "get_device", "type", "shape", "dtype", "device", "ndim", "requires_grad",
    "is_leaf", "grad_fn", "is_cuda", "layout", "is_sparse", "is_quantized", "is_nested", "is_meta", "is_mkldnn",
    "names", "output_nr", "_version", "len",
    # Torch takes the hooks off what a custom function changed in place: before that is too early to look at it.
    "_backward_hooks", "_post_accumulate_grad_hooks",
})  # fmt: skip


def op_word(function: Callable[..., Any]) -> str:
    """The word for a function, method or attribute getter, in torch's spelling (trailing ``_``: in place)."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):  # an attribute of Tensor such as x.T
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return canonical(name, operators=getattr(function, "__module__", "") == "_operator")


def canonical(name: str, *, operators: bool = False) -> str:
    """``name`` without underscores around it and in one spelling; ``operators``: it comes from ``operator``."""
    if name.startswith("__") and name.endswith("__"):
        stem = name[2:-2]
        return _WORDS.get(stem, stem)
    if operators:
        stem = name.rstrip("_")  # operator.and_ is not in place
        return _WORDS.get(stem, stem)
    if name in ("true_divide", "divide", "subtract", "multiply"):
        return _WORDS[name]
    return {"true_divide_": "div_", "divide_": "div_", "subtract_": "sub_", "multiply_": "mul_"}.get(name, name)


def in_place(word: str) -> bool:
    """Whether an op word means that the first argument is changed in place."""
    return word == "setitem" or (word.endswith("_") and not word.endswith("__") and word != "requires_grad_")


def qualified(function: Callable[..., Any]) -> str:
    """``module.name`` of a function, as torch.fx writes targets."""
    name = getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
    module = getattr(function, "__module__", None)
    if str(name).startswith("_VariableFunctionsClass."):  # where torch.sigmoid and its like are defined
        return "torch." + str(name).partition(".")[2]
    return f"{module}.{name}" if module else str(name)


def operator_of(word: str) -> Callable[..., Any] | None:
    """The function of ``operator`` for a getitem or setitem, which torch.fx writes as operators."""
    operators: dict[str, Callable[..., Any]] = {"getitem": operator.getitem, "setitem": operator.setitem}
    return operators.get(word)


class Keys:
    """Hands out node keys in the order of the calls."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def make(self, stem: str) -> tuple[str, int]:
        """The key for the next node with this stem, and its call index."""
        index = self._count[stem]
        self._count[stem] += 1
        return (f"{stem}#{index}" if index else stem), index


def of_a_library(file: str) -> bool:
    """Whether a source file is torch's or ours, or generated."""
    return file.startswith((_LIBRARY, _OURS, "<frozen", "<eval_with_key")) and file != _STOCK_MODELS


def source_line(frame: FrameType | None = None) -> str | None:
    """``file:line`` of the innermost frame, from ``frame`` on, that is neither torch's nor ours; None without one."""
    if frame is None:
        frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files, far too slow here
    while frame is not None:
        file = frame.f_code.co_filename
        if not of_a_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is observed as one node: a ``torch.nn`` module without child modules, or compiled code.

    ``nn.Transformer*``, ``nn.MultiheadAttention`` and containers have children and are entered.
    """
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        return True
    ours = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return ours and not isinstance(module, containers) and next(module.children(), None) is None


def is_opaque(module: nn.Module) -> bool:
    """Whether a leaf module's inside is code that no front end can see."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"


def from_torch(file: str) -> bool:
    """Whether a source file belongs to torch itself."""
    return file.startswith(_LIBRARY)


def of_the_user(file: str) -> bool:
    """Whether a source file is neither torch's, nor ours, nor the standard library's."""
    if file.startswith((_LIBRARY, "<frozen")) or (file.startswith(_OURS) and file != _STOCK_MODELS):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def dtype_word(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
