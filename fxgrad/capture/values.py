"""The living tensors of one forward call, and which call returned each."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxgrad.capture.captured import Opaque, ParameterRef, Ref, constant
from fxgrad.torch_support.private import base_of, version_of
from fxgrad.torch_support.private_passes import sequence_of
from fxgrad.torch_support.structure import tensors_in


@dataclass(slots=True)
class Known:
    """What is known of a living tensor: who returned it, and what it was like then."""

    tensor: weakref.ref[Tensor]
    ref: Ref
    requires_grad: bool
    version: int
    site: int
    view: bool


class Values:
    """Finds values by their tensor.  Holds no tensor; a tensor that is returned again is its latest value."""

    def __init__(self) -> None:
        self.by_id: dict[int, Known] = {}
        self._bases: dict[int, tuple[weakref.ref[Tensor], Ref]] = {}
        self._bound: list[Known] = []  # since ``makers_of`` was last asked
        self._owners: dict[int, list[Known]] = {}  # by the sequence number of the autograd node

    def find(self, tensor: Any) -> Known | None:
        """What is known of ``tensor``."""
        known = self.by_id.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def ref(self, tensor: Any) -> Ref | None:
        """Which value ``tensor`` is."""
        known = self.find(tensor)
        return known.ref if known is not None else None

    def bind(self, ref: Ref, tensor: Tensor, site: int, *, requires_grad: bool) -> None:
        """``tensor`` is the value ``ref`` now."""
        view = base_of(tensor) is not None
        known = self.by_id[id(tensor)] = Known(weakref.ref(tensor), ref, requires_grad, version_of(tensor), site, view)
        if requires_grad:
            self._bound.append(known)

    def makers_of(self, tensor: Tensor) -> tuple[Ref, ...]:
        """The known values that an external value was computed from, found in the autograd graph."""
        self._note_owners()
        queue, seen, found = [tensor.grad_fn], set[Any](), list[Ref]()
        while queue and len(seen) < 256:  # noqa: PLR2004  # a bound for huge external graphs; the edges are an aid
            node = queue.pop(0)
            for previous, _ in node.next_functions if node is not None else ():
                owner = self._owner(previous)
                if owner is not None:
                    found.append(owner)
                elif previous is not None and previous not in seen:
                    seen.add(previous)
                    queue.append(previous)
        return tuple(dict.fromkeys(found))

    def _note_owners(self) -> None:
        """Each value is looked at once, however many external values there are."""
        for known in self._bound:
            value = known.tensor()
            if value is not None and value.grad_fn is not None:
                self._owners.setdefault(sequence_of(value.grad_fn), []).append(known)
        self._bound.clear()

    def _owner(self, node: Any) -> Ref | None:
        """The value that an autograd node made, the latest where there are several."""
        for known in reversed(self._owners.get(sequence_of(node), ()) if node is not None else ()):
            value = known.tensor()
            if value is not None and value.grad_fn is node:
                return known.ref
        return None

    def base(self, tensor: Tensor) -> Ref | None:
        """The value that ``tensor`` is a view of; memory that no value is known of gets a name of its own."""
        base = base_of(tensor)
        if base is None:
            return None
        seen = self.ref(base)
        if seen is not None:
            return seen
        known = self._bases.get(id(base))
        if known is None or known[0]() is not base:
            known = self._bases[id(base)] = (weakref.ref(base), Ref(-1 - len(self._bases), ""))
        return known[1]

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Ref, ...]:
        """The values among the arguments of a call that were changed in place since they were returned."""
        known = [(tensor, self.find(tensor)) for _, tensor in tensors_in((args, kwargs))]
        return tuple(k.ref for tensor, k in known if k is not None and version_of(tensor) != k.version)

    def template(self, value: Any, named: Callable[[Tensor], Any]) -> Any:  # noqa: PLR0911  # one return a type
        """An argument as a call graph holds it; ``named`` is asked for a tensor that is no known value."""
        if isinstance(value, Tensor):
            known = self.ref(value)
            return named(value) if known is None else known
        if isinstance(value, (Ref, ParameterRef, Opaque)):
            return value
        if isinstance(value, tuple):
            return tuple(self.template(item, named) for item in value)
        if isinstance(value, list):
            return [self.template(item, named) for item in value]
        if isinstance(value, dict):
            return {str(key): self.template(item, named) for key, item in dict.items(value)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: self.template(getattr(value, f.name, None), named) for f in dataclasses.fields(value)}
        if isinstance(value, slice):
            return slice(*(self.template(part, named) for part in (value.start, value.stop, value.step)))
        return constant(value)
