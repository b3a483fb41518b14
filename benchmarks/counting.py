"""Counts what a step asks of the device, operator by operator, without a clock: the same numbers on every machine.

A backward pass on the CPU runs in the thread that called it, hooks included, so that a dispatch mode around the step
sees all of it.  An operator that makes a view is no kernel; every other one is counted as one, which is what eager
mode launches on CUDA for the reductions and copies that matter here.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxgrad.torch_support import private

_NO_KERNEL = frozenset({
    "promote_types", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip
_SYNC = "_local_scalar_dense"
#: Calls that bring a value to the host: on a CUDA device each waits for it.
_TO_HOST = frozenset({
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__contains__", "is_nonzero",
    "equal", "allclose", "nonzero",
})  # fmt: skip


@dataclass
class Counts:
    """What a step asks for.

    Attributes:
        kernels: operators that are not views.
        bytes_read: of the tensors that they take, each once a kernel (the second look of `dot(x, x)` is at the cache).
        allocations: tensors with new memory.
        outliving: of those made inside of a Python hook of the backward pass, that are alive when it returns.
        left: that are alive after the step.
        left_bytes: and their size.
        syncs: values brought to the host.
        operators: kernels by name.
    """

    kernels: int = 0
    bytes_read: int = 0
    allocations: int = 0
    outliving: int = 0
    left: int = 0
    left_bytes: int = 0
    syncs: int = 0
    operators: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: Counts) -> Counts:
        """What this step asks for more than ``other``."""
        operators = Counter(self.operators)
        operators.subtract(other.operators)
        return Counts(
            self.kernels - other.kernels, self.bytes_read - other.bytes_read, self.allocations - other.allocations,
            self.outliving - other.outliving, self.left - other.left, self.left_bytes - other.left_bytes,
            self.syncs - other.syncs,
            Counter({name: number for name, number in operators.items() if number}),
        )  # fmt: skip


def _running_hook() -> int | None:
    """Which call of a Python hook an operator runs in: the identity of the frame that autograd called."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  # the documented way to the caller's frame
    inner = None
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            # Where autograd called the operator itself, the next frame is torch's wrapper around our mode.
            own = inner is None or inner.f_code.co_filename.endswith("_compile.py")
            return None if own else id(inner)
        inner, frame = frame, frame.f_back
    return None


class _Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._made: list[weakref.ref[Any]] = []
        self._hook: int | None = None
        self._of_hook: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        self._enter(_running_hook())
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == _SYNC:
            self.counts.syncs += 1
        elif not func.is_view and name not in _NO_KERNEL:
            self.counts.kernels += 1
            self.counts.operators[name] += 1
            written = [kwargs.get("out")] if isinstance(kwargs.get("out"), Tensor) else []
            read = [tensor for tensor in given if not any(tensor is out for out in written)]
            self.counts.bytes_read += sum(
                t.numel() * t.element_size() for t in {id(tensor): tensor for tensor in read}.values()
            )
        self._note(given, result)
        return result

    def _enter(self, hook: int | None) -> None:
        """Another hook runs than before, or none: what the last one made and still lives, outlives it."""
        if hook != self._hook:
            self.counts.outliving += sum(ref() is not None for ref in self._of_hook)
            self._of_hook, self._hook = [], hook

    def _note(self, given: list[Tensor], result: Any) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in given}  # noqa: SLF001  # a storage's identity
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:  # noqa: SLF001
                self.counts.allocations += 1
                self._made.append(weakref.ref(leaf.untyped_storage()))
                if self._hook is not None:
                    self._of_hook.append(self._made[-1])

    def finish(self) -> Counts:
        """The counts, with what is left now."""
        self._enter(None)
        left = [storage for storage in (ref() for ref in self._made) if storage is not None]
        self.counts.left, self.counts.left_bytes = len(left), sum(storage.nbytes() for storage in left)
        return self.counts


def count(step: Callable[[], Any]) -> Counts:
    """What one call of ``step`` asks for, fxgrad's own operators in the backward pass included."""
    mode = _Operators()
    # fxgrad hides its operators from a user's modes; here they are what is looked for.
    with patch.object(private, "_count_modes", lambda: 0), mode:
        step()
    return mode.finish()


class HostReads(TorchFunctionMode):
    """Counts calls that bring a tensor's values to the host, also where the tensor is on the host already.

    What ``.to("cpu")`` and ``.cpu()`` returned, and what is made of it, is on the host: reading it costs nothing more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._host: dict[int, Tensor] = {}  # by identity; held, so that an identity is not used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = any(id(tensor) in self._host for tensor in given)
        goes = name in _TO_HOST or (name == "to" and _names_cpu((args[1:], kwargs)))
        if goes and not on_host:
            self.number += 1
        result = func(*args, **kwargs)
        if goes or on_host:
            self._host.update((id(leaf), leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def _names_cpu(arguments: Any) -> bool:
    return any(str(leaf) == "cpu" for leaf in tree_leaves(arguments) if isinstance(leaf, (str, torch.device)))


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Count host reads inside of the block."""
    with HostReads() as mode:
        yield mode
