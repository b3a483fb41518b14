"""Which operation first makes finite numbers into others, found in plain torch: every call is replayed on its own.

It shares nothing with what the library does: calls are caught by a ``TorchFunctionMode`` in one run, and each is then
run again, alone, on copies of its inputs and with the gradient that arrived at its output.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.faults.program import Built, Ran

_QUIET = ("size", "dim", "__get__", "__set__", "shape", "backward", "is_floating_point")
#: They put -inf where it was asked for; that is no fault by itself.
_ON_PURPOSE = ("masked_fill", "masked_fill_", "tensor", "full", "full_like", "where")


@dataclass
class Call:
    """A call of a torch function, and the gradients that arrived at its outputs.

    Attributes:
        function, spec, leaves: what was called with what; tensors are copies.
        wanted: which of the leaves required a gradient.
        outputs: what it returned.
        has_nan, finite: whether the outputs held NaN, or finite numbers only, when it returned.
        arrived: gradients by number of the output.
    """

    function: Any
    spec: Any
    leaves: list[Any]
    wanted: list[bool]
    outputs: list[Tensor]
    has_nan: bool
    finite: bool
    arrived: dict[int, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.function, "__name__", str(self.function)).strip("_")

    def inputs(self) -> list[Tensor]:
        """The floating inputs."""
        return [x for x in self.leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]


class _Catch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        leaves, spec = tree_flatten((args, kwargs or {}))
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _QUIET:
            outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
            # asked now: a later call may write into these outputs
            call = Call(
                func, spec, copies, wanted, outputs, any(bool(o.isnan().any()) for o in outputs), _finite(outputs)
            )
            self.calls.append(call)
            for index, output in enumerate(outputs):
                if output.requires_grad:
                    output.register_hook(_keeper(call, index))
        return result


def _keeper(call: Call, index: int):
    def keep(gradient: Tensor | None) -> None:
        if gradient is not None:
            call.arrived[index] = gradient.detach().clone()

    return keep


def calls_of(built: Built) -> list[Call]:
    """All calls of the model's forward, after a backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _Catch() as caught:
            output = built.model(*built.args)
        built.loss(output).backward()
    return caught.calls


def origins(built: Built) -> list[str]:
    """Names of the guilty functions, the first to mend first.

    A call that makes NaN where its inputs hold none goes before one that gets a finite gradient and hands back another,
    and that before one whose finite inputs give an infinite value (which alone may be meant).
    """
    calls = calls_of(built)
    forward_nan, forward_inf, backward = [], [], []
    for call in calls:
        ins = call.inputs()
        if call.has_nan and not any(x.isnan().any() for x in ins):
            forward_nan.append(call.name)
        if not call.finite and _finite(ins) and call.name not in _ON_PURPOSE:
            forward_inf.append(call.name)
        if call.arrived and _finite(call.arrived.values()) and not _finite(_replayed(call)):
            backward.append(call.name)
    return _unique(forward_inf[:1] + forward_nan[:1] + backward[::-1])


def _replayed(call: Call) -> list[Tensor]:
    """Gradients of the inputs of this call alone."""
    leaves = [x.requires_grad_() if needed else x for x, needed in zip(call.leaves, call.wanted, strict=True)]
    wanted = [x for x, needed in zip(leaves, call.wanted, strict=True) if needed]
    # clones, for a call that writes into its input
    given = [x.clone() if needed else x for x, needed in zip(leaves, call.wanted, strict=True)]
    args, kwargs = tree_unflatten(given, call.spec)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        result = call.function(*args, **kwargs)
    outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    pairs = [(outputs[i], g) for i, g in call.arrived.items() if outputs[i].requires_grad]
    if not pairs or not wanted:
        return []
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [g for g in found if g is not None]


def _finite(tensors: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def gain(call: Call) -> float:
    """L2 norm of the gradients that a call sends to its inputs, over that of what arrived at its outputs.

    Of several inputs the first that got a gradient counts, but for ``cat``: that is the gain along the path.
    """
    replayed = _replayed(call)
    sent = math.sqrt(sum(g.double().norm().item() ** 2 for g in (replayed if call.name == "cat" else replayed[:1])))
    arrived = math.sqrt(sum(g.double().norm().item() ** 2 for g in call.arrived.values()))
    return sent / arrived if arrived else math.nan


def ran(built: Built) -> Ran:
    """The program's own training run; each ``backward`` is noted with its loss and the gradients behind it."""
    named = dict(built.model.named_parameters())
    before = {name: p.detach().double().clone() for name, p in named.items()}
    losses: list[float] = []
    seen: list[dict[str, Tensor | None]] = []
    real = Tensor.backward

    def backward(loss, *args, **more):
        losses.append(loss.detach().item())
        real(loss, *args, **more)
        seen.append({name: None if p.grad is None else p.grad.detach().to_dense().clone() for name, p in named.items()})

    with mock.patch.object(Tensor, "backward", backward), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built.train(built.optimized())
    way = {name: p.detach().double() - before[name] for name, p in named.items()}
    moved = {name: (one.norm() / (before[name].norm() + 1e-12)).item() for name, one in way.items()}
    return Ran(losses, seen[0], seen[-1], moved)
