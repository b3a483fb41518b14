"""Rewrite rules under the native recorder: known ways of a forward, along which later calls are followed in C++.

A *way* is what the Python recorder writes down of a call: which functions and modules ran, on which values, and what
they returned.  A later call is compared with the known ways as it runs, and only tensors at which a rule acts get a
hook.  Where it does something else, the Python recorder takes over at that very place, from the state that it would
have had: so all names and sites are those that it finds by itself, in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxgrad.capture.calls import word_of
from fxgrad.capture.captured import CallGraph
from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import METADATA
from fxgrad.courses.beside import Beside
from fxgrad.courses.rest import Given, Rest, with_their_tensors
from fxgrad.courses.runs import input_tensors
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.probes.probe import put
from fxgrad.record.native import LEVELS
from fxgrad.rewriting.apply import NodeRules
from fxgrad.rewriting.selection import Nodes, asks_python
from fxgrad.schema import Level
from fxgrad.torch_support.compiled import Looking
from fxgrad.torch_support.private import (
    compiled_code,
    without_torch_function,
)
from fxgrad.torch_support.structure import tensors_in

FOLLOWED = "every call was that of a known way"
_MOST = 64  # ways that are kept
_PLAIN = (
    int, float, bool, complex, str, bytes, slice, range, type(None), type(...), FunctionType, BuiltinFunctionType, type,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip  # no tensor is in a value of one of these very types


class _Mode(TorchFunctionMode):
    """Leads torch's functions to C++.  While dynamo compiles, which cannot look into it, to the Python recorder."""

    def __init__(self, function: Callable[..., Any], rest: Rest | None) -> None:
        super().__init__()
        self._function = function
        self.rest = rest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            if self.rest is not None:
                return self.rest.__torch_function__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        return self._function(func, types, args, kwargs)


class _Following:
    """One call; what C++ asks Python for."""

    def __init__(self, ways: Ways, forward_record: ForwardRecord, given: Given, previous: CallGraph | None) -> None:
        self._ways = ways
        self._forward_record = forward_record
        self._beside = ways.beside(forward_record)
        self._given = given
        self._previous = previous
        self._inputs = input_tensors(given.args, given.kwargs, given.names)
        self.session: Rest | None = None
        self._mode: _Mode | None = None
        self.left = ""  # where, in words
        self.native = ways.follower(self, None if self._beside is None else self._beside.native)

    def close(self) -> None:
        """Whatever happened: C++ looks on no longer."""
        self.native.close()
        if self.session is not None:
            del self.session.given  # what runs again in the backward pass keeps the session
        if self._beside is not None:
            self._beside.close()

    def run(self) -> Any:
        """Run the forward."""
        native, given = self.native, self._given
        self._forward_record.partial = self._so_far
        enter, leave, function = native.hooks()
        with without_torch_function():
            if self._beside is not None:
                self._beside.begin(self._inputs)
            native.begin(self._inputs)
        native.mode = self._mode = mode = _Mode(function, self.session)
        with Looking(mode, enter, leave):
            try:
                result = given.forward(*given.args, **given.kwargs)
            finally:
                native.restore()
        with without_torch_function():
            native.finish(result)
            if self._beside is not None:
                self._beside.finish(result)
                self._ways.failed = self._beside.failed
        self._forward_record.partial = None
        return result

    def put(self, tensor: Tensor, site: int) -> None:
        """A tensor at which a rule acts."""
        with without_torch_function():
            put(self._forward_record, tensor, site)

    def hand_over(  # noqa: PLR0913, PLR0917  # as C++ calls it
        self, number: int, calls: int, spans: int, stack: Any, inside: int, values: Any
    ) -> Rest:
        """The Python recorder of the rest."""
        known = self._ways.call_graphs[number] if number >= 0 else None
        beside = None if self._beside is None else self._beside.native
        self.session = session = Rest(self._ways.modules, self._forward_record, put, known or self._previous, beside)
        session.given, session.places = self._given, self._ways.places
        if self._mode is not None:
            self._mode.rest = session
        if known is not None:
            call = known.calls[calls - 1] if calls else None
            behind = "" if call is None else f" behind {call.key_stem}" + (f" ({call.source})" if call.source else "")
            self.left = f"left the known ways{behind}"
            session.resume(calls, spans, inside)
        session.open([(None if number < 0 else session.places[number], given) for number, given in stack])
        session.know(values)
        return session

    def _so_far(self) -> CallGraph:
        number, calls, spans = self.native.at()
        if number < 0:
            return CallGraph([], [])
        known = self._ways.call_graphs[number]
        return CallGraph(known.calls[:calls], known.spans[:spans])


