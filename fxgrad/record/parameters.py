"""Hooks on the parameters of a watched model, in C++ where that is there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fxgrad.record.native import LEVELS
from fxgrad.record.recorder import Recorder
from fxgrad.schema import Level
from fxgrad.torch_support.leaf_hooks import hook_in_front
from fxgrad.torch_support.private import current_backward, forget_empty_hooks, referenced
from fxgrad.torch_support.shards import is_sharded

if TYPE_CHECKING:
    from fxgrad.record.native import Written


CARRIED = (
    "fully_shard added it to the .grad of an earlier backward pass, and only the sum is there: accumulate with "
    "set_requires_gradient_sync(False)"
)


class _Known(NamedTuple):
    """A parameter that was seen, and its number.  No weak reference: torch refuses to swap a tensor that has one."""

    tensor: Tensor
    number: int


class ParameterHooks:
    """Tensor hooks on the parameters that require a gradient; each has a number, which another gets when it is gone."""

    def __init__(self, sink: Recorder) -> None:
        self._sink = sink
        self._known: dict[int, _Known] = {}
        self._free: list[int] = []
        self._count = 0
        self._hooked: dict[int, RemovableHandle | None] = {}
        self._reduced: dict[int, RemovableHandle] = {}  # behind the reduction, where autograd does not come
        self._native: Any = None
        self.lazy = False  # whether some were still without a shape
        self._raised: set[int] = set()
        self._latest: Any = None
        self._seen: list[tuple[tuple[str, ...], Tensor]] = []
        self._gone = False  # whether some have left the model
        self._tensors: list[Tensor] = []
        self._listed: list[tuple[int, tuple[str, ...], Tensor]] = []
        self._leaves: list[Tensor | None] = []  # by number, those with a hook in C++
        self.trained = b""  # by parameter, whether it requires a gradient, where that is asked in C++
        self.accumulating: bool | None = None

    def use(self, extension: Any, level: Level) -> None:
        """Have C++ hooks from here on."""
        self.remove()
        owner = _Owner(weakref.ref(self._sink))
        kind = extension.Level(LEVELS[level])
        record = extension.Record(owner, kind)
        self._sink.parameters.sizes = record.shapes
        self._native = _Native(record, extension.LeafHooks(record), extension, kind)
        hooks, leaves = self._native.hooks, self._leaves
        self._sink.parameters.lost = lambda: hooks.lost(leaves)

    def refresh(self, parameters: list[tuple[tuple[str, ...], Tensor]]) -> list[tuple[int, tuple[str, ...], Tensor]]:
        """Hook what has begun to require a gradient since; the parameters with their numbers."""
        native = self._native
        if self._gone:
            self._sweep()
        if native is not None and self._unchanged(native, parameters):
            self._refresh_native(native)
            return self._listed
        self.lazy, listed = False, []
        for names, parameter in parameters:
            number = self._number(parameter)
            if is_lazy(parameter):
                self.lazy = True
            elif parameter.requires_grad and number not in self._hooked:
                self._hooked[number] = self._hook(parameter, number)
                if is_sharded(parameter):
                    self._follow(parameter, number)
            listed.append((number, names, parameter))
        self._sink.parameters.expected = self._count
        self._seen = parameters
        self._gone = len(self._known) > len(parameters)
        if native is not None:
            self._refresh_native(native)
            self._latest = None if self.lazy else parameters
            self._tensors = [parameter for _, parameter in parameters]
            self.trained, self.accumulating = native.extension.look(self._tensors)
        self._listed = listed
        return listed

    def _unchanged(self, native: _Native, parameters: list[tuple[tuple[str, ...], Tensor]]) -> bool:
        """Whether these are the parameters of the call before, of which the same require a gradient."""
        if parameters is not self._latest:
            return False
        trained, self.accumulating = native.extension.look(self._tensors)
        return bool(trained == self.trained)

    def _refresh_native(self, native: _Native) -> None:
        """Put back what torch cleared; what ``norm`` could not tell is measured at ``full``."""
        native.hooks.mend(self._leaves)
        escalated = self._sink.escalated
        if escalated != self._raised and native.kind == native.extension.Level.norm:
            self._raised = set(escalated)
            native.hooks.set_levels(self._leaves, sorted(escalated), native.extension.Level.full)

    def mend(self, leaf: Tensor) -> None:
        """A leaf has got a hook from Python, at the first of which torch clears those from C++."""
        if self._native is not None and id(leaf) in self._known:
            self._native.hooks.mend(self._leaves)

    def _number(self, parameter: Tensor) -> int:
        known = self._known.get(id(parameter))
        if known is not None:
            return known.number
        if self._free:
            number = self._free.pop()
        else:
            number, self._count = self._count, self._count + 1
        self._known[id(parameter)] = _Known(parameter, number)
        self._sink.parameters.tensors[number] = parameter
        return number

    def _sweep(self) -> None:
        """Take the hooks off those that left the model and that nobody holds any more, and give up their numbers."""
        present = {id(parameter) for _, parameter in self._seen}
        for key in [key for key in self._known if key not in present]:
            known = self._known.pop(key)
            if referenced(known.tensor):
                self._known[key] = known
                continue
            self._unhook(known)
            self._sink.parameters.tensors.pop(known.number, None)
            self._free.append(known.number)
        self._gone = len(self._known) > len(present)

    def _hook(self, parameter: Tensor, number: int) -> RemovableHandle | None:
        native = self._native
        if native is None:
            return hook_in_front(parameter, self._sink.hook(self._sink.parameters, number))
        native.record.shapes.set(number, list(parameter.shape))
        native.hooks.put(number, parameter, native.kind)
        self._leaves.extend([None] * (number + 1 - len(self._leaves)))
        self._leaves[number] = parameter
        return None

    def _follow(self, parameter: Tensor, number: int) -> None:
        """``fully_shard`` adds gradients up over the ranks by itself, and then calls the hooks behind accumulation."""
        sink = self._sink
        hook = _Arrived(weakref.ref(sink), number)
        self._reduced[number] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        sink.parameters.reduced.add(number)
        sink.rounds = 1  # it waits for the end of the pass itself, and may have asked later than us

    @property
    def on(self) -> bool:
        """Whether any parameter carries a hook."""
        return bool(self._hooked)

    def remove(self) -> None:
        """Take all hooks off."""
        for known in self._known.values():
            self._unhook(known)
        self._latest = None

    def _unhook(self, known: _Known) -> None:
        if known.number not in self._hooked:
            return
        handle = self._hooked.pop(known.number)
        if known.number in self._reduced:
            self._reduced.pop(known.number).remove()
            self._sink.parameters.reduced.discard(known.number)
        if handle is not None:
            handle.remove()
            forget_empty_hooks(known.tensor)
        elif self._native is not None:
            self._native.hooks.remove(known.number, known.tensor)
            self._leaves[known.number] = None


class _Arrived:
    """What torch calls when a parameter that is spread over ranks has its gradient; the hook in front comes first."""

    __slots__ = ("_number", "_sink")

    def __init__(self, sink: weakref.ref[Recorder], number: int) -> None:
        self._sink = sink
        self._number = number

    def __call__(self, parameter: Tensor) -> None:
        """Observe the gradient, unless autograd brought it."""
        sink, gradient = self._sink(), parameter.grad
        if sink is None or gradient is None or current_backward() < 0:
            return
        part = sink.running().parts.get(sink.parameters)
        if part is not None and (self._number in part.placed or self._number in part.failures):
            return
        if self._number in sink.parameters.carried:
            sink.native_failed(sink.parameters, self._number, CARRIED)
        else:
            sink.observe(sink.parameters, self._number, gradient)


class _Native(NamedTuple):
    """C++ hooks on leaf tensors."""

    record: Any
    hooks: Any
    extension: Any
    kind: Any


class _Owner:
    """Answers the C++ hooks of parameters, for as long as their recorder is there."""

    def __init__(self, sink: weakref.ref[Recorder]) -> None:
        self._sink = sink

    def native_begins(self, written: Written) -> bool:
        """A backward pass begins to write."""
        sink = self._sink()
        return sink is not None and sink.native_begins(sink.parameters, written)

    def native_takes(self, slot: int, gradient: Tensor) -> None:
        """A gradient that the native reductions do not take."""
        sink = self._sink()
        if sink is not None:
            sink.observe(sink.parameters, slot, gradient)

    def native_again(self, slot: int) -> bool:
        """A second gradient of a parameter in one pass."""
        sink = self._sink()
        return sink is not None and sink.native_again(sink.parameters, slot)

    def native_failed(self, slot: int, why: str) -> None:
        """A statistic that could not be written."""
        sink = self._sink()
        if sink is not None:
            sink.native_failed(sink.parameters, slot, why)

    def native_differentiated(self) -> None:
        """A backward pass is being differentiated."""
        sink = self._sink()
        if sink is not None:
            sink.parameters.invalidate()
