"""Which nodes are activations, where each of them passes no gradient on, and what dimension its units lie along.

Known by op word and by class of the leaf module; all tables are in this file.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxgrad.capture.captured import Call, Ref
from fxgrad.capture.modules import ModuleMap

NEAR = 1e-6  # of the flat end of a smooth activation: here its slope is below 1e-5 at most
_SELU = 1.0507009873554805 * 1.6732632423543772  # scale * alpha; Klambauer et al. 2017, as in torch

Limits = tuple[float | None, float | None]
#: Without settings of their own: active where the output lies strictly between.
_FIXED: dict[str, Limits] = {
    "relu": (0.0, None), "relu6": (0.0, 6.0), "hardsigmoid": (0.0, 1.0), "sigmoid": (NEAR, 1 - NEAR),
    "expit": (NEAR, 1 - NEAR), "special_expit": (NEAR, 1 - NEAR), "tanh": (NEAR - 1, 1 - NEAR),
    "softsign": (NEAR - 1, 1 - NEAR), "selu": (NEAR - _SELU, None), "softplus": (NEAR, None),
    "logsigmoid": (None, -NEAR), "log_sigmoid": (None, -NEAR),
}  # fmt: skip
#: Flat towards 0 from below: the output is negative and nearly 0 there, and -0.0 where it underflows.
_FROM_BELOW = frozenset({"gelu", "silu", "mish", "hardswish"})
#: Exactly 0 where they are flat.
_NONZERO = frozenset({"softshrink", "hardshrink"})
#: With settings: their arguments behind the input, with torch's defaults, and the attributes of the module.
_SETTINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "clamp": (("min", None), ("max", None)),
    "clip": (("min", None), ("max", None)),
    "clamp_min": (("min", None),),
    "clamp_max": (("max", None),),
    "elu": (("alpha", 1.0),),
    "celu": (("alpha", 1.0),),
    "threshold": (("threshold", None), ("value", None)),
    "maximum": (("other", None),),
    "minimum": (("other", None),),
}
_CLASSES = {
    "ReLU": "relu", "ReLU6": "relu6", "Threshold": "threshold", "Hardtanh": "hardtanh", "GELU": "gelu", "SiLU": "silu",
    "Mish": "mish", "ELU": "elu", "SELU": "selu", "CELU": "celu", "Softplus": "softplus", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softsign": "softsign",
    "LogSigmoid": "logsigmoid", "Softshrink": "softshrink", "Hardshrink": "hardshrink",
}  # fmt: skip

# ---- where units come from ---------------------------------------------------------------------------------------

_LAST = -1
#: Dimension of the units of what these return, counted from the end.
_MAKERS: dict[str, int] = {
    **{f"conv{n}d": -1 - n for n in (1, 2, 3)}, **{f"conv_transpose{n}d": -1 - n for n in (1, 2, 3)},
    **{f"Conv{n}d": -1 - n for n in (1, 2, 3)}, **{f"ConvTranspose{n}d": -1 - n for n in (1, 2, 3)},
    **dict.fromkeys((
        "linear", "bilinear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "embedding", "embedding_bag",
        "scaled_dot_product_attention", "Linear", "Bilinear", "NonDynamicallyQuantizableLinear", "Embedding",
        "EmbeddingBag", "RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell",
    ), _LAST),
}  # fmt: skip
#: Channels are dimension 1 of what these return, where it has three dimensions or more.
_BY_CHANNEL = frozenset({
    "batch_norm", "group_norm", "instance_norm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm",
    "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
})  # fmt: skip
#: Behind these nothing is known of the dimensions.
_REARRANGE = frozenset({
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "T", "mT", "H", "mH", "t", "adjoint",
    "reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "fold", "unfold", "einsum", "roll",
    "as_strided", "expand", "repeat", "tile", "Flatten", "Unflatten", "Fold", "Unfold",
})  # fmt: skip
_MOST = 64  # nodes that the walk looks at


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation: how its inactive entries are told from its output, and where its units lie.

    Attributes:
        word: which activation.
        call: the node.
        axis: dimension of the units, negative: from the end; None: not known from the graph.
        fixed: limits known from the graph, for an op whose limit is a tensor.
    """

    word: str
    call: Call
    axis: int | None
    fixed: Limits | None = None

    def inactive(self, value: Tensor, given: tuple[Any, Any] | None, modules: ModuleMap) -> Tensor | None:
        """Where the output passes no gradient on; None where its settings are no numbers.  Call under ``no_grad``.

        A NaN is never inactive.  ``given`` are the arguments of the call, where they may differ from those that were
        written down.
        """
        if self.word in _FROM_BELOW:
            return _just_below_zero(value)
        if self.word in _NONZERO:
            return value == 0
        settings = {} if self.word in _FIXED else self._settings(given, modules)
        if self.word == "threshold":
            limit, replacement = settings["threshold"], settings["value"]
            return None if limit is None else (value <= limit) | (value == replacement)
        low, high = _FIXED.get(self.word) or self.fixed or _limits(self.word, settings)
        below = None if low is None else value <= low
        above = None if high is None else value >= high
        if below is None or above is None:
            return below if above is None else above
        return below.logical_or_(above)

    def _settings(self, given: tuple[Any, Any] | None, modules: ModuleMap) -> dict[str, float | None]:
        known = _SETTINGS[self.word]
        if self.call.op == "call_module":
            module = modules.at[self.call.target].module
            return {name: _number(getattr(module, name, None)) for name, _ in known}
        args, kwargs = given if given is not None else (self.call.args, self.call.kwargs)
        found = dict(known)
        found.update(zip(found, args[1:], strict=False))
        found.update({name: value for name, value in kwargs.items() if name in found})
        if any(value is not None and _number(value) is None for value in found.values()):
            return dict.fromkeys(found)  # a tensor as limit: where it lies cannot be told from the output
        return {name: _number(value) for name, value in found.items()}

    @property
    def simple(self) -> tuple[int, float, float, float, int | None] | None:
        """Where nothing but its own output tells the inactive entries: kind, lower and upper limit, ``NEAR``, axis.

        Kinds: 0 at or beyond a limit, 1 just below zero, 2 exactly zero; None for an op with settings.
        """
        kind = 1 if self.word in _FROM_BELOW else 2 if self.word in _NONZERO else 0
        if kind == 0 and self.word not in _FIXED:
            return None
        low, high = _FIXED.get(self.word, (None, None))
        none = math.nan  # which no value is below or above
        return kind, none if low is None else low, none if high is None else high, NEAR, self.axis

    def dimension(self, value: Tensor) -> int:
        """The dimension of the units of ``value``, which has one at least."""
        axis = self.axis
        if axis is None:
            return 1 if value.ndim >= 4 else value.ndim - 1  # noqa: PLR2004  # (batch, channel, height, width)
        axis += value.ndim if axis < 0 else 0
        return axis if 0 <= axis < value.ndim else value.ndim - 1


