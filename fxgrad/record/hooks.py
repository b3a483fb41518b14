"""The tensor hook of a site or parameter: observes, returns None, keeps nothing.

It runs once per site and step, in the user's backward pass, so that the usual case (a float32 or half gradient like
those before it, at level ``norm``) is written here, in one call into torch; everything else goes to the recorder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxgrad.torch_support.private import current_backward

if TYPE_CHECKING:
    from fxgrad.record.owners import Owner
    from fxgrad.record.recorder import Part

#: What writes a norm into a slot.  Both refuse whatever they would not compute as the recorder does: doubles, sparse
#: gradients, other devices, a gradient that is being differentiated.  The first takes float32 only, and is faster.
norm_of_float32: Callable[..., Tensor] = torch.linalg.vector_norm
norm_of_half: Callable[..., Tensor] = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)


def write_fast(part: Part, index: int, gradient: Tensor) -> bool:
    """Write ``gradient`` into the slot that ``part`` has ready for site ``index``; False where that can't be."""
    try:
        slot = part.fast[index]
        if slot is None:
            return False
        part.norm(gradient, out=slot)
        part.fast[index] = None
        part.readings[index] = gradient.shape  # type: ignore[assignment]  # in brief: ``EventRecord.finish`` completes it
    except Exception:  # noqa: BLE001  # the recorder finds out what it is about this gradient
        return False
    return True


class Hook:
    """Hands gradients of one site to the recorder.

    Attributes:
        index: of the site; negative for a hook that was put on before its site was known.
    """

    __slots__ = ("_observe", "_owner", "index")
    __torch_unserializable__ = True  # torch.save of a watched model's output: no warning about our hook

    def __init__(self, observe: Callable[[Owner, int, Tensor], None], owner: Owner, index: int) -> None:
        self._observe = observe
        self._owner = owner
        self.index = index

    def __call__(self, gradient: Tensor | None) -> None:
        """Observe ``gradient``; None is that of an output which nothing uses, of a node whose others are used."""
        owner, index = self._owner, self.index
        if owner.task == current_backward():
            part = owner.part
            # As in ``write_fast``, whose call would cost as much as the rest of this function.
            try:
                slot = part.fast[index]
                if slot is not None:
                    part.norm(gradient, out=slot)
                    part.fast[index] = None
                    part.readings[index] = gradient.shape  # type: ignore[union-attr]
                    return
            except Exception:  # noqa: BLE001, S110  # the recorder finds out what it is about this gradient
                pass
        if index >= 0 and gradient is not None:
            self._observe(owner, index, gradient)


class FullHook(Hook):
    """The same at level ``full``; without the library, stages a small gradient like the one in the pass before."""

    __slots__ = ()

    def __call__(self, gradient: Tensor | None) -> None:
        """As ``Hook``."""
        owner, index = self._owner, self.index
        if index < 0 or gradient is None:
            return
        if owner.task == current_backward():
            part = owner.part
            try:
                if part.fast:  # the native library takes each by itself
                    if write_fast(part, index, gradient):
                        return
                elif part.put is not None and part.readings[index] is None:
                    part.readings[index] = reading = part.put(gradient)
                    if reading is not None:
                        return
            except Exception:  # noqa: BLE001, S110  # the recorder finds out what it is about this gradient
                pass
        self._observe(owner, index, gradient)
