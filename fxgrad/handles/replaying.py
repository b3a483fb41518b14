"""A step of a training run again, under full statistics: what ``fxgrad.replay`` runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.engine.moments import load_moment, set_streams, streams
from fxgrad.engine.objective import Objective
from fxgrad.engine.step import Options
from fxgrad.errors import InputError
from fxgrad.handles.one_shot import measured
from fxgrad.schema import GradientFlow
from fxgrad.torch_support.structure import tensors_in

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """A step that was run again.

    Attributes:
        step: in the run file.
        flow: of it, with full statistics, those of the values, and the part of each consumer.
        outputs: what the model returned, by position in it (``""`` for a single tensor).
        same: whether these are, in bits, what it returned in training; None where that was written to in place since.
        torch_version: that the step was trained with.
    """

    step: int
    flow: GradientFlow
    outputs: Mapping[str, Tensor]
    same: bool | None
    torch_version: str

    def __str__(self) -> str:
        """Whether it is the same step, and its flow in words."""
        words = {
            True: "the model returns the same bits as in training",
            False: "the model returns something else than in training: it holds state besides parameters and buffers, "
            "or runs on another device or version",
            None: "what the model returned in training is not known",
        }
        return f"step {self.step} again: {words[self.same]} (torch {self.torch_version})\n\n{self.flow}"


def replay(run_file: str | Path, model: nn.Module) -> Replay:
    """Run the step in which the first error of a run was found again, with full statistics.

    The step has to be kept: ``fxgrad.watch(model, run_file=..., capture_batch=True)``.  Its arguments, parameters,
    buffers, modes, autocast and random streams are set, and what the loss sent back to the model's outputs is sent back
    again, so that no loss is needed.  Python state of the model's own is not kept; ``same`` says whether it mattered.

    Args:
        run_file: of the run.
        model: made as it was for training, on the same kind of device; it is given back as it was.

    Raises:
        RunFileError: no step was kept, or it cannot be replayed.
        InputError: the model has other parameters or buffers, or returns other tensors.
        ModelError: it raised.
    """
    moment = load_moment(Path(run_file))
    given: dict[str, Tensor] = {}

    def sent_back(outputs: Any) -> Tensor:
        """A scalar whose gradient with respect to the outputs is, in bits, what the loss sent back."""
        found = dict(tensors_in(outputs))
        given.update((position, tensor.detach().clone()) for position, tensor in found.items())
        wanted = moment["gradients"]
        if not wanted or any(p not in found or found[p].shape != g.shape for p, g in wanted.items()):
            message = f"what was sent back to {', '.join(map(repr, wanted)) or 'the outputs'} fits none of the outputs"
            raise InputError(message)
        parts = [(found[position] * gradient.to(found[position].device)).sum() for position, gradient in wanted.items()]
        return torch.stack([part.to(torch.float64) for part in parts]).sum()

    with _as_it_was(model, moment):
        options = Options("full", "auto", "edge", forward=True)
        flow = measured(model, moment["args"], moment["kwargs"], Objective(sent_back, 0), options)
    known = moment["outputs"]
    same = all(_equal(given[position], tensor) for position, tensor in known.items() if position in given)
    return Replay(moment["step"], flow, given, same if known else None, moment["torch"])


@contextmanager
def _as_it_was(model: nn.Module, moment: Mapping[str, Any]) -> Iterator[None]:
    """The model and the random streams as the step found them; afterwards as before."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state: dict[str, Tensor] = moment["state"]
    odd = sorted(named.keys() ^ state.keys()) or [n for n in named if named[n].shape != state[n].shape]
    if odd:
        message = (
            f"this {type(model).__name__} is not the model that was trained: {', '.join(odd[:5])} "
            f"{'differs' if len(odd) == 1 else 'differ'}. Make it with the same arguments"
        )
        raise InputError(message)
    before = {name: tensor.detach().clone() for name, tensor in named.items()}
    modes = {name: module.training for name, module in model.named_modules()}
    drawn = streams()
    try:
        _set(model, named, state, moment["modes"])
        set_streams(moment["streams"])
        with ExitStack() as stack:
            for kind, dtype in moment["autocast"].items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield
    finally:
        _set(model, named, before, modes)
        set_streams(drawn)


def _set(model: nn.Module, named: Mapping[str, Tensor], state: Mapping[str, Tensor], modes: Mapping[str, bool]) -> None:
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(state[name])
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    other = other.to(one.device)
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
