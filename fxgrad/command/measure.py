"""``fxgrad run``: from what was asked on the command line to a flow."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxgrad.api import gradient_flow
from fxgrad.command.inputs import Arguments, make_arguments
from fxgrad.command.losses import load_loss
from fxgrad.command.targets import load_model
from fxgrad.errors import InputError, ModelError
from fxgrad.losses import Loss
from fxgrad.schema import GradientFlow, Level, SiteKind
from fxgrad.torch_support.structure import tensors_in

__all__ = ["Request", "measure"]


@dataclass(frozen=True, slots=True)
class Request:
    """What ``fxgrad run`` was asked to measure.

    Attributes:
        target, keywords: the model, see ``targets``.
        inputs: see ``inputs``.
        loss: see ``losses``; None for the model's own, or a random direction.
        training: the mode to put the model into, None to leave it as it comes.
        capture, statistics, sites, forward: as of ``fxgrad.gradient_flow``.
        seed: of everything random: the model's parameters, its inputs, targets of the loss, dropout.
    """

    target: str
    keywords: Sequence[str]
    inputs: Sequence[str]
    loss: str | None
    training: bool | None
    capture: Literal["auto", "symbolic", "eager"]
    statistics: Level
    sites: SiteKind
    seed: int
    forward: bool | None = None


def measure(request: Request) -> GradientFlow:
    """Build the model and its arguments, and run one forward and one backward pass.

    Raises:
        TargetError, InputError, OptionError: what was asked cannot be had.
        ModelError, CaptureError, WatchError: as ``fxgrad.gradient_flow``.
    """
    loss = None if request.loss is None else load_loss(request.loss, request.seed)
    torch.manual_seed(request.seed)
    model = load_model(request.target, request.keywords)
    if request.training is not None:
        model.train(request.training)
    arguments = make_arguments(request.inputs, request.seed, _device(model))
    _check_complete(model, arguments, request)
    torch.manual_seed(request.seed)  # so that dropout does not depend on how the model was built
    with _hinting(model, arguments):
        return _flow_of(model, arguments, loss, request)


def _flow_of(model: nn.Module, arguments: Arguments, loss: Loss | None, request: Request) -> GradientFlow:
    return gradient_flow(
        model,
        tuple(arguments.args),
        arguments.kwargs,
        loss=loss,
        capture=request.capture,
        statistics=request.statistics,
        sites=request.sites,
        forward=request.forward,
        seed=request.seed,
    )


@contextmanager
def _hinting(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """Where a model that looks numbers up was given none, say how they are written."""
    try:
        yield
    except ModelError as error:
        embeds = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in model.modules())
        given = [tensor for _, tensor in tensors_in((tuple(arguments.args), arguments.kwargs))]
        if not embeds or any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in given):
            raise
        hint = "This model has an embedding: token numbers are written 8x128:int64:0-N, where N is its size"
        message = f"{error}\n{hint}"
        raise ModelError(message) from error.__cause__


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _check_complete(model: nn.Module, arguments: Arguments, request: Request) -> None:
    """Say which inputs are missing or too many before torch says it in its own words."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # scripted or written in C++: the call itself will tell
        return
    try:
        signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        given = f"{len(request.inputs)} --input" if request.inputs else "no --input"
        message = (
            f"{request.target}: forward{signature} cannot be called with {given}: {error}.\n"
            "Give one --input for each argument, such as --input 8x3x224x224:float32, "
            "or by name, --input mask=8x128:bool"
        )
        raise InputError(message) from error
