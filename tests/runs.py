"""A training step with everything that can be seen of it written down, and two of them compared bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Found = list[tuple[str, Tensor]]


@dataclass
class RunResult:
    """What one forward and backward left behind.

    Attributes:
        structure: of the output, with types, keys and non-tensors, as text.
        outputs: its tensors, with their places.
        requires_grad: of those.
        gradients: ``.grad`` of every parameter, None included.
        input_gradients: ``.grad`` of every tensor that was passed in, None included.
        inputs: the tensors that were passed in, as they were afterwards (a model may change them in place).
        buffers: all buffers afterwards.
        state_keys: of ``state_dict``.
        training: the flag of every module.
        flags: ``requires_grad`` of every parameter.
        random_state: of the CPU generator, afterwards.
        loss: its value, None where the forward raised.
        error: ``(type, message)`` where the step raised.
    """

    structure: str = ""
    outputs: Found = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    inputs: Found = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state_keys: list[str] = field(default_factory=list)
    training: dict[str, bool] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    random_state: Tensor = field(default_factory=lambda: torch.zeros(0))
    loss: Tensor | None = None
    error: tuple[str, str] | None = None


def plain_run(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> RunResult:
    """One step of ``model``: seed, forward, ``loss``, backward; everything seen is cloned into the result.

    Args:
        model: whose state is read; its gradients are cleared first.
        args, kwargs: copied, so that two runs get the same inputs even if a model changes them in place.
        loss: of the output; None stops after the forward.
        seed: of the random stream, set just before the forward.
        call: runs the forward instead of ``model`` (what ``instrument`` returned, say).
    """
    args, kwargs = fresh(args), fresh(dict(kwargs or {}))
    model.zero_grad(set_to_none=True)
    result = RunResult()
    torch.manual_seed(seed)
    try:
        output = (model if call is None else call)(*args, **kwargs)
        result.structure = structure_of(output)
        found = list(tensors_in(output))
        result.outputs = [(place, tensor.detach().clone()) for place, tensor in found]
        result.requires_grad = [tensor.requires_grad for _, tensor in found]
        if loss is not None:
            scalar = loss(output)
            result.loss = scalar.detach().clone()
            scalar.backward()
    except Exception as error:  # noqa: BLE001  # whatever a model raises is part of what it does
        result.error = (type(error).__name__, str(error))
    _look(model, (args, kwargs), result)
    return result


def _look(model: nn.Module, given: Any, result: RunResult) -> None:
    result.random_state = torch.get_rng_state()
    named = list(model.named_parameters())
    result.gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}
    result.flags = {name: p.requires_grad for name, p in named}
    inputs = list(tensors_in(given))
    result.inputs = [(place, tensor.detach().clone()) for place, tensor in inputs]
    leaves = [tensor.grad if tensor.is_leaf else None for _, tensor in inputs]
    result.input_gradients = [None if grad is None else grad.detach().clone() for grad in leaves]
    result.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    result.state_keys = list(model.state_dict())
    result.training = {path: module.training for path, module in model.named_modules()}


def assert_same_run(got: RunResult, want: RunResult, *, random_state: bool = True) -> None:
    """Bit for bit the same step, NaN equal to NaN; the message names everything that differs."""
    differences = run_differences(got, want, random_state=random_state)
    assert not differences, "the runs differ:\n  " + "\n  ".join(differences)


def run_differences(got: RunResult, want: RunResult, *, random_state: bool = True) -> list[str]:
    """Everything that differs between two runs, in words.

    ``random_state=False`` leaves out the generator, for runs that drew nothing from it but were seeded elsewhere.
    """
    found = []
    for name in ("error", "structure", "requires_grad", "state_keys", "training", "flags"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if mine != theirs:
            found.append(f"{name}: {mine} instead of {theirs}")
    found += _differences("output", dict(got.outputs), dict(want.outputs))
    found += _differences("gradient of ", got.gradients, want.gradients)
    found += _differences("input ", dict(got.inputs), dict(want.inputs))
    mine, theirs = dict(enumerate(got.input_gradients)), dict(enumerate(want.input_gradients))
    found += _differences("gradient of input ", mine, theirs)
    found += _differences("buffer ", got.buffers, want.buffers)
    found += _differences("", {"loss": got.loss}, {"loss": want.loss})
    if random_state and not torch.equal(got.random_state, want.random_state):
        found.append("random state: the stream is at another place")
    return found


def _differences(word: str, got: Mapping[Any, Tensor | None], want: Mapping[Any, Tensor | None]) -> list[str]:
    found = [f"{word}{name}: missing" for name in want if name not in got]
    found += [f"{word}{name}: should not be there" for name in got if name not in want]
    for name in want:
        if name in got and (why := difference(got[name], want[name])):
            found.append(f"{word}{name}: {why}")
    return found


def difference(got: Tensor | None, want: Tensor | None) -> str:
    """Why two tensors are not the same bits (NaN equal to NaN); empty where they are."""
    if got is None or want is None:
        return "" if got is want else f"{_word(got)} instead of {_word(want)}"
    if (got.shape, got.dtype, got.device, got.layout) != (want.shape, want.dtype, want.device, want.layout):
        return f"{_word(got)} instead of {_word(want)}"
    if got.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    same = got == want
    if got.is_floating_point():
        same = (same & (got.signbit() == want.signbit())) | (got.isnan() & want.isnan())
    if bool(same.all()):
        return ""
    gap = float((got.double() - want.double()).abs().nan_to_num(torch.inf).max())
    return f"{int((~same).sum())} of {same.numel()} entries differ, by {gap:.3g} at most"


def _word(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} on {tensor.device}"


def tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, mappings and dataclasses, with its place as Python would write it."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from tensors_in(item, f"{place}[{position}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name), f"{place}.{item.name}")


def structure_of(value: Any) -> str:
    """Types, keys and non-tensors of a nested value; tensors are only ``T``."""
    if isinstance(value, Tensor):
        return "T"
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"{name}({', '.join(f'{key!r}: {structure_of(item)}' for key, item in value.items())})"
    if isinstance(value, (tuple, list)):
        return f"{name}({', '.join(map(structure_of, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = (f"{item.name}={structure_of(getattr(value, item.name))}" for item in dataclasses.fields(value))
        return f"{name}({', '.join(inner)})"
    return repr(value)


def fresh(value: Any) -> Any:
    """The same nested arguments with every tensor cloned into a leaf of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [fresh(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
