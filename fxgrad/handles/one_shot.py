"""One step of a model that is given back as it was: what ``fxgrad.gradient_flow`` runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.unregistered import unregistered
from fxgrad.engine.objective import Objective, naming_the_cut
from fxgrad.engine.step import Options
from fxgrad.errors import FxgradError, InputError, ModelError, NoFlowError
from fxgrad.handles.watching import Watch, refuse_unwatchable, watch_of
from fxgrad.schema import GradientFlow
from fxgrad.torch_support.preserve import preserved
from fxgrad.torch_support.private import acts_after_accumulation, compiled_original
from fxgrad.torch_support.structure import tensors_in


def measured(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, objective: Objective, options: Options
) -> GradientFlow:  # fmt: skip
    """The flow of one forward and one backward pass, run with ``args`` and ``kwargs``.

    Raises:
        FxgradError: what ``gradient_flow`` says.
    """
    if isinstance(model, nn.Module):
        model = compiled_original(model) or model
    outer = watch_of(model) if isinstance(model, nn.Module) else None
    if outer is None:
        refuse_unwatchable(model)
    positional, named = _arguments(args, kwargs)
    leaves = [tensor for _, tensor in tensors_in((positional, named))]
    with _given_back(model, leaves, compiled=options.capture == "dynamo"), _paused(outer), torch.enable_grad():
        if options.capture == "dynamo":
            return _by_dynamo(model, positional, named, objective)
        watch = Watch(model, dataclasses.replace(options, one_shot=True), one_shot=True)
        try:
            with naming_the_cut(lambda: watch.engine.call_graph):
                scalar, words, met = _run(model, positional, named, objective)
            watch.engine.loss_words = words
            _backward(scalar, model, lambda: _failure_in_words(watch))
            del scalar
            flow = watch.flow()
            return dataclasses.replace(flow, event=dataclasses.replace(flow.event, margins_met=met))
        finally:
            watch.remove()


def _arguments(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, Mapping) and kwargs is None:
        args, kwargs = (), args
    if isinstance(args, list):
        args = tuple(args)
    elif not isinstance(args, tuple):
        args = (args,)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        message = f"kwargs must map argument names to values, but is {type(kwargs).__name__}"
        raise InputError(message)
    return args, dict(kwargs or {})


def _by_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], objective: Objective) -> GradientFlow:
    """One step in the graphs of dynamo, run as they are (inner compiler ``eager``)."""
    from fxgrad.handles.dynamo_backend import measured_once

    def step(call: Callable[..., Any]) -> str:
        scalar, words, _ = _run(model, args, kwargs, objective, call)
        _backward(scalar, model)
        return words

    return measured_once(model, step)


@contextlib.contextmanager
def _given_back(model: nn.Module, leaves: Sequence[Tensor], *, compiled: bool) -> Iterator[None]:
    """``preserved``, with what the model keeps in plain lists and dicts."""
    known = {id(one) for one in (*model.modules(), *model.parameters())}
    beside = [found.item for found in unregistered(model, known)]
    parameters = [item for item in beside if isinstance(item, nn.Parameter)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model, [*leaves, *parameters], compiled=compiled))
        for item in beside:
            if isinstance(item, nn.Module):
                stack.enter_context(preserved(item, (), compiled=compiled))
        yield


class _paused:  # noqa: N801  # used like a function in a with statement
    """An outer watch does not record what a one-shot call does."""

    def __init__(self, watch: Watch | None) -> None:
        self._recorder = watch.engine.recorder if watch is not None and watch.engine.recorder.on else None

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._recorder.on = False

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.on = True


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], objective: Objective,
    call: Callable[..., Any] | None = None,
) -> tuple[Tensor, str, bool]:  # fmt: skip
    """The loss, how it came about in words, and whether every margin in it is met."""
    name = type(model).__name__
    try:
        output = (model if call is None else call)(*args, **kwargs)
    except FxgradError:
        raise
    except Exception as error:
        given = {"args": args, "kwargs": kwargs}
        shapes = ", ".join(
            f"{name}{position}: {'nested' if t.is_nested else tuple(t.shape)}"
            for name in given
            for position, t in tensors_in(given[name])
        )
        message = f"{name} raised {type(error).__name__} when called with tensors ({shapes}): {error}"
        raise ModelError(message) from error
    return objective.of(output, name)


def _failure_in_words(watch: Watch) -> str:
    """Where the backward pass stopped and why, as the finding says it; empty where that is not known."""
    try:
        found = watch.flow().findings
    except NoFlowError:
        return ""
    return "".join(f"\n{finding.message}. Try: {finding.suggestion}" for finding in found)


def _backward(scalar: Tensor, model: nn.Module, explain: Callable[[], str] = str) -> None:
    """Run the backward pass.  Parameters whose hooks act on the accumulated gradient must not see one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        if any(acts_after_accumulation(p) for p in parameters):
            torch.autograd.grad(scalar.reshape(()), parameters, allow_unused=True)
        else:
            scalar.reshape(()).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        message = f"the backward pass of {type(model).__name__} raised {type(error).__name__}: {error}"
        raise ModelError(message + explain()) from error


__all__ = ["measured"]
