"""What is measured while a forward call runs: its values, and which units of its activations are active."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.capture.activations import Gate, gate_of, units_of
from fxgrad.capture.captured import Call
from fxgrad.capture.modules import ModuleMap
from fxgrad.record.values import ForwardValues, Units, ValueRecorder
from fxgrad.torch_support.private import functorch_active, under_a_mode, without_dispatch_modes, without_torch_function

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord

#: What returns memory that can be written to without the version of the value counting it.
_ALIASES = frozenset({"data", "detach", "detach_"})


class Forward:
    """Measures the values of one forward call.  Nothing here raises, and nothing that it does can be seen.

    Args:
        taken: where the statistics go.
        modules: of the model, whose forward begins now.
        forward_record: where the gradients of channels go; None where they are not asked for.

    Attributes:
        buffers: the floating and complex ones, which stand behind the parameters in ``taken.state``.
    """

    def __init__(self, taken: ForwardValues, modules: ModuleMap, forward_record: ForwardRecord | None = None) -> None:
        self.taken = taken
        self._forward_record = weakref.ref(forward_record) if forward_record is not None else _nothing
        self.modules = modules
        self.buffers = [(name, b) for name, b in modules.buffers if b.is_floating_point() or b.is_complex()]
        taken.take_state([parameter for _, parameter in modules.parameters] + [buffer for _, buffer in self.buffers])

    def returned(
        self, calls: Sequence[Call], number: int, tensors: Iterable[Tensor], sites: Iterable[int],
        given: tuple[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Call ``number`` returned ``tensors``, whose sites are ``sites`` (-1: none).

        ``given``: its arguments, where they may differ from those written down.
        """
        sites = tuple(sites)
        if max(sites, default=-1) < 0 or functorch_active():
            return
        if calls[number].word in _ALIASES or calls[number].op == "external":
            self.taken.forget()
        with _unseen():
            for tensor, site in zip(tensors, sites, strict=False):
                if site >= 0:
                    self.taken.take(site, tensor)
            with contextlib.suppress(Exception):  # whatever a strange tensor cannot do
                self._hook_channels(calls[number], tensors, sites)
                gate = _gate(calls, number)
                for tensor, site in zip(tensors, sites, strict=False):
                    if gate is not None and site >= 0:
                        self._count(gate, tensor, site, given)

    def shown(self, calls: Sequence[Call], number: int, tensor: Tensor, site: int) -> None:
        """Call ``number`` returned ``tensor``, whose statistics are taken elsewhere where they can be."""
        with _unseen(), contextlib.suppress(Exception):  # whatever a strange tensor cannot do
            if not self.taken.library_takes(tensor):
                self.taken.take(site, tensor)
            gate = _gate(calls, number)
            if gate is not None:
                self._count(gate, tensor, site, None)

    def _hook_channels(self, call: Call, tensors: Iterable[Tensor], sites: Sequence[int]) -> None:
        axis, forward_record = units_of(call), self._forward_record()
        if axis is None or forward_record is None or not call.grad_enabled:
            return
        for tensor, site in zip(tensors, sites, strict=False):
            if site >= 0 and tensor.grad_fn is not None and tensor.ndim >= -axis:
                tensor.register_hook(ChannelHook(forward_record, site, axis + tensor.ndim))  # type: ignore[no-untyped-call]

    def called(
        self, calls: Sequence[Call], found: Sequence[tuple[str, Tensor]], first: int, given: tuple[Any, Any]
    ) -> None:
        """The latest call returned these tensors; ``first`` is the site of the first that has one."""
        sites = []
        for output in calls[-1].outputs:
            sites.append(first if output.differentiable else -1)
            first += output.differentiable
        self.returned(calls, len(calls) - 1, [tensor for _, tensor in found], sites, given)

    def _count(self, gate: Gate, tensor: Tensor, site: int, given: tuple[Any, Any] | None) -> None:
        value = tensor.detach()
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return  # what a subclass counts is one of its own, which cannot be read
        if not value.ndim or value.is_complex() or value.is_meta:
            return
        inactive = gate.inactive(value, given, self.modules)
        if inactive is None:
            return
        axis = gate.dimension(value)
        others = [n for n in range(value.ndim) if n != axis]
        samples = value.numel() // value.shape[axis] if value.shape[axis] else 0
        counts = samples - (inactive.sum(others, dtype=torch.int32) if others else inactive.to(torch.int32))
        self.taken.units[site] = Units(counts, axis, samples)

    def finish(self) -> None:
        """The forward has returned."""
        with _unseen():
            self.taken.finish()


class ChannelHook:
    """The tensor hook that measures a gradient unit by unit.  Observes, returns None, keeps nothing."""

    __slots__ = ("_axis", "_forward_record", "_site")
    __torch_unserializable__ = True

    def __init__(self, forward_record: ForwardRecord, site: int, axis: int) -> None:
        self._forward_record = forward_record
        self._site = site
        self._axis = axis

    def __call__(self, gradient: Tensor | None) -> None:
        """Hand on what arrived."""
        if gradient is not None:
            self._forward_record.sink.observe_channels(self._forward_record, self._site, gradient, self._axis)


def _nothing() -> None:
    return None


def begin(
    recorder: ValueRecorder | None, modules: ModuleMap, forward_record: ForwardRecord | None = None
) -> Forward | None:
    """A forward call begins, whose values are measured; None where they are not asked for or have no numbers."""
    if recorder is None:
        return None
    with _unseen():
        if under_a_mode() and type(torch.empty(0)) is not Tensor:  # fake tensors: our memory would be fake as well
            return None
        return Forward(recorder.begin(), modules, forward_record)


def accumulating(parameters: Sequence[tuple[int, tuple[str, ...], Tensor]]) -> bool:
    """Whether a parameter that requires a gradient has one already; torch warns of the question where it can't."""
    with without_torch_function():
        return any(p.grad is not None for _, _, p in parameters if p.requires_grad and p.is_leaf)


def _gate(calls: Sequence[Call], number: int) -> Gate | None:
    """The gate of a call, found once."""
    call = calls[number]
    if call.gate is False:
        call.gate = gate_of(calls, number)
    gate: Gate | None = call.gate
    return gate


@contextlib.contextmanager
def _unseen() -> Any:
    """Where our own calls are recorded by nobody: neither by autograd nor by a mode or class for torch functions."""
    with without_torch_function():  # first, since switching the others is seen by a mode
        inside = torch.is_inference_mode_enabled()  # where memory of ours could not be written to again outside
        with (
            torch.inference_mode(mode=False) if inside else contextlib.nullcontext(),
            torch.no_grad(),
            without_dispatch_modes(),
        ):
            yield
