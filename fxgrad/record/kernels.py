"""The reductions of level ``full`` as one compiled kernel each, and when they are compiled.

``torch.compile`` makes a kernel of one pass over the gradient: C++ on the CPU, Triton on CUDA.  Compiling takes seconds
(measured: 2 to 20), so plain torch does the work until it has cost as much in this process; a short run never waits.
Compiling happens before a forward call, never inside of a backward pass.  A kernel that can't be made, or that doesn't
agree with plain torch on values chosen for trouble, is not used; a warning says so once.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxgrad.record.statistics import FLUSH, OVERFLOW, columns, whole
from fxgrad.torch_private import captured_kernel, current_backward, under_a_mode

BREAK_EVEN = 2.0  # seconds that plain torch may take at ``full``, in one process, before kernels are compiled
LIMIT = 2**31  # entries of a gradient that a kernel can count
_COMPILED = (torch.float32, torch.float16, torch.bfloat16)
_SIGN = 0x7FFFFFFF  # mask that takes the sign off the bits of a float32
_INF = 0x7F800000
Kernel = Callable[[Tensor], Tensor]
#: Device, the gradients' dtype, and whether the kernel reduces rows (of float32) or a flat gradient.
Key = tuple[torch.device, torch.dtype, bool]


def _bits(value: float) -> int:
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found


def _scalars(values: Tensor, bits: Tensor, tiny: float, counter: torch.dtype) -> Tensor:
    """The columns of float32 ``values``, whose bits are ``bits``, over the last dimension.

    The bits of a modulus are in the order of the moduli, NaN last, and a difference of them shifted by 31 is -1 where
    it is negative: counting so takes neither a mask nor a branch, and is exact whatever the mode for subnormals is.
    """
    modulus = bits & _SIGN
    finite = torch.where(modulus < _INF, values, 0.0)
    wide = finite.to(torch.float64)

    def below(limit: int) -> Tensor:
        return -((modulus - limit) >> 31).to(counter).sum(-1, dtype=counter).to(torch.float64)

    numbers, limited, zero = below(_INF + 1), below(_INF), below(1)
    return torch.stack([
        wide.sum(-1),
        wide.abs().sum(-1),
        (wide * wide).sum(-1),
        finite.abs().amax(-1).to(torch.float64),
        torch.where((modulus > 0) & (modulus < _INF), values.abs(), math.inf).amin(-1).to(torch.float64),
        values.shape[-1] - numbers,
        numbers - limited,
        zero,
        below(_bits(FLUSH)) - zero,
        below(_bits(tiny)) - zero,
        limited - below(_bits(OVERFLOW) + 1),
    ])  # fmt: skip


def _flat_half(values: Tensor, tiny: float) -> Tensor:
    """The columns of a flat half-precision gradient; float32 holds its subnormals as normal numbers or exactly."""
    wide = values.to(torch.float32)
    modulus = wide.abs()
    limited = modulus < math.inf
    finite = torch.where(limited, wide, 0.0).to(torch.float64)

    def count(which: Tensor) -> Tensor:
        return which.to(torch.int32).sum(-1, dtype=torch.int32).to(torch.float64)

    zero, over = count(modulus == 0), count(modulus > OVERFLOW)
    infinite = count(modulus == math.inf)
    return torch.stack([
        finite.sum(-1),
        finite.abs().sum(-1),
        (finite * finite).sum(-1),
        torch.where(limited, modulus, 0.0).amax(-1).to(torch.float64),
        torch.where((modulus > 0) & limited, modulus, math.inf).amin(-1).to(torch.float64),
        count(modulus != modulus),  # noqa: PLR0124  # NaN is what differs from itself
        infinite,
        zero,
        count(modulus < FLUSH) - zero,
        count(modulus < tiny) - zero,
        over - infinite,
    ])  # fmt: skip


def _function(dtype: torch.dtype, *, rows: bool) -> Any:
    tiny = torch.finfo(dtype).tiny
    if rows:  # float32 counts a row exactly, and adds up its lanes faster than int32
        return lambda values, bits: _scalars(values, bits, tiny, torch.float32)
    if dtype is torch.float32:
        return lambda values, bits: _scalars(values, bits, tiny, torch.int32)
    return lambda values: _flat_half(values, tiny)


class Kernels:
    """The compiled kernels of this process.

    Attributes:
        spent: seconds that plain torch has taken at ``full``.
        failed: kernels that could not be had, and why.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.failed: dict[Key, str] = {}
        self._ready: dict[Key, Kernel] = {}
        self._wanted: set[Key] = set()
        self._lock = threading.Lock()

    # ---- reducing --------------------------------------------------------------------------------------------

    def rows(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The columns of rows of float32, shape (11, rows): each row is a part of a gradient of ``dtype``."""
        key = (values.device, dtype, True)
        kernel = self._ready.get(key)
        return kernel(values) if kernel is not None else self._plainly(key, lambda: columns(values, dtype))

    def whole(self, gradient: Tensor) -> Tensor:
        """The columns of a strided gradient, shape (11,)."""
        dtype = gradient.dtype
        if dtype not in _COMPILED or not 0 < gradient.numel() < LIMIT or type(gradient) is not Tensor:
            return whole(gradient)
        key = (gradient.device, dtype, False)
        kernel = self._ready.get(key)
        if kernel is None:
            return self._plainly(key, lambda: whole(gradient))
        return kernel(flat(gradient))

    def _plainly(self, key: Key, reduce: Callable[[], Tensor]) -> Tensor:
        self._wanted.add(key)
        begin = time.perf_counter()
        result = reduce()
        self.spent += time.perf_counter() - begin
        return result

    # ---- compiling -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compile what is wanted, once plain torch has cost enough.

        Not inside of a backward pass (a checkpoint may call a watched model there), nor where a mode or a CUDA graph
        would record what the compiler does.
        """
        if self.spent < BREAK_EVEN or not self._wanted:
            return
        if current_backward() >= 0 or under_a_mode() or _capturing():
            return
        with self._lock:
            wanted, self._wanted = self._wanted, set()
            for key in wanted - self._ready.keys() - self.failed.keys():
                try:
                    self._ready[key] = compiled(key)
                except Exception as error:  # noqa: BLE001  # whatever a compiler runs into, plain torch can do it
                    self.failed[key] = f"{type(error).__name__}: {error}".splitlines()[0]
                    _say(self.failed[key])


def _capturing() -> bool:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and torch.cuda.is_current_stream_capturing()


def _say(reason: str) -> None:
    message = f"fxgrad measures statistics='full' with plain torch, several times slower than compiled: {reason}"
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # warnings are errors here; a training step must not end on this one
        return


def compiled(key: Key) -> Kernel:
    """The kernel of ``key``, compiled and compared with plain torch.

    Raises:
        RuntimeError: there is no compiler, or the kernel's results are not those of plain torch.
    """
    device, dtype, rows = key
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        message = "torch.compile is switched off by its environment variable"
        raise RuntimeError(message)
    values = _trouble(dtype).to(device)
    bits = dtype is torch.float32 or rows
    if rows:
        values = values.to(torch.float32).view(-1, 1024)
    name = f"fxgrad_{'rows' if rows else 'flat'}_{dtype}_{device}"
    examples = [values, values.view(torch.int32)] if bits else [values]
    found = captured_kernel(name, _function(dtype, rows=rows), examples)

    def kernel(values: Tensor) -> Tensor:
        size = values.shape[0]
        (result,) = found(size, values, values.view(torch.int32)) if bits else found(size, values)
        return result  # type: ignore[no-any-return]

    for part in (values, values[1:], values[: values.shape[0] // 2]):
        got = kernel(part)
        want = columns(part, dtype)
        if not torch.allclose(got, want, rtol=1e-9, atol=0.0):
            message = f"the compiled kernel for {dtype} on {device} does not agree with plain torch"
            raise RuntimeError(message)
    return kernel


def _trouble(dtype: torch.dtype) -> Tensor:
    """Values that reductions get wrong, in ``dtype``; 16 rows of 1,024."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    values = torch.randn(16 * 1024, generator=generator, dtype=torch.float32, device="cpu")
    values[1024:2048] *= 1e-30
    values[2048:3072] *= 1e30
    values[3072:4096] *= 1e-42
    values[4096:5120] = math.nan
    values[5120:5124] = torch.tensor([math.inf, -math.inf, 0.0, -0.0], device="cpu")
    values[6144:7168] *= 2.0**-25
    values[7168:8192] *= OVERFLOW
    values[8192:9216] = 0
    return values.to(dtype)


def flat(gradient: Tensor) -> Tensor:
    """The entries of ``gradient`` in one dimension, in any order: a view where its memory has no gaps, else a copy."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    order = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1).contiguous()


kernels = Kernels()
