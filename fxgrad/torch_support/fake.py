"""A model without data: the same modules with tensors that have shapes, strides and autograd, but no numbers.

Running it costs no arithmetic, draws no random number, and changes nothing of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.errors import CaptureError
from fxgrad.torch_support.private import clear_hooks, fake_mode, plain_number
from fxgrad.torch_support.structure import tensors_in


class FakeModel:
    """A copy of ``model`` on fake tensors.

    Hooks of its modules are left out: they are the user's code, which may keep what it sees.

    Raises:
        CaptureError: the model cannot be copied, or this torch has no fake tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode: Any = fake_mode()
        memo: dict[int, Any] = {}
        try:
            for tensor in (*model.parameters(), *model.buffers()):
                memo[id(tensor)] = self.tensor(tensor)
            own = model.__dict__.get("__deepcopy__")
            self.model: nn.Module = copy.deepcopy(model, memo) if own is None else own(memo)
        except Exception as error:
            message = f"{type(model).__name__} cannot be copied without its data: {type(error).__name__}: {error}"
            raise CaptureError(message) from error
        for module in self.model.modules():
            clear_hooks(module)

    def tensor(self, tensor: Tensor) -> Tensor:
        """The fake of a leaf tensor or of a caller's argument: a leaf with the same flag."""
        made: Tensor = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def arguments(self, value: Any) -> Any:
        """The same nested arguments with fake tensors; one tensor given twice stays one."""
        memo: dict[int, Any] = {}
        for _, tensor in tensors_in(value):
            memo.setdefault(id(tensor), self.tensor(tensor))
        return copy.deepcopy(value, memo)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Where the copy and its tensors may be used."""
        with self.mode, torch.enable_grad():
            yield


def like(value: Any) -> Any:
    """What an input of a graph is like: a tensor's shape, strides, dtype, device, flag, leaf or not; else the value."""
    if not isinstance(value, Tensor):
        return plain_number(value)
    return (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, value.is_leaf)


def fake_like(likes: Iterable[Any], mode: Any = None) -> tuple[Any, list[Any]]:
    """A mode (``mode`` if given), and stand-ins for inputs that are like these (see ``like``); numbers stay.

    A tensor that is no leaf stays none, since a graph may change it in place.
    """
    mode = fake_mode() if mode is None else mode
    made: list[Any] = []
    with mode, torch.enable_grad():
        for found in likes:
            if not isinstance(found, tuple):
                made.append(found)
                continue
            shape, stride, dtype, device, requires_grad, is_leaf = found
            leaf = torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(requires_grad)
            made.append(leaf if is_leaf else leaf.clone())
    return mode, made
