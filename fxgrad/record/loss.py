"""What the loss did with the model's outputs: the autograd nodes between the two, seen as a backward pass begins."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from fxgrad.schema import LossOp
from fxgrad.torch_support.private_passes import sequence_of

_MOST = 64  # nodes that are looked at; what is longer is no loss, or another model
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
#: What hands its values on as they are, in another shape or dtype.
_VIEWS = frozenset({
    "view", "reshape_alias", "unsafe_view", "squeeze", "unsqueeze", "permute", "transpose", "t", "to_copy", "alias",
    "clone", "select", "slice", "index", "expand", "split", "unbind",
})  # fmt: skip
_NAME = re.compile(r"Backward\d*$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Led(Protocol):
    """A call graph, which knows what led from its outputs to the loss; None before anybody has looked."""

    loss: tuple[LossOp, ...] | None


def look_at_the_loss(call_graph: Led | None, end: int | None) -> None:
    """A backward pass comes to a forward call: the first time for its graph, what the loss did with its outputs.

    ``end``: autograd's number when the forward had returned.
    """
    if call_graph is None or end is None or call_graph.loss is not None:
        return
    call_graph.loss = ()
    with contextlib.suppress(Exception):  # the user's backward must go on
        call_graph.loss = ops_of_the_loss(end)


def ops_of_the_loss(end: int) -> tuple[LossOp, ...]:
    """The operations of the running backward pass that were recorded after number ``end``, from the loss on.

    Empty where nothing is known of them.  Reads names and settings of autograd nodes only, no tensor.
    """
    found: list[LossOp] = []
    roots = [root.grad_fn for root in _roots() if root.grad_fn is not None]
    queue, seen = roots, set(roots)
    while queue:
        node = queue.pop(0)
        if not _of_loss(node, end):
            continue
        if len(found) == _MOST:
            return ()
        word = _word(node)
        taken = tuple(_taken(one, end) for one, _ in node.next_functions if one is not None)[:1]
        if word not in _VIEWS:
            found.append(LossOp(word, taken, _REDUCTIONS.get(getattr(node, "_saved_reduction", -1), "")))
        for one, _ in node.next_functions:
            if one is not None and one not in seen:
                seen.add(one)
                queue.append(one)
    return tuple(found)


def _taken(node: Any, end: int) -> str:
    """Name of what made the first operand, views left out; ``model.`` in front of it where the model did."""
    node = next(_through_views(node))
    return _word(node) if _of_loss(node, end) else f"model.{_word(node)}"


def _through_views(node: Any) -> Iterator[Any]:
    while _word(node) in _VIEWS and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    yield node


def _of_loss(node: Any, end: int) -> bool:
    return bool(end <= sequence_of(node) and not hasattr(node, "variable"))


def _word(node: Any) -> str:
    """``log_softmax`` for ``LogSoftmaxBackward0``."""
    return _CAMEL.sub("_", _NAME.sub("", type(node).__name__)).lower()


def _roots() -> tuple[Tensor, ...]:
    """What the running backward pass differentiates: the outermost ``autograd.backward`` or ``grad`` on the stack.

    Their arguments are public, being in their frames is not; a hook is told nothing of the root.  Where a pass runs in
    threads of its own (accelerators), the thread that waits for it is found if only one does.  Empty where unknown.
    """
    frames = [_outermost(sys._getframe(2))]  # noqa: SLF001  # inspect.stack() reads source files, far too slow here
    if frames == [None]:
        frames = [_outermost(top) for top in sys._current_frames().values()]  # noqa: SLF001  # of all threads
    found = [frame for frame in frames if frame is not None]
    if len(found) != 1:
        return ()
    given = found[0].f_locals.get(_DIFFERENTIATES[found[0].f_code])
    return tuple(one for one in (given if isinstance(given, (tuple, list)) else (given,)) if isinstance(one, Tensor))


_DIFFERENTIATES = {
    function.__code__: argument
    for function, argument in ((torch.autograd.backward, "tensors"), (torch.autograd.grad, "outputs"))
    if hasattr(function, "__code__")
}


def _outermost(frame: types.FrameType | None) -> types.FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code in _DIFFERENTIATES:
            found = frame
        frame = frame.f_back
    return found