class Ways:
    """The known ways of one model's forward.

    Args:
        extension: the compiled module.
        modules: the model's paths.
        level: statistics level, where calls are observed as well.

    Attributes:
        extension, modules: as given.
        call_graphs: the graphs of the known ways.
        places: the modules below the model, as C++ numbers them.
        failed: what went wrong in the observer of a call; empty as long as nothing did.
    """

    def __init__(self, extension: Any, modules: ModuleMap, level: Level) -> None:
        self.extension = extension
        self._level = extension.Level(LEVELS[level])
        self._model = extension.Model()
        self._parameters: Any = None
        self.modules = modules
        self.call_graphs: list[CallGraph] = []
        self.places: list[Place] = []
        self.failed = ""
        self._without: list[frozenset[int]] = []
        self._native: Any = None
        self._built: Any = None
        self._bound: Any = None
        self._acting: list[set[int]] = []  # by call graph, the sites at which rules act
        self._again: set[int] = (
            set()
        )  # of all call graphs, those whose very tensor such a site is; a beginning may be shared

    def refuses(self, rules: NodeRules) -> str | None:
        """Why the Python recorder has to do all of a call; None where it need not."""
        if any(asks_python(rule.where) for _, _, rule in (*rules.bound, *rules.at_edges)):
            return "a predicate of a rule may ask for what only Python's recorder looks at"
        if rules.at_edges:
            return "rules at edges look at the graph of calls, which Python's recorder writes down"
        if compiled_code():
            return "something in this process was compiled by dynamo; Python's recorder sees what runs compiled"
        if any(place.opaque for place in self.modules.places.values()):
            return "compiled and scripted modules are seen by Python's recorder only"
        if any(
            call_graph.hidden or any(call.op == "external" for call in call_graph.calls)
            for call_graph in self.call_graphs
        ):
            return "code ran that no recorder can see (a custom autograd.Function); Python's recorder watches for it"
        return None

    def refuses_to_observe(self, forward_record: ForwardRecord) -> str | None:
        """Why a call under rules that is observed as well has Python's hooks; None where it need not."""
        if self.failed:
            return f"the native observer failed: {self.failed}".splitlines()[0]
        if forward_record.edges is not None or forward_record.values is not None:
            return "edges and forward values are measured by Python's recorder where rewrite rules act"
        if any(call_graph.escalated for call_graph in self.call_graphs):
            return (
                "a norm outside of the range of float32 is measured again, by Python's recorder where rewrite rules act"
            )
        return None

    def beside(self, forward_record: ForwardRecord) -> Beside | None:
        """The observer of a call; None for one that is not observed."""
        if forward_record.number < 0:
            return None
        if self.modules.parameters is not self._parameters:
            self._parameters = self.modules.parameters
            self._model.set_parameters([parameter for _, parameter in self._parameters])
        return Beside(self.extension, self._model, self._level, forward_record)

    def follower(self, owner: Any, forward: Any) -> Any:
        """C++'s part of one call; ``forward`` observes it, if any."""
        return self.extension.Follower(self._native, owner, forward)

    def run(self, forward_record: ForwardRecord, given: Given, previous: CallGraph | None) -> tuple[Any, str]:
        """Run a call; what it returned, and how it left the known ways (empty where it didn't)."""
        rules: NodeRules = forward_record.rewriting.rules
        self._refresh(rules)
        call = _Following(self, forward_record, given, previous)
        try:
            result = call.run()
            if call.session is None:
                number = call.native.plan
                forward_record.call_graph = self.call_graphs[number]
                forward_record.not_required |= self._without[number]
            else:
                self._learn(call, forward_record.graph, rules)
        finally:
            call.close()
        if call.session is None:
            return result, ""
        return result, call.left or "the first call of a kind; the native recorder learns its way"

    def _refresh(self, rules: NodeRules) -> None:
        if self.modules.places is not self._built:
            self._built = self.modules.places
            self.call_graphs, self._without, self._acting, self._again = [], [], [], set()
            root = self.modules.root
            self.places = [place for place in self._built.values() if place.module is not root]
            owned = [
                *(tensor for _, tensor in self.modules.parameters),
                *(tensor for _, tensor in self.modules.buffers),
            ]
            self._native = self.extension.Ways(
                [(place.module, place.leaf) for place in self.places], owned, _flat, _is_metadata,
                Tensor.__setitem__, list(_PLAIN),
            )  # fmt: skip
        if rules.bound is not self._bound:
            self._bound = rules.bound
            self._acting, self._again = [], set()
            for number in range(len(self.call_graphs)):
                self._hook(number, rules)

    def _learn(self, call: _Following, call_graph: CallGraph, rules: NodeRules) -> None:
        """What Python's recorder saw is known from here on."""
        number = len(self.call_graphs)
        if number == _MOST or not call.native.learn(number):
            return
        self.call_graphs.append(call_graph)
        self._without.append(frozenset(
            site for site, spec in enumerate(call_graph.sites)
            if not (spec.output.requires_grad and call_graph.calls[spec.call].grad_enabled)
        ))  # fmt: skip
        self._hook(number, rules)

    def _hook(self, number: int, rules: NodeRules) -> None:
        """Tell C++ where rules act.

        What a module returns is known when it has returned, and a rule on what a call passes back looks at the graph
        around it: there all values get their hooks, as under Python's recorder.
        """
        everywhere = rules.through or any(not isinstance(rule.where, Nodes) for _, _, rule in rules.bound)
        if not everywhere:
            call_graph = self.call_graphs[number]
            acting = set(rules.resolve(call_graph).table)
            self._acting.append(acting)
            self._again |= with_their_tensors(call_graph, acting) - acting
        for n in range(number + 1):
            self._native.set_hooked(n, set() if everywhere else self._acting[n] | self._again, everywhere)


def _flat(value: Any) -> list[tuple[str, Tensor]]:
    return list(tensors_in(value))


def _is_metadata(func: Callable[..., Any]) -> bool:
    return word_of(func) in METADATA
