"""What a step changes: the parameters that it moves, and device memory for the numbers that tell how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxgrad.record.statistics import accumulator, write_norm
from fxgrad.torch_support.shards import local_part

_HALF = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_DECAY = 1e-3  # learning rate times weight decay from which on it is measured what the decay does
_COLUMNS = 5  # norm before, norm of the change, what was taken away times what is left, entries lost, with a gradient


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a parameter group at a step; tensors stay on their device."""

    rate: Any
    epsilon: Any
    decay: Any

    @property
    def decays(self) -> bool:
        """Whether the decay may be most of the step: a rate that is a tensor is not asked, that would be a sync."""
        if isinstance(self.decay, Tensor) or isinstance(self.rate, Tensor):
            return True
        numbers = isinstance(self.decay, (int, float)) and isinstance(self.rate, (int, float))
        return numbers and self.rate * self.decay >= _DECAY


Moved = list[tuple[Tensor, int]]  # a parameter, and the number of its group
Measured = list[tuple[list[int], Tensor]]  # rows, and the numbers of each


class Layout:
    """Which parameters a step moves, and device memory for their numbers; shared by the steps that move the same.

    Attributes:
        parameters: in the order of the rows.
        groups: by row, the number of its parameter group.
        silent: rows of parameters that give no numbers.
    """

    def __init__(self, moved: Moved) -> None:
        self.parameters = [parameter for parameter, _ in moved]
        self.groups = [group for _, group in moved]
        self.silent: set[int] = set()
        self._places = [_place(parameter) for parameter, _ in moved]
        rows: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for row, place in enumerate(self._places):
            rows.setdefault(place, []).append(row)
        self._buffers = [
            (here, torch.zeros(len(here), _COLUMNS, dtype=dtype, device=device))
            for (device, dtype), here in rows.items()
        ]
        self._slots: dict[int, tuple[Tensor, ...]] = {
            row: slot.unbind() for here, buffer in self._buffers for row, slot in zip(here, buffer, strict=True)
        }

    def fits(self, moved: Moved) -> bool:
        """Whether a step moves the same parameters, of the same kind."""
        if len(moved) != len(self.parameters):
            return False
        known = zip(self.parameters, self.groups, self._places, strict=True)
        return all(
            parameter is its and group == its_group and _place(parameter) == place
            for (parameter, group), (its, its_group, place) in zip(moved, known, strict=True)
        )

    def copies(self) -> list[Tensor | None]:
        """The parameters as they are now; their norms are written down.  None for one that gives no numbers."""
        copies: list[Tensor | None] = []
        for row, parameter in enumerate(self.parameters):
            held = local_part(parameter.detach())
            copy = held.clone() if type(held) in _PLAIN else _numbers(held)
            if copy is not None:
                write_norm(copy, self._slots[row][0])
            copies.append(copy)
        return copies

    def changes(self, copies: list[Tensor | None], settings: Sequence[Settings]) -> Measured:
        """The norms of ``copies``, and what has happened to the parameters since; the copies are used up."""
        for row, (parameter, copy) in enumerate(zip(self.parameters, copies, strict=True)):
            held = local_part(parameter.detach())
            now = held if type(held) in _PLAIN else _numbers(held)
            slots = self._slots[row]
            if copy is None or now is None:
                self.silent.add(row)
                continue
            wide = copy.to(torch.float32) if copy.dtype in _HALF else copy
            gone = wide.sub_(now)
            write_norm(gone, slots[1])
            if settings[self.groups[row]].decays and not gone.is_complex():
                slots[2].copy_((gone * now).sum(dtype=slots[2].dtype))
            if copy.dtype in _HALF and parameter.grad is not None:
                active = local_part(parameter.grad) != 0
                slots[3].copy_((active & (gone == 0)).sum())
                slots[4].copy_(active.sum())
        return [(rows, buffer.clone()) for rows, buffer in self._buffers]


def _numbers(values: Tensor) -> Tensor | None:
    """A new tensor with the entries of one whose class has arithmetic of its own; None where it gives none.

    Nothing is written in place: that may round by chance, and so draw from the user's random stream.
    """
    if type(values).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return values.detach().clone()
    try:
        found: Tensor = values.detach() * 1
    except Exception:  # noqa: BLE001  # the user's step must go on, whatever its parameters are
        return None
    return found if type(found) is Tensor and found.layout is torch.strided else None


def _place(values: Tensor) -> tuple[torch.device, torch.dtype]:
    return values.device, accumulator(values.dtype)


def joint_norm(tensors: Sequence[Tensor]) -> Tensor | None:
    """L2 norm over all of them together, on the device of the first.  Never raises.

    Of what is spread over ranks, this rank's parts count.  None where one has no norm of its own.
    """
    try:
        with torch.no_grad():
            tensors = [local_part(one.detach()) for one in tensors]
            if any(type(one) not in _PLAIN for one in tensors):
                return None
            single = [one.detach() for one in tensors if one.dtype not in _HALF and one.layout is torch.strided]
            norms: list[Tensor] = [torch.nn.utils.get_total_norm(single)] if single else []
            norms += [_norm(one.detach()) for one in tensors if one.dtype in _HALF or one.layout is not torch.strided]
            joint: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0]) for one in norms]))
            return joint
    except Exception:  # noqa: BLE001  # the user's step must go on; the norm is unknown then
        return None


def _norm(values: Tensor) -> Tensor:
    """Of one tensor, sparse ones too; half precision is widened as it is summed."""
    dense = values if values.layout is torch.strided else values.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(dense, dtype=None if dense.is_complex() else accumulator(dense.dtype))
    return norm
