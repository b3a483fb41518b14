"""What a front end writes down, and how nodes, sites and edges are made of it.

A front end appends one ``Call`` per node in the order of execution.  A value is a ``Ref``: the number of the call that
returned it and its position in the output.  ``CallGraph`` turns the calls into the schema's nodes and sites, lazily,
because a training step needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxgrad.capture.names import Keys, qualified
from fxgrad.schema import Constant, Consumer, Edge, LossOp, ModuleCall, Node

_LARGEST = sys.float_info.max  # an int may be larger


class Ref(NamedTuple):
    """A value: ``position`` in the output of call number ``call``."""

    call: int
    position: str


class ParameterRef(NamedTuple):
    """A parameter or buffer used directly, by its full name."""

    name: str


class Opaque(NamedTuple):
    """A constant of a type that no graph can hold, or a tensor that came from outside, as text.

    ``stray``: where a parameter is held that gets a gradient and belongs to no registered module; empty for others.
    """

    text: str
    stray: str = ""


@dataclass(slots=True, frozen=True)
class Output:
    """One tensor that a call returned, as it was when the call was first written down."""

    position: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool
    requires_grad: bool
    strided: bool = True


@dataclass(slots=True, eq=False)
class Call:
    """One node, as a front end saw it run.

    ``args`` and ``kwargs`` hold ``Ref``, ``ParameterRef``, ``Opaque`` and constants.  ``key_stem`` is the node key
    without its call index.  ``frozen``: all parameters that the call uses of its own are frozen.  ``same_object``: for
    each output, the value whose very tensor object was returned again (in-place ops, identities).  ``bases``: for each
    output that is a view, the value that it is a view of.  ``changed``: values that the call changed in place.
    ``hooked``: a leaf module with hooks of its own.  ``settings`` and ``owned``: the settings of a leaf module, and the
    names of its parameters and buffers.  ``gate``: what kind of activation it is, False: not asked yet.
    ``checkpointed``: in a reentrant checkpoint.
    """

    op: str
    target: Any
    word: str
    key_stem: str
    path: str
    module_type: str
    function: Callable[..., Any] | None
    refs: tuple[Ref | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Output, ...]
    source: str | None
    grad_enabled: bool = True
    frozen: bool = False
    same_object: tuple[Ref | None, ...] = ()
    bases: tuple[Ref | None, ...] = ()
    changed: tuple[Ref, ...] = ()
    hooked: bool = False
    settings: tuple[Constant, ...] = ()
    owned: tuple[str, ...] = ()
    gate: Any = False
    checkpointed: bool = False

    def uses(self) -> Iterator[tuple[str, Ref]]:
        """Every value that the call takes, with its argument path."""
        yield from _uses("args", self.args)
        yield from _uses("kwargs", self.kwargs)


def _uses(path: str, value: Any) -> Iterator[tuple[str, Ref]]:
    if isinstance(value, Ref):
        yield path, value
    elif isinstance(value, (ParameterRef, Opaque)):
        return
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _uses(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _uses(f"{path}[{key!r}]", item)
    elif isinstance(value, slice):
        for name in ("start", "stop", "step"):
            yield from _uses(f"{path}.{name}", getattr(value, name))


@dataclass(slots=True)
class ModuleSpan:
    """One module call: what it took in and returned."""

    path: str
    type: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


@dataclass(slots=True)
class SiteSpec:
    """A site: which call, which of its outputs."""

    call: int
    output: Output


@dataclass
class CallGraph:
    """The graph of one forward call, shared by all forward calls that ran the same way.

    Attributes:
        calls: in execution order; the last one is the ``output``.
        spans: the module calls, in the order in which they returned.
        escalated: sites to be measured at ``full`` next time, since ``norm`` could not tell their norm.
        lost: values whose hook cannot tell their gradient: views of memory that was changed in place.
        hidden: whether differentiable code ran that no front end could see.
        asked: whether the forward asked for the value of a tensor (``if``, ``.item()``), so that it may go another way.
        loss: what the loss did with the outputs in the first backward pass; None before it.
    """

    calls: list[Call]
    spans: list[ModuleSpan]
    lost: set[Ref] = field(default_factory=set)
    escalated: set[int] = field(default_factory=set)
    hidden: bool = False
    asked: bool = False
    loss: tuple[LossOp, ...] | None = None

    @cached_property
    def sites(self) -> list[SiteSpec]:
        """One per differentiable tensor, in the order in which probes number them."""
        return [SiteSpec(n, out) for n, call in enumerate(self.calls) for out in call.outputs if out.differentiable]

    @cached_property
    def site_numbers(self) -> dict[Ref, int]:
        """The site number of each value that has one."""
        return {Ref(spec.call, spec.output.position): n for n, spec in enumerate(self.sites)}

    @cached_property
    def uses(self) -> list[tuple[Ref, int, str]]:
        """Every use of a value: the value, the number of the call that takes it, and as which argument."""
        return [(ref, number, argument) for number, call in enumerate(self.calls) for argument, ref in call.uses()]

    @cached_property
    def uses_of(self) -> dict[Ref, list[tuple[int, str]]]:
        """The uses by value."""
        found: dict[Ref, list[tuple[int, str]]] = {}
        for ref, number, argument in self.uses:
            found.setdefault(ref, []).append((number, argument))
        return found

    @cached_property
    def fan_out(self) -> list[tuple[Ref, int, str]]:
        """The uses that are measured by themselves: the edge sites.

        Those of values that can carry a gradient and are used more than once, or whose very tensor has another name
        that may be used as well; and all of them where code ran that nobody sees.
        """
        named = self._with_several_names
        several = {ref for ref, uses in self.uses_of.items() if len(uses) > 1 or ref in named or self.hidden}
        return [use for use in self.uses if use[0] in self.site_numbers and use[0] in several]

    @cached_property
    def _with_several_names(self) -> set[Ref]:
        found: set[Ref] = set()
        for number, call in enumerate(self.calls):
            for output, same in zip(call.outputs, call.same_object, strict=False):
                if same is not None and same not in call.changed:
                    found |= {same, Ref(number, output.position)}
        return found

    @cached_property
    def fan_out_groups(self) -> list[tuple[Ref, int, list[int]]]:
        """``fan_out`` by value and call, as numbers."""
        groups: dict[tuple[Ref, int], list[int]] = {}
        for number, (ref, call, _) in enumerate(self.fan_out):
            groups.setdefault((ref, call), []).append(number)
        return [(ref, call, numbers) for (ref, call), numbers in groups.items()]

    @cached_property
    def beside_edges(self) -> frozenset[int]:
        """The sites that the search for the autograd nodes of edge sites looks at."""
        calls = {call for _, call, _ in self.fan_out}
        around = {ref for number in calls for _, ref in self.calls[number].uses()}
        around |= {Ref(number, output.position) for number in calls for output in self.calls[number].outputs}
        around |= {base for ref in tuple(around) if ref.call >= 0 for base in self.calls[ref.call].bases if base}
        return frozenset(number for ref, number in self.site_numbers.items() if ref in around)

    @cached_property
    def probe_table(self) -> list[tuple[int, ...]]:
        """By call: the site number of each tensor that it returns, -1 for one that is no site or cannot be told."""
        numbers = self.site_numbers
        return [
            tuple(-1 if (ref := Ref(n, out.position)) in self.lost else numbers.get(ref, -1) for out in call.outputs)
            for n, call in enumerate(self.calls)
        ]

    @cached_property
    def site_table(self) -> list[tuple[int, ...]]:
        """By call: the site number of each tensor that it returns, -1 for one that is no site."""
        numbers = self.site_numbers
        return [
            tuple(numbers.get(Ref(n, out.position), -1) for out in call.outputs) for n, call in enumerate(self.calls)
        ]

    @cached_property
    def graph(self) -> fx.Graph:
        """The calls as a torch.fx graph (for reading; constants that fx cannot hold are shown as text)."""
        return _fx_graph(self.calls)[0]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """One schema node per call."""
        keys = Keys()
        nodes = []
        for call, fx_node in zip(self.calls, _fx_graph(self.calls)[1], strict=True):
            key, index = keys.make(call.key_stem)
            constants, parameters = facts_of_arguments(call)
            strays = tuple(dict.fromkeys(_strays_in((call.args, call.kwargs))))
            nodes.append(Node(
                key, fx_node.name, call.op, _target_text(call.target), call.path, call.module_type, index, call.source,
                constants, parameters, strays,
            ))  # fmt: skip
        return tuple(nodes)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every use of a value by a later node."""
        nodes = self.nodes
        return tuple(
            Edge(nodes[ref.call].key, ref.position, Consumer(nodes[number].key, argument))
            for ref, number, argument in self.uses
        )

    @cached_property
    def module_calls(self) -> tuple[ModuleCall, ...]:
        """The module calls, with their values as site ids."""
        keys = Keys()
        return tuple(
            ModuleCall(span.path, span.type, keys.make(span.path)[1], self._ids(span.inputs), self._ids(span.outputs))
            for span in self.spans
        )

    def site_id(self, number: int) -> str:
        """``Site.id`` of site ``number``."""
        spec = self.sites[number]
        return self.nodes[spec.call].key + spec.output.position

    def _ids(self, refs: tuple[Ref, ...]) -> tuple[str, ...]:
        return tuple(self.nodes[ref.call].key + ref.position for ref in refs)


