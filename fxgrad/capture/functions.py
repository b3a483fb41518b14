"""Custom autograd functions: who applied one.

Nothing sees ``apply`` itself.  The first torch call in the function's ``forward`` is seen, and by then autograd has
made the node: its number leads from the result, which is seen when somebody uses it, back to that first call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fxgrad.capture.captured import Ref
from fxgrad.capture.names import source_line
from fxgrad.torch_support.structure import tensors_in


@dataclass(frozen=True, slots=True)
class Applied:
    """A custom autograd function at work.

    Attributes:
        path, type: of the module whose forward applied it.
        source: the line that did.
        refs: the values that it was given.
    """

    path: str
    type: str
    source: str | None
    refs: tuple[Ref, ...]


class Functions:
    """The custom functions that are applied in one forward call, by the number of their autograd node.

    Attributes:
        known: None where gradients are off for another reason.
    """

    def __init__(self) -> None:
        self.known: dict[int, Applied | None] = {}
        self._forwards: frozenset[CodeType] | None = None
        self._number = -1

    def begins(self, number: int) -> FrameType | None:
        """The frame of the ``forward`` of a custom function, where this is the first call that is seen in it.

        ``number``: of the latest autograd node, which is then that of the function.
        """
        if number in self.known:
            return None
        self.known[number], self._number = None, number
        if self._forwards is None:
            self._forwards = frozenset(_forwards(torch.autograd.Function))
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files
        while frame is not None and frame.f_code not in self._forwards:
            frame = frame.f_back
        return frame

    def note(self, forward: FrameType, path: str, kind: str, refs: Iterable[Ref | None]) -> None:
        """What is known of the function that ``begins`` found; ``path`` and ``kind``: of the module around it."""
        source = None if forward.f_back is None else source_line(forward.f_back)
        given = tuple(dict.fromkeys(ref for ref in refs if ref is not None))
        self.known[self._number] = Applied(path, kind, source, given)


def _forwards(kind: Any) -> Iterator[CodeType]:
    for one in kind.__subclasses__():
        code = getattr(one.forward, "__code__", None)
        if code is not None and one.forward is not torch.autograd.Function.forward:
            yield code
        yield from _forwards(one)


def given_to(forward: FrameType) -> Iterator[Tensor]:
    """The tensors among its arguments, before its first call into torch."""
    code, values = forward.f_code, forward.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    for name in code.co_varnames[:count]:
        value = values.get(name)
        if not isinstance(value, FunctionCtx):
            yield from (tensor for _, tensor in tensors_in(value))
