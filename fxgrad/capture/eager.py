"""The ``eager`` front end: the model's own Python runs, and each call is written down as it returns.

Functions, methods and operators are seen by a ``TorchFunctionMode``, module calls by global module hooks which are
registered only while the forward runs and act only in its thread.  Nothing is run twice and nothing is replaced, so
that the result is right for any model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxgrad.capture.calls import ASKS, frozen, fx_op, given_if_hooked, leaf_facts, named_arguments, same_call, word_of
from fxgrad.capture.captured import Call, CallGraph, ModuleSpan, Opaque, Output, ParameterRef, Ref, describe_output
from fxgrad.capture.functions import Applied, Functions, given_to
from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import METADATA, source_line
from fxgrad.capture.recomputation import Recomputation, Record, in_checkpoint, is_recomputed, made_by_function
from fxgrad.capture.strays import Strays
from fxgrad.capture.values import Known, Values
from fxgrad.torch_support.compiled import Looking
from fxgrad.torch_support.private import functorch_active, sequence_number, version_of, without_torch_function
from fxgrad.torch_support.private_passes import sequence_of
from fxgrad.torch_support.shards import gathers
from fxgrad.torch_support.structure import tensors_in

_WRITES_ITEM = torch.Tensor.__setitem__


class Session(TorchFunctionMode):
    """One forward call under observation.

    Args:
        modules: the model's paths.
        forward_record: takes the probes; ``put`` is how a probe is put on a tensor.
        put: ``(forward_record, tensor, site index) -> hook``.
        previous: the call graph of an earlier call; where this call runs the same way, its parts are used again.
        beside: a native observer that looks on, and is told which site each value is.
    """

    def __init__(
        self, modules: ModuleMap, forward_record: Record, put: Any, previous: CallGraph | None, beside: Any = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.modules = modules
        self.forward_record = forward_record
        self.put = put
        self.previous = previous
        self.beside = beside
        self.ranges: list[tuple[int, int]] = []  # by call, the operators that it ran
        self.calls: list[Call] = []
        self.spans: list[ModuleSpan] = []
        self.lost: set[Ref] = set()
        self._old: list[Call] = previous.calls if previous is not None else []
        self._same = previous is not None
        self._values = Values()
        self._strays = Strays(modules)
        self._inside, self._functions = 0, Functions()
        self._line: str | None = None
        self._handed: Any = None  # to the hooked leaf that runs; None for others
        self._stack: list[tuple[Place | None, tuple[Ref | None, ...]]] = []
        self._path, self._type = "", modules.places[id(modules.root)].type
        self._thread = threading.get_ident()
        self._sites = 0
        self._first_sites: list[int] = []
        self.hidden = self.asked = False
        self._sequence, self._began = -1, 0
        if forward_record.rewriting is not None:
            forward_record.partial = lambda: CallGraph(list(self.calls), list(self.spans), self.lost)

    # ---- entering and leaving -------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Any:
        """Call ``forward`` under observation and return what it returns."""
        with without_torch_function():
            inputs = self._placeholders(args, kwargs, names)
        with Looking(self, self._enter_module, self._leave_module):
            self._sequence = sequence_number()
            result = forward(*args, **kwargs)
            self._look_for_hidden_code()
        with without_torch_function():
            self._finish(result, inputs)
        self._values = Values()
        return result

    def _placeholders(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> tuple[Ref, ...]:
        for name, value in named_arguments(args, kwargs, names):
            for position, tensor in tensors_in(value):
                word = name + position
                self._add("placeholder", word, word, f"input:{word}", None, (), (), {}, [("", tensor)])
        return tuple(Ref(n, "") for n in range(len(self.calls)))

    def _finish(self, result: Any, inputs: tuple[Ref, ...]) -> None:
        root = self.modules.places[id(self.modules.root)]
        self._strays.close(self.calls)
        refs = self._refs((result,), {})
        self._add("output", "output", "output", "output", None, refs, (result,), {}, [])
        self.spans.append(ModuleSpan("", root.type, inputs, tuple(ref for ref in refs if ref is not None)))
        if self._same and len(self.calls) == len(self._old) and self.previous is not None:
            self.previous.lost.update(self.lost)
            self.previous.hidden |= self.hidden
            self.forward_record.call_graph = self.previous
        else:
            made = CallGraph(self.calls, self.spans, self.lost, set(), self.hidden, self.asked)
            self.forward_record.call_graph = made
        self.forward_record.partial = None

    # ---- modules --------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._inside:
            self._inside += 1
            self._stack.append((None, ()))
            return
        place = self.modules.places.get(id(module))
        if place is None or place.module is not module or module is self.modules.root:
            self._stack.append((None, ()))  # made in forward: its calls belong to the module that made it
            return
        with without_torch_function():
            refs = self._refs(args, {})
            self._handed = given_if_hooked(place, args, self._template)
        self._stack.append((place, refs))
        if place.leaf:
            self._look_for_hidden_code()
            self._begins()
            self._inside = 1
        else:
            self._path, self._type = place.path, place.type

    def _leave_module(self, _: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs, result = rest if len(rest) == 2 else ({}, rest[0])  # noqa: PLR2004  # after an error torch gives no kwargs
        if threading.get_ident() != self._thread or not self._stack:
            return
        place, inputs = self._stack.pop()
        if self._inside > 1:
            self._inside -= 1
            return
        self._inside = 0
        if place is None:
            return
        outer = next((entry for entry, _ in reversed(self._stack) if entry is not None), None)
        self._path = outer.path if outer else ""
        self._type = outer.type if outer else self.modules.places[id(self.modules.root)].type
        with without_torch_function():
            if place.leaf:
                self._sequence = sequence_number()
                self._record_leaf(place, inputs, args, kwargs, result)
            self._returned(place, inputs, result)

    def _returned(self, place: Place, inputs: tuple[Ref | None, ...], result: Any) -> None:
        given = tuple(ref for ref in inputs if ref is not None)
        outputs = tuple(ref for _, t in tensors_in(result) if (ref := self._lookup(t)) is not None)
        self.spans.append(ModuleSpan(place.path, place.type, given, outputs))

    def _record_leaf(
        self, place: Place, refs: tuple[Ref | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        found = list(tensors_in(result))
        if not found:
            return
        refs = (*refs, *self._refs((), kwargs)) if kwargs else refs
        self._note_changed(args)
        if self._handed is not None and self._template(args) != self._handed:
            args = self._handed  # a hook has put something else in its place
        if len(self.calls) < len(self._old) and self._old[len(self.calls)].hooked != (self._handed is not None):
            self._same = False
        outer, self._path, self._type = (self._path, self._type), place.path, place.type
        op = "external" if place.opaque else "call_module"
        word = place.path.rpartition(".")[2]
        self._add(op, place.path, word, place.path, None, refs, args, kwargs, found)
        self._path, self._type = outer

    # ---- functions ------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and write it down if it returned a tensor."""
        del types
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        self._look_for_hidden_code()
        word = word_of(func)
        self.asked = self.asked or getattr(func, "__name__", "") in ASKS
        if word in METADATA or functorch_active() or (self.modules.reduced and gathers(args)):
            # Wrapped tensors have no gradient of their own; what comes out of a transform is external.
            return func(*args, **kwargs)
        with without_torch_function():  # what a mode or class of the user's is to see is the call, and once
            if not torch.is_grad_enabled():
                self._look_for_function()
            refs = self._refs(args, kwargs)
        self._begins()
        result = func(*args, **kwargs)
        self._sequence = sequence_number()
        self._written(func, refs, args, kwargs, result)
        return result

    def _written(
        self, func: Callable[..., Any], refs: tuple[Ref | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any],
        result: Any,
    ) -> None:  # fmt: skip
        """A function has returned: write it down if it returned a tensor."""
        if isinstance(result, Tensor):
            found = [("", result)]
        elif isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            found = list(tensors_in(result))
        else:
            found = [("", args[0])] if func is _WRITES_ITEM else []
        if found:
            word, given = word_of(func), args
            if word[:2] == "__":  # a reflected operator: what stands first in the user's code comes second here
                word, refs, given = word[2:], refs[::-1], args[::-1]
            with without_torch_function():
                self._note_changed(args)
                self._add("call", func, word, f"{self._path}/{word}", func, refs, given, kwargs, found)

    def _add(  # noqa: PLR0913, PLR0917  # the facts of one node; a dataclass would be made a second time on the hot path
        self, op: str, target: Any, word: str, stem: str, func: Any, refs: tuple[Ref | None, ...],
        args: tuple[Any, ...], kwargs: dict[str, Any], found: list[tuple[str, Tensor]],
    ) -> None:  # fmt: skip
        number = len(self.calls)
        old = self._old[number] if self._same and number < len(self._old) else None
        enabled = torch.is_grad_enabled()
        if old is None or not same_call(old, stem, func, refs, found):
            self._same = False
            template = self._template
            if op == "call":
                op, target = fx_op(func, word)
            old = Call(
                op, target, word, stem, self._path, self._type, func, refs, template(args), template(kwargs),
                tuple(describe_output(position, tensor) for position, tensor in found),
                None if op in ("placeholder", "output") else self._source(), enabled,
                op == "call_module" and frozen(self.modules.at[target].module),
                tuple(self._values.ref(tensor) for _, tensor in found),
                tuple(self._values.base(tensor) for _, tensor in found), self._values.changed(args, kwargs),
                *leaf_facts(self.modules, op, target), checkpointed=not enabled and in_checkpoint(),
            )  # fmt: skip
        if self.beside is not None:
            at = self.beside.position
            self.ranges.append((at if op in ("placeholder", "output", "external") else self._began, at))
        self.hidden |= old.hooked  # a hook or forward of its own may use any value that it kept
        self.calls.append(old)
        self._first_sites.append(self._sites)
        if self.forward_record.values is not None:
            self.forward_record.values.called(self.calls, found, self._sites, (args, kwargs))
        for output, (position, tensor) in zip(old.outputs, found, strict=True):
            self._bind(Ref(number, position), tensor, output)

    def _template(self, value: Any) -> Any:
        return self._values.template(value, self._unknown)

    def _begins(self) -> None:
        if self.beside is not None:
            self._began = self.beside.position

    def _source(self) -> str | None:
        return self._line or source_line()

    def _bind(self, ref: Ref, tensor: Tensor, output: Output) -> None:
        site = -1
        # A view of what requires grad does so too where gradients are off, but gets none.  A hook on it would be kept
        # by the tensor and never given to the autograd function that may return it, nor would the user's later ones.
        requires = tensor.requires_grad and torch.is_grad_enabled()
        forward_record = self.forward_record
        if output.differentiable:
            site = self._sites
            self._sites += 1
            forward_record.shapes.append(tensor.shape if not tensor.is_nested else ())
            if requires and forward_record.edges is not None:
                forward_record.edges.note(site, tensor)
                self._sequence = sequence_number()
            if not requires:
                forward_record.not_required.add(site)
            elif not self._has_hook(tensor, site):
                self.put(forward_record, tensor, site)
            if self.beside is not None and site not in forward_record.same:
                self.beside.note(tensor, site)
        self._values.bind(ref, tensor, site, requires_grad=requires)

    def _has_hook(self, tensor: Tensor, site: int) -> bool:
        """Whether it is the very tensor of an earlier site, unchanged: then one hook sees the gradient of both."""
        known = self._values.find(tensor)
        if known is None or known.site < 0 or not known.requires_grad or known.version != version_of(tensor):
            return False
        forward_record = self.forward_record
        if forward_record.again or forward_record.rewriting is not None:  # a rule acts where a hook is
            return False
        forward_record.same[site] = known.site
        return True

    # ---- values ---------------------------------------------------------------------------------------------

    def _refs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Ref | None, ...]:
        refs: list[Ref | None] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                refs.append(self._lookup(value))
            elif not isinstance(value, (int, float, str, torch.Size, type(None))):
                refs.extend(self._lookup(tensor) for _, tensor in tensors_in(value))
        return tuple(refs)

    def _lookup(self, tensor: Tensor) -> Ref | None:
        known = self._values.find(tensor)
        if known is None:
            if id(tensor) in self.modules.tensors or not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                return None
            return self._external(tensor, None)
        if known.view and known.version != version_of(tensor):
            self._lose(known)
        if not known.requires_grad and tensor.requires_grad:
            if is_recomputed(tensor):
                self._checkpointed(tensor, known)
                return known.ref
            return self._external(tensor, known.ref)
        if not self.calls[known.ref.call].grad_enabled and torch.is_grad_enabled() and made_by_function(tensor):
            return self._external(tensor, known.ref)  # a view made inside of it, which it returned
        return known.ref

    def _checkpointed(self, tensor: Tensor, known: Known) -> None:
        """The result of a region that runs again in the backward pass: its gradient arrives at the outer tensor."""
        known.requires_grad = self.forward_record.recomputed = True
        if known.site >= 0:
            self.forward_record.not_required.discard(known.site)
            self.put(self.forward_record, tensor, known.site)
            if self.forward_record.edges is not None:
                self.forward_record.edges.note(known.site, tensor)
        forward_record, put = self.forward_record, self.put
        Recomputation(
            observe=lambda replay, hook: Session(self.modules, replay, hook, None),
            put=lambda value: put(forward_record, value, -1),
            calls=self.calls, last=known.ref.call, first_site=self._first_sites,
        ).wrap(tensor.grad_fn)  # fmt: skip

    def _external(self, tensor: Tensor, inner: Ref | None) -> Ref:
        """A value that was made where no call could be seen: by a custom function, compiled or recomputed code."""
        with without_torch_function():
            maker = type(tensor.grad_fn).__name__.removesuffix("Backward") if tensor.grad_fn is not None else "leaf"
            applied = self._functions.known.get(sequence_of(tensor.grad_fn)) if made_by_function(tensor) else None
            if applied is None:
                refs = (inner,) if inner is not None else self._values.makers_of(tensor)
                given = (*refs, *self._strays.referenced_leaf(tensor))
                self._add("external", maker, maker, f"{self._path}/{maker}", None, refs, given, {}, [("", tensor)])
            else:
                self._add_applied(maker, applied, inner, tensor)
        return self._values.by_id[id(tensor)].ref

    def _add_applied(self, maker: str, applied: Applied, inner: Ref | None, tensor: Tensor) -> None:
        """The result of a custom function belongs to the module and line that applied it."""
        refs = applied.refs if inner is None or inner in applied.refs else (inner, *applied.refs)
        outer = self._path, self._type
        self._path, self._type, self._line = applied.path, applied.type, applied.source
        self._add("external", maker, maker, f"{applied.path}/{maker}", None, refs, refs, {}, [("", tensor)])
        (self._path, self._type), self._line = outer, None

    def _unknown(self, tensor: Tensor) -> ParameterRef | Opaque:
        """A tensor that no call returned."""
        name = self.modules.tensors.get(id(tensor))
        return ParameterRef(name) if name is not None else self._strays.unnamed(tensor)

    def _look_for_function(self) -> None:
        """The first call in the forward of a custom function: remember who applied it, by the number of its node."""
        frame = self._functions.begins(sequence_number() - 1)
        if frame is not None:
            with torch.enable_grad():  # what it was given was made outside of it
                self._functions.note(frame, self._path, self._type, self._refs(tuple(given_to(frame)), {}))

    def _look_for_hidden_code(self) -> None:
        """Autograd nodes that no call of ours made: code that cannot be seen may use any value."""
        if not self.hidden and sequence_number() != self._sequence:
            self.hidden = True

    def _note_changed(self, args: tuple[Any, ...]) -> None:
        """After a call: a view that it changed in place has lost its hook."""
        if args and isinstance(args[0], Tensor):
            known = self._values.find(args[0])
            if known is not None and known.view and known.version != version_of(args[0]):
                self._lose(known)

    def _lose(self, known: Known) -> None:
        """The hook on a view cannot see what flows back after its memory was changed: autograd gave it a new node."""
        site = known.site
        if site < 0:
            return
        self.lost.add(known.ref)
        self.forward_record.unmeasurable.add(site)
        while site in self.forward_record.same:  # the hook serves earlier sites too, if it is the very tensor of theirs
            site = self.forward_record.same[site]
            self.forward_record.unmeasurable.add(site)