def facts_of_arguments(call: Call) -> tuple[tuple[Constant, ...], tuple[str, ...]]:
    """The constants that a call was given, and the names of the parameters and buffers that it takes.

    They are those of the first forward call that ran this way.
    """
    constants, names = list(call.settings), list(call.owned)
    if call.op not in ("placeholder", "output"):
        given = [
            *((f"args[{n}]", v) for n, v in enumerate(call.args)),
            *((f"kwargs[{k!r}]", v) for k, v in call.kwargs.items()),
        ]
        for argument, value in given:
            names += [ref.name for ref in _parameters_in(value)]
            if plain(value):
                constants.append(as_constant(argument, value))
    return tuple(constants), tuple(dict.fromkeys(names))


def _parameters_in(value: Any) -> Iterator[ParameterRef]:
    if isinstance(value, ParameterRef):
        yield value
    elif isinstance(value, (tuple, list)) and not isinstance(value, (Ref, Opaque)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))


def _strays_in(value: Any) -> Iterator[str]:
    if isinstance(value, Opaque):
        if value.stray:
            yield value.stray
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _strays_in(item)
    elif isinstance(value, dict):
        yield from _strays_in(list(value.values()))


def plain(value: Any) -> bool:
    """Whether a value is a number or a word, or a sequence of such; None says nothing."""
    if isinstance(value, (Ref, ParameterRef, Opaque)):
        return False
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(plain, value))
    return isinstance(value, (int, float, complex, str, torch.dtype))


