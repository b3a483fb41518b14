"""What remains of a call that left the known ways: the Python recorder, taking over in the middle of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxgrad.capture.captured import CallGraph, Ref
from fxgrad.capture.eager import Session
from fxgrad.capture.modules import Place
from fxgrad.capture.values import Known
from fxgrad.torch_support.private import sequence_number, version_of, without_torch_function

_Named = Sequence[tuple[int, str] | None]


@dataclass(frozen=True, slots=True)
class Given:
    """A call that is about to run."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]


class Rest(Session):
    """The Python recorder of what remains of a call.

    Attributes:
        given: the call.
        places: the modules, as C++ numbers them.
    """

    given: Given
    places: Sequence[Place]
    _kept = 0  # sites from before

    def resume(self, calls: int, spans: int, inside: int) -> None:
        """Take over behind so many calls and module calls of the previous call graph."""
        call_graph, forward_record = self.previous, self.forward_record
        if call_graph is None:
            return
        self.spans = call_graph.spans[:spans]
        self._inside = inside
        for call in call_graph.calls[:calls]:
            self.calls.append(call)
            self._first_sites.append(self._sites)
            for output in call.outputs:
                if output.differentiable:
                    if not (output.requires_grad and call.grad_enabled):
                        forward_record.not_required.add(self._sites)
                    forward_record.shapes.append(output.shape)
                    self._sites += 1
        self._kept = self._sites

    def _has_hook(self, tensor: Tensor, site: int) -> bool:
        """A tensor from before that is returned again: one hook serves all its sites, whoever comes to need one."""
        known, forward_record = self._values.find(tensor), self.forward_record
        if known is not None and known.requires_grad and 0 <= known.site < self._kept:
            assert self.previous is not None  # noqa: S101  # for mypy: it has these sites
            if known.version == version_of(tensor):
                sites = with_their_tensors(self.previous, {known.site}) - forward_record.not_required
                for earlier in sorted(sites.difference(forward_record.rewriting.sites_at(tensor))):
                    self.put(forward_record, tensor, earlier)
        return super()._has_hook(tensor, site)

    def open(self, stack: Sequence[tuple[Place | None, _Named]]) -> None:
        """The modules that are running, the outermost first, with the values that they were given."""
        for place, given in stack:
            self._stack.append((place, _refs(given)))
            if place is not None and not place.leaf:
                self._path, self._type = place.path, place.type

    def know(self, values: Sequence[tuple[Tensor, int, str, bool, int, int, bool]]) -> None:
        """The living values."""
        for tensor, call, position, requires_grad, version, site, view in values:
            known = Known(weakref.ref(tensor), Ref(call, position), requires_grad, version, site, view)
            self._values.by_id[id(tensor)] = known

    def written(
        self, func: Callable[..., Any], given: _Named, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A function that was running when this session took over has returned."""
        self._written(func, _refs(given), args, kwargs, result)

    def returned(self, place: int, given: _Named, result: Any) -> None:
        """So has a leaf module, whose call is known."""
        with without_torch_function():
            self._returned(self.places[place], _refs(given), result)

    def begin(self) -> None:
        """The arguments."""
        self._placeholders(self.given.args, self.given.kwargs, self.given.names)
        self._sequence = sequence_number()

    def finish(self, result: Any) -> None:
        """The forward has returned."""
        inputs = itertools.takewhile(lambda n: self.calls[n].op == "placeholder", range(len(self.calls)))
        self._finish(result, tuple(Ref(number, "") for number in inputs))


def _refs(given: _Named) -> tuple[Ref | None, ...]:
    return tuple(None if one is None else Ref(*one) for one in given)


def with_their_tensors(call_graph: CallGraph, sites: set[int]) -> set[int]:
    """The sites, and those whose very tensor they are: there is one hook for all of these, put on at the first."""
    found, queue = set(sites), list(sites)
    while queue:
        spec = call_graph.sites[queue.pop()]
        call = call_graph.calls[spec.call]
        same = call.same_object[[out.position for out in call.outputs].index(spec.output.position)]
        number = None if same is None else call_graph.site_numbers.get(same)
        if number is not None and number not in found:
            found.add(number)
            queue.append(number)
    return found
