"""What a one-shot call differentiates: the loss, or what stands in for one; and who cut it off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxgrad.capture.captured import CallGraph
from fxgrad.errors import ModelError, NothingToDifferentiateError
from fxgrad.torch_support.structure import tensors_in

_SEED = 20240229  # added to that of a random direction, which is thus another one than inputs of the same seed have
_CUT_OFF = ("Relu", "Clamp", "Maximum", "MaxBackward", "Threshold", "Margin")  # nodes of autograd
_LOSS = 200  # nodes that a loss behind the model may have to be looked through
_SEED = 20240229  # of the random direction that stands in for a loss; any fixed number would do


@dataclass(frozen=True, slots=True)
class Objective:
    """What is differentiated.

    Attributes:
        loss: takes what the model returns and gives a scalar; None for the model's own, or a random direction.
        seed: of the random direction.
    """

    loss: Callable[[Any], Tensor] | None = None
    seed: int = 0

    def of(self, output: Any, name: str) -> tuple[Tensor, str, bool]:
        """The scalar to differentiate, how it came about in words, and whether every margin in it is met.

        ``output`` is what the model called ``name`` returned.

        Raises:
            ModelError: the loss raised, or gave no scalar.
            NothingToDifferentiateError: nothing requires a gradient.
        """
        if self.loss is None:
            scalar, words = default_loss(output, name, self.seed)
        else:
            try:
                scalar = self.loss(output)
            except Exception as error:
                message = f"the loss raised {type(error).__name__} on the output of {name}: {error}"
                raise ModelError(message) from error
            words = getattr(self.loss, "__qualname__", type(self.loss).__name__)
        check_loss(scalar, name)
        return scalar, words, margins_met(scalar, output)


def default_loss(output: Any, name: str, seed: int = 0) -> tuple[Tensor, str]:
    """The loss of a model that was given none, and how it came about in words."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own.reshape(()), "the loss that the model returned"
    found = [t for _, t in tensors_in(output) if t.is_floating_point() or t.is_complex()]
    if len(found) == 1 and found[0].ndim == 0:
        return found[0], "the scalar that the model returned"
    useful = [t for t in found if t.requires_grad]
    if not useful:
        kinds = ", ".join(f"{p or 'output'}: {t.dtype}" for p, t in tensors_in(output)) or type(output).__name__
        message = (
            f"{name} returned no tensor that can be differentiated ({kinds}). "
            "Check that parameters require a gradient and that the output is not detached, or pass loss=."
        )
        raise NothingToDifferentiateError(message)
    generator = torch.Generator().manual_seed(_SEED + seed)
    directions = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in useful]
    norm = torch.stack([d.square().sum() for d in directions]).sum().sqrt()
    parts = [
        (torch.view_as_real(t).sum(-1) if t.is_complex() else t).mul((d / norm).to(t.device, _real(t.dtype))).sum()
        for t, d in zip(useful, directions, strict=True)
    ]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total, f"a random direction of norm 1 over {len(useful)} output tensor(s), seed {seed}"


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def check_loss(scalar: Any, name: str) -> None:
    """Raise for what cannot be differentiated.

    Raises:
        ModelError: not a tensor with one value.
        NothingToDifferentiateError: it requires no gradient.
    """
    if not isinstance(scalar, Tensor):
        message = f"the loss of {name} must be a tensor with one value, but is {type(scalar).__name__}"
        raise ModelError(message)
    if scalar.numel() != 1:
        message = (
            f"the loss of {name} must have one value, but has shape {tuple(scalar.shape)}; reduce it, e.g. .mean()"
        )
        raise ModelError(message)
    if not scalar.requires_grad:
        message = (
            f"the loss of {name} does not depend on anything that requires a gradient: "
            "all parameters are frozen, the output is detached, or the model ran under no_grad."
        )
        raise NothingToDifferentiateError(message)


def margins_met(scalar: Tensor, output: Any) -> bool:
    """Whether a loss is exactly 0, and something between it and the model's output cuts off below a margin."""
    try:
        if float(scalar.detach()) != 0:
            return False
    except (RuntimeError, NotImplementedError):  # meta and fake tensors have no values
        return False
    own = [tensor.grad_fn for _, tensor in tensors_in(output)]
    queue, seen = [scalar.grad_fn], list(own)
    while queue:
        node = queue.pop()
        if node is None or any(node is one for one in seen):
            continue
        seen.append(node)
        if any(word in node.name() for word in _CUT_OFF):
            return True
        queue += [following for following, _ in node.next_functions]
        if len(seen) > _LOSS:
            return False
    return False


@contextmanager
def naming_the_cut(call_graph: Callable[[], CallGraph | None]) -> Iterator[None]:
    """Where nothing that requires a gradient is left, say which node of the forward cut it off.

    Raises:
        NothingToDifferentiateError: as raised inside, with the last node that took a value that requires a gradient and
            returned none.
    """
    try:
        yield
    except NothingToDifferentiateError as error:
        cut = last_cut(call_graph())
        if cut is None:
            raise
        message = f"{error} The last node that cuts the gradient off is {cut}."
        raise NothingToDifferentiateError(message) from error.__cause__


def last_cut(call_graph: CallGraph | None) -> str | None:
    """Key and source line of the last node that took a value requiring a gradient and returned none that does."""
    if call_graph is None:
        return None
    requires = {
        (number, output.position): output.requires_grad
        for number, call in enumerate(call_graph.calls) for output in call.outputs
    }  # fmt: skip
    for number in range(len(call_graph.calls) - 1, -1, -1):
        call = call_graph.calls[number]
        if call.op == "output" or any(output.requires_grad and call.grad_enabled for output in call.outputs):
            continue
        without = not call.grad_enabled and call.owned and not call.frozen
        if without or any(requires.get((ref.call, ref.position)) for _, ref in call.uses()):
            node = call_graph.nodes[number]
            return f"{node.key} ({node.source})" if node.source else node.key
    return None