def as_constant(argument: str, value: Any) -> Constant:
    """The schema's constant of a plain value."""
    number = float(value) if isinstance(value, (int, float)) and abs(value) <= _LARGEST else None
    if isinstance(value, float) and number is None:  # NaN and the infinities
        number = value
    return Constant(argument, repr(value)[:80], number)


def _target_text(target: Any) -> str:
    if isinstance(target, str):
        return target
    return qualified(target)


def describe_output(position: str, tensor: Tensor) -> Output:
    """The facts of one tensor.  To be called where torch functions are not intercepted."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    shape = tuple(tensor.shape) if not tensor.is_nested else ()
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return Output(position, shape, tensor.dtype, tensor.device, differentiable, tensor.requires_grad, strided)


def _fx_graph(calls: list[Call]) -> tuple[fx.Graph, list[fx.Node]]:
    """A torch.fx graph with one node per call; positions in an output are part of the argument's text only."""
    graph = fx.Graph()
    made: list[fx.Node] = []
    for call in calls:
        args = () if call.op == "placeholder" else tuple(_filled(item, made) for item in call.args)
        kwargs = {key: _filled(value, made) for key, value in call.kwargs.items()}
        op, target = call.op, call.target
        if op == "external" or (op == "call_function" and not callable(target)):
            op, target = "call_function", _external
        name = call.word if call.op == "placeholder" or target is _external else None
        made.append(graph.create_node(op, target, args, kwargs, name=name))
    return graph, made


def _filled(value: Any, made: list[fx.Node]) -> Any:  # noqa: PLR0911  # one return a type
    """An argument with fx nodes for the values in it."""
    if isinstance(value, Ref):
        return made[value.call]
    if isinstance(value, ParameterRef):
        return value.name
    if isinstance(value, Opaque):
        return value.text
    if isinstance(value, slice):
        return slice(*(_filled(part, made) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return tuple(_filled(item, made) for item in value)
    if isinstance(value, list):
        return [_filled(item, made) for item in value]
    if isinstance(value, dict):
        return {str(key): _filled(item, made) for key, item in value.items()}
    return value


def _external(*values: Any) -> None:
    """Stands in an fx graph for code that no front end can see; never run."""
    raise NotImplementedError(values)


def constant(value: Any) -> Any:
    """``value`` if a graph can hold it as it is, else its text."""
    simple = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    if isinstance(value, simple):
        return value
    return value if value is Ellipsis else Opaque(type(value).__name__)