def _just_below_zero(value: Tensor) -> Tensor:
    """Where a value is -0.0 or at most ``NEAR`` below 0: as integers, the bits of negative numbers grow with -value."""
    kind, limit = _bits_of_near(value.dtype)
    return value.view(kind) <= limit


@functools.cache
def _bits_of_near(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return kind, int(torch.tensor(-NEAR, dtype=dtype, device="cpu").view(kind).item())


def _limits(word: str, settings: Mapping[str, float | None]) -> Limits:
    if word in ("elu", "celu"):
        alpha = settings["alpha"]
        return (None, None) if alpha is None or alpha <= 0 else (NEAR - alpha, None)
    if word == "hardtanh":
        return settings["min_val"], settings["max_val"]
    return settings.get("min"), settings.get("max")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, numbers.Real) and not math.isnan(value) else None


def gate_of(calls: Sequence[Call], number: int) -> Gate | None:
    """The gate of call ``number``; None where it is no activation."""
    call = calls[number]
    fixed: Limits | None = None
    if call.op == "call_module":
        word = _CLASSES.get(call.module_type, "")
    elif call.op in ("call_function", "call_method"):
        word = call.word.strip("_")  # F.threshold is called _threshold
    else:
        return None
    if word in ("maximum", "minimum"):
        limit = _constant_operand(calls, call)
        if limit is None:
            return None
        fixed = (limit, None) if word == "maximum" else (None, limit)
    elif word not in _FIXED and word not in _SETTINGS and word not in _FROM_BELOW and word not in _NONZERO:
        return None
    return Gate(word, call, _Walk(calls).axis(number), fixed)


def from_settings(call: Call) -> bool:
    """Whether the limits of an activation come from the arguments of its call."""
    return call.op != "call_module" and call.word.strip("_") in _SETTINGS


def units_of(call: Call) -> int | None:
    """The dimension of the units that a convolution, linear or matmul-like call makes, negative; else None."""
    return _MAKERS.get(call.module_type if call.op == "call_module" else call.word)


# ---- the walk ----------------------------------------------------------------------------------------------------


class _Walk:
    """From an activation back to what made its units."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._seen: set[Ref] = set()

    def axis(self, number: int) -> int | None:
        """Where the units of what call ``number`` returned lie; None where nothing tells."""
        call = self._calls[number]
        dimensions = len(call.outputs[0].shape) if call.outputs else 0
        for ref in self._inputs(call):
            source = self._calls[ref.call]
            output = next((out for out in source.outputs if out.position == ref.position), None)
            if ref in self._seen or output is None or len(output.shape) != dimensions or len(self._seen) > _MOST:
                continue
            self._seen.add(ref)
            found = self._made_by(source, dimensions)
            if found is None and self._passes(source):
                found = self.axis(ref.call)
            if found is not None:
                return found
        return None

    @staticmethod
    def _inputs(call: Call) -> Iterator[Ref]:
        return (ref for _, ref in call.uses())

    @staticmethod
    def _made_by(call: Call, dimensions: int) -> int | None:
        word = call.module_type if call.op == "call_module" else call.word
        if word in _BY_CHANNEL:
            return 1 if dimensions >= 3 else _LAST  # noqa: PLR2004  # (batch, channel, ...)
        return _MAKERS.get(word)

    @staticmethod
    def _passes(call: Call) -> bool:
        word = call.module_type if call.op == "call_module" else call.word.rstrip("_")
        return call.op not in ("placeholder", "external") and word not in _REARRANGE


#: Ops that return one number in every entry, and where that number stands among their arguments.
_CONSTANT: dict[str, float] = {
    "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0,
}  # fmt: skip
_GIVEN = {"full": 1, "full_like": 1, "new_full": 2, "tensor": 0, "as_tensor": 0, "scalar_tensor": 0, "new_tensor": 1}


def _constant_operand(calls: Sequence[Call], call: Call) -> float | None:
    """The number that a two-operand op compares with; None where both operands are computed."""
    for operand in (*call.args, *call.kwargs.values()):
        maker = calls[operand.call] if isinstance(operand, Ref) else None
        if maker is None:
            continue
        if maker.word in _CONSTANT:
            return _CONSTANT[maker.word]
        place = _GIVEN.get(maker.word, len(maker.args))
        number = _number(maker.args[place]) if place < len(maker.args) else None
        if number is not None:
            return number
    return None
