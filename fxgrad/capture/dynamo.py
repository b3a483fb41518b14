"""The ``dynamo`` front end: what ``torch.compile`` hands to its backend, written down as calls.

Dynamo runs the model's own Python and cuts it into Torch-level graphs, with its own guards.  Each graph becomes a
``Fragment``; where a forward runs through several, ``join`` makes one call graph of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from fxgrad.capture.calls import facts_of
from fxgrad.capture.calls import frozen as all_frozen
from fxgrad.capture.captured import Call, CallGraph, Output, ParameterRef, Ref, constant
from fxgrad.capture.compare import node_word
from fxgrad.capture.dynamo_notes import Owner, Place, argument_of, leaf_of, owner_of, source_of, tensor_at
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.modules import Place as ModulePlace
from fxgrad.capture.names import METADATA

_SPELLINGS = {"numpy_T": "T"}  # what dynamo calls an attribute of Tensor
_TOP = re.compile(r"args\[(?P<index>\d+)\]|kwargs\['(?P<name>\w+)'\]")


class Input(NamedTuple):
    """A placeholder of a fragment, by its number."""

    number: int


@dataclass(slots=True)
class Part:
    """One node of a fragment, or all nodes of one call of a leaf module: what a ``Call`` will be made of."""

    op: str
    target: Any
    word: str
    owner: Owner
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Output, ...]
    source: str | None
    grad_enabled: bool


@dataclass(slots=True, eq=False)
class Fragment:
    """One graph of dynamo.

    Attributes:
        parts: in order; those of placeholders first, with ``Input`` numbers.
        inputs: names of the placeholders as the user's code has them, None for a parameter or buffer.
        parameters: where each parameter and buffer is that it takes, by placeholder number.
        returned: what the graph returns, as values.
        sites: by node of the graph, the site number of each tensor.
        numbers: by part, the first of its site numbers.
        count: number of sites.
    """

    parts: list[Part] = field(default_factory=list)
    inputs: list[str | None] = field(default_factory=list)
    parameters: dict[int, Place | None] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()
    sites: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    count: int = 0


def fragment(graph: fx.Graph, facts: Mapping[fx.Node, Any], values: Sequence[Any], owned: Sequence[bool]) -> Fragment:
    """Write a graph of dynamo down.

    Args:
        graph: Torch-level graph of dynamo.
        facts: of a run of it (``functionalise.watch_run``).
        values: what stands for the placeholders.
        owned: which of them are parameters or buffers.
    """
    return _Reader(facts).read(graph, values, owned)


class _Reader:
    def __init__(self, facts: Mapping[fx.Node, Any]) -> None:
        self.facts = facts
        self.made = Fragment()
        self.known: dict[int, Any] = {}  # the latest value of each tensor object

    def read(self, graph: fx.Graph, values: Sequence[Any], owned: Sequence[bool]) -> Fragment:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for number, (node, value, own) in enumerate(zip(placeholders, values, owned, strict=True)):
            self._placeholder(number, node, value, own=own)
        rest = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        while rest:
            leaf = leaf_of(rest[0])
            taken = 1
            if leaf is not None:
                while taken < len(rest) and leaf_of(rest[taken]) == leaf:
                    taken += 1
                self._leaf_call(rest[:taken])
            else:
                self._call(rest[0])
            rest = rest[taken:]
        output = next(node for node in graph.nodes if node.op == "output")
        self.made.returned = tuple(self._value(item) for item in output.args[0])
        return self.made

    def _placeholder(self, number: int, node: fx.Node, value: Any, *, own: bool) -> None:
        name = None if own or not isinstance(value, Tensor) else argument_of(node)
        self.made.inputs.append(name)
        fact = self.facts[node]
        if not fact.objects:
            return
        if own:
            self.made.parameters[number] = tensor_at(node)
        self.known[fact.objects[0]] = Input(number)
        if not own:
            self._add(node, "placeholder", name or node.name, [node], ())
            self.known[fact.objects[0]] = Input(number)

    def _call(self, node: fx.Node) -> None:
        fact = self.facts[node]
        word = node_word(node) if node.op in ("call_function", "call_method") else "external"
        word = _SPELLINGS.get(word, word)
        if word == "setitem" and fact.changed:
            self._add(node, "call_function", word, [node], node.args, fact=self.facts[fact.changed[0]])
        elif fact.objects and node.op != "get_attr" and word not in METADATA and not self._element(node, word):
            args = node.args
            if word in ("add", "mul") and len(args) == 2 and not isinstance(args[0], fx.Node):  # noqa: PLR2004  # 2 * x
                args = args[::-1]  # runs as x * 2
            higher = "higher_order" in type(node.target).__module__ + getattr(node.target, "__module__", "")
            op = "external" if higher or node.op == "call_module" else node.op
            self._add(node, op, word, [node], args)

    def _element(self, node: fx.Node, word: str) -> bool:
        """An element of a tuple is no node of its own."""
        owner = node.args[0] if node.args else None
        return word == "getitem" and isinstance(owner, fx.Node) and not self.facts[owner].tensor

    def _leaf_call(self, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        exits = [n for n in nodes if self.facts[n].tensor and any(user not in inside for user in n.users)]
        exits = exits or [n for n in nodes if self.facts[n].tensor][-1:]
        if not exits:
            return
        given: list[fx.Node] = []
        for node in nodes:
            given += [n for n in node.all_input_nodes if n not in inside and n not in given]
        seen = [n for n in given if not (isinstance(v := self._value(n), Input) and v.number in self.made.parameters)]
        word = node_word(exits[-1]) if exits[-1].op in ("call_function", "call_method") else ""
        self._add(exits[-1], "call_module", word, exits, tuple(n for n in seen if self.facts[n].objects))

    def _add(  # noqa: PLR0913  # the facts of one call
        self, node: fx.Node, op: str, word: str, exits: list[fx.Node], args: Any, *, fact: Any = None
    ) -> None:
        owner = owner_of(node)
        number = len(self.made.parts)
        outputs: list[Output] = []
        objects: list[int] = []
        given = tuple(self._value(arg) for arg in args)
        self.made.numbers.append(self.made.count)
        for index, exit_ in enumerate(exits):
            one = fact or self.facts[exit_]
            places = [f"[{index}]{p}" if len(exits) > 1 else p for p, _, _ in one.outputs]
            made = [
                Output(place, shape, dtype, device, dtype.is_floating_point or dtype.is_complex, requires)
                for place, (_, requires, device), (shape, _, dtype) in zip(places, one.outputs, one.layout, strict=True)
            ]
            numbers = []
            for output in made:
                numbers.append(self.made.count if output.differentiable else -1)
                self.made.count += output.differentiable
            self.made.sites[exit_] = tuple(numbers)
            outputs += made
            objects += one.objects
        kwargs = {} if op == "call_module" else {name: self._value(value) for name, value in node.kwargs.items()}
        grad = self.facts[node].grad_enabled
        target: Any = word if op in ("placeholder", "call_method") else node.target
        self.made.parts.append(
            Part(op, target, word, owner, given, kwargs, tuple(outputs), source_of(node), grad)
        )  # fmt: skip
        for identity, output in zip(objects, outputs, strict=True):
            self.known[identity] = Ref(number, output.position)

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            fact = self.facts[value]
            found = tuple(self.known.get(identity) for identity in fact.objects)
            return found[0] if fact.tensor else found or constant(None)
        if isinstance(value, tuple):
            return tuple(self._value(item) for item in value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {str(key): self._value(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self._value(value.start), self._value(value.stop), self._value(value.step))
        return constant(value)


# ---- several graphs, one call graph ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Joined:
    """The call graph of a forward through fragments; ``numbers[i]`` maps its site numbers to those of run i."""

    call_graph: CallGraph
    numbers: list[dict[int, int]]


def join(
    runs: Sequence[tuple[Fragment, Mapping[int, tuple[int, int]], Mapping[int, Tensor]]], modules: ModuleMap,
    names: Sequence[str],
) -> Joined:  # fmt: skip
    """One call graph of all runs of one forward.

    Args:
        runs: the fragments in the order in which they ran, and for each placeholder that is a tensor which an earlier
            run returned: the number of that run and the position among what it returned; and the parameters and
            buffers that it ran with, by placeholder.
        modules: of the model, for paths and names.
        names: of the positional parameters of the model's forward.
    """
    joiner = _Joiner(modules, names)
    for made, links, bound in runs:
        joiner.add(made, links, bound)
    joiner.finish()
    return Joined(CallGraph(joiner.calls, []), joiner.numbers)


class _Joiner:
    def __init__(self, modules: ModuleMap, names: Sequence[str]) -> None:
        self.modules = modules
        self.names = names
        self.root = modules.places[id(modules.root)]
        self.calls: list[Call] = []
        self.numbers: list[dict[int, int]] = []
        self.sites = 0
        self._returned: list[tuple[Any, ...]] = []
        self._roots: dict[str, str] = {}  # by where dynamo entered: what stands before paths from there, in this run

    def add(self, made: Fragment, links: Mapping[int, tuple[int, int]], bound: Mapping[int, Tensor]) -> None:
        """Append one run."""
        place: dict[Any, Any] = {}
        self._roots = {}
        for number, where in made.parameters.items():
            name = self.modules.tensors.get(id(bound[number])) if number in bound else None
            place[Input(number)] = ParameterRef(name or "?")
            if where is not None and name is not None and f".{name}".endswith(f".{where.path}"):
                self._roots.setdefault(where.root, name.removesuffix(where.path))
        for number, (run, position) in links.items():
            place[Input(number)] = self._returned[run][position]
        of: dict[int, int] = {}
        inputs = iter([Input(n) for n, name in enumerate(made.inputs) if name is not None])
        for local, part in enumerate(made.parts):
            first = made.numbers[local]
            own = next(inputs) if part.op == "placeholder" else None
            if own is not None and own in place:
                continue  # its site is the one of the graph that it left
            self.calls.append(self._call(part, place, later=bool(self._returned)))
            here = len(self.calls) - 1
            if own is not None:
                place[own] = Ref(here, "")
            for output in part.outputs:
                place[Ref(local, output.position)] = Ref(here, output.position)
                if output.differentiable:
                    of[self.sites] = first
                    self.sites, first = self.sites + 1, first + 1
        self.numbers.append(of)
        self._returned.append(tuple(_placed(value, place) for value in made.returned))

    def _place(self, owner: Owner) -> ModulePlace | None:
        """The module in this model: a graph that was made for one model serves another of its class as well."""
        where = owner.place
        if where is not None and where.root in self._roots:
            return self.modules.at.get((self._roots[where.root] + where.path).rstrip("."))
        return None if owner.id is None else self.modules.places.get(owner.id)

    def _call(self, part: Part, place: Mapping[Any, Any], *, later: bool) -> Call:
        found = self._place(part.owner)
        path, kind = (found.path, found.type) if found is not None else ("", part.owner.type or self.root.type)
        op, word, target = part.op, part.word, part.target
        if op == "placeholder":
            word = target = self._name(word)
            stem = f"input:{word}"
            if later:  # made between two graphs, by code that dynamo left to Python
                op, word, stem, path, kind = "external", "graph_break", "/graph_break", "", self.root.type
        elif op == "call_module" and found is not None:
            stem, target, word = path, path, path.rpartition(".")[2]
        elif op == "call_module":  # made in forward: its calls belong to the model's
            op, stem, kind = "call_function", f"/{word}", self.root.type
        else:
            stem = f"{path}/{word}"
        args = () if op == "placeholder" else tuple(_placed(value, place) for value in part.args)
        kwargs = {name: _placed(value, place) for name, value in part.kwargs.items()}
        refs = tuple(arg if isinstance(arg, Ref) else None for arg in args)
        leaf = found.module if found is not None and op == "call_module" else None
        frozen = leaf is not None and all_frozen(leaf)
        settings, owned = ((), ()) if leaf is None else facts_of(self.modules, leaf)
        return Call(op, target, word, stem, path, kind, None, refs, args, kwargs, part.outputs, part.source,
                    part.grad_enabled, frozen, tuple(None for _ in part.outputs),
                    settings=settings, owned=owned)  # fmt: skip

    def _name(self, word: str) -> str:
        """An argument's name: dynamo knows only places where it wraps a module of torch's own."""
        found = _TOP.fullmatch(word)
        if found is None:
            return word
        if found["name"]:
            return found["name"]
        index = int(found["index"])
        return self.names[index] if index < len(self.names) else f"args[{index - len(self.names)}]"

    def finish(self) -> None:
        """The output: what the last graph returned."""
        returned: Any = self._returned[-1]
        if len(returned) == 1:  # dynamo keeps no containers
            returned = returned[0]
        self.calls.append(Call("output", "output", "output", "output", "", self.root.type, None, (), (returned,), {},
                               (), None))  # fmt: skip


def _placed(value: Any, place: Mapping[Any, Any]) -> Any:  # noqa: PLR0911  # one return a type
    if isinstance(value, (Ref, Input)):
        return place.get(value, constant(None))
    if isinstance(value, ParameterRef):
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_placed(item, place) for item in value)
    if isinstance(value, list):
        return [_placed(item, place) for item in value]
    if isinstance(value, dict):
        return {key: _placed(item, place) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_placed(part, place) for part in (value.start, value.stop, value.step)))
    return value
