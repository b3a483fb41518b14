"""Reentrant activation checkpointing: the calls in a checkpointed region get their gradients when they run again.

In the forward pass the region runs without gradients; its calls are written down, but nothing can be hooked.  In the
backward pass ``torch.utils.checkpoint`` runs the region again with gradients.  That second run is observed too, its
calls are matched with those written down, and the gradients go to the same sites.  Nothing is counted twice.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor

from fxgrad.capture.captured import Call, CallGraph
from fxgrad.torch_support.structure import tensors_in


class Hook(Protocol):
    """A hook whose site may be set after it was put on."""

    index: int


def is_recomputed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is what a reentrant checkpoint returned.

    The node of a custom autograd function is its context, on which ``torch.utils.checkpoint`` keeps the function to
    run again as ``run_function``: no public API, so a node that lacks it is simply an external one.
    """
    node = tensor.grad_fn
    return type(node).__name__ == "CheckpointFunctionBackward" and callable(getattr(node, "run_function", None))


def in_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs its region now, for the first time.

    Its autograd function is known by its name on the stack: no public API, so that without it nothing is told.
    """
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files, far too slow
    code = getattr(getattr(torch.utils.checkpoint, "CheckpointFunction", None), "forward", None)
    wanted = getattr(code, "__code__", None)
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame is not None


def made_by_function(tensor: Tensor) -> bool:
    """Whether ``tensor`` is what a custom autograd function returned."""
    return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


class Record(Protocol):
    """What an eager session writes into: the record of a forward call, or what stands in for it in a second run.

    ``again``: it is the second run of a checkpointed region, in which each value has a hook of its own.
    """

    shapes: list[Any]
    not_required: set[int]
    unmeasurable: set[int]
    call_graph: CallGraph | None
    same: dict[int, int]
    again: bool
    edges: Any
    values: Any
    rewriting: Any
    partial: Callable[[], CallGraph] | None
    recomputed: bool


class _Replay:
    """Takes the probes of a second run; stands in for a forward record."""

    def __init__(self, hooks: list[tuple[int, Hook]]) -> None:
        self.hooks = hooks
        self.shapes: list[Any] = []
        self.not_required: set[int] = set()
        self.unmeasurable: set[int] = set()
        self.call_graph: CallGraph | None = None
        self.same: dict[int, int] = {}
        self.again = True
        self.edges = self.values = self.rewriting = None
        self.partial: Callable[[], CallGraph] | None = None
        self.recomputed = False


class Recomputation:
    """Observes the second run of one checkpointed region.

    Args:
        observe: ``(forward_record, put) -> session``, an eager session for the second run.
        put: ``(tensor) -> hook``, puts a hook of the first run's forward record on a tensor.
        calls: the calls of the first run, of which the region's are ``[..., last]``.
        first_site: for each call number, the site number of its first output.
    """

    def __init__(
        self, observe: Callable[..., Any], put: Callable[[Tensor], Hook], calls: Sequence[Call], last: int,
        first_site: Sequence[int],
    ) -> None:  # fmt: skip
        self._observe = observe
        self._put = put
        self._calls = calls
        self._last = last
        self._first_site = first_site

    def wrap(self, node: Any) -> None:
        """Have the region's second run observed."""
        original = node.run_function

        def run_again(*args: Any, **kwargs: Any) -> Any:
            hooks: list[tuple[int, Hook]] = []
            replay = _Replay(hooks)
            session = self._observe(replay, lambda _, tensor, site: hooks.append((site, self._put(tensor))))
            inputs = sum(1 for _ in tensors_in((args, kwargs)))
            result = session.run(original, args, kwargs, [])
            self._match(session.calls[inputs:-1], hooks, inputs)
            return result

        node.run_function = run_again

    def _match(self, again: Sequence[Call], hooks: list[tuple[int, Hook]], inputs: int) -> None:
        """Give the hooks their sites, if the second run made the calls of the first one."""
        start = self._last - len(again) + 1
        before = self._calls[start : self._last + 1] if start >= 0 else ()
        if len(before) != len(again) or not all(map(_same_call, before, again)):
            return
        sites: dict[int, int] = {}
        local = inputs  # each input is one site of the second run
        for number, call in enumerate(again, start):
            differentiable = sum(output.differentiable for output in call.outputs)
            for offset in range(differentiable):
                if number != self._last:  # the region's result is measured outside of it already
                    sites[local + offset] = self._first_site[number] + offset
            local += differentiable
        for site, hook in hooks:
            hook.index = sites.get(site, -1)


def _same_call(before: Call, again: Call) -> bool:
    same = len(before.outputs) == len(again.outputs) and before.word == again.word and before.op == again.op
    # Calls outside of any module of the region lie in the module that asked for the checkpoint; the second run
    # cannot know which that is.
    return same and (before.key_stem == again.key_stem or again.path == "")
