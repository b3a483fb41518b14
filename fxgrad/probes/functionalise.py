"""Which in-place changes of a graph can be made on a copy, and which values can bear an ``autograd.Function``.

The output of an ``autograd.Function`` must not be changed in place.  So a change of a probed value is made on a copy of
it, wherever nobody can tell: no other name of the same memory (a view, the base, an argument, a buffer) is read later.
Everywhere else the change stays and no value of that memory gets a probe.

The facts come from a run of the graph on tensors without data, whose storages and version counters are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.torch_support.private import base_of, version_of
from fxgrad.torch_support.structure import tensors_in

# Whether these return a view or a copy depends on strides, which another call may have otherwise.
_MAY_BE_VIEWS = frozenset({
    "reshape", "reshape_as", "flatten", "contiguous", "to", "ravel", "unflatten", "float", "double", "half", "type_as",
    "type", "bfloat16", "cpu", "cuda", "expand", "Flatten", "Unflatten",
})  # fmt: skip
SHARED = "it is changed in place, and other names of its memory are read later"


@dataclass(slots=True)
class Fact:
    """What a node did in the run.

    Attributes:
        objects: ``id`` of each tensor that it returned.
        memory: the memory of each, as a number.
        changed: nodes among its arguments whose tensors it changed in place.
        silent: whether it did so out of autograd's sight.
        tensor: whether it returned a tensor, and nothing else.
        several: whether it returned a plain tuple or list that holds tensors, nested too.
        layout: shape, strides and dtype of each tensor.
        outputs: position in the result, ``requires_grad`` and device of each tensor.
        grad_enabled: whether gradients were switched on.
    """

    objects: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    changed: tuple[fx.Node, ...] = ()
    silent: bool = False
    tensor: bool = False
    several: bool = False
    layout: tuple[Any, ...] = ()
    outputs: tuple[tuple[str, bool, torch.device], ...] = ()
    grad_enabled: bool = True


@dataclass(slots=True)
class Facts:
    """All facts of a run; ``alive`` keeps the tensors, so that an ``id`` stays theirs."""

    of: dict[fx.Node, Fact] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the pass may do.

    Attributes:
        on_copy: in-place nodes, with the argument that is copied first.
        unprobed: nodes that get no probe, with the reason.
        same: nodes that return the very tensor of an earlier node, with that node.
    """

    on_copy: Mapping[fx.Node, fx.Node]
    unprobed: Mapping[fx.Node, str]
    same: Mapping[fx.Node, fx.Node]


class _Memory:
    """Storages by number."""

    def __init__(self, alive: list[Any]) -> None:
        self._alive = alive
        self._number: dict[int, int] = {}

    def of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append((tensor, storage))
        return self._number.setdefault(id(storage), len(self._number))


def watch_run(graph: fx.Graph, root: nn.Module, values: Sequence[Any]) -> Facts:
    """Run ``graph`` on ``values`` (one per placeholder) and note what each node did."""
    facts = Facts()
    memory = _Memory(facts.alive)
    facts.outside = {memory.of(t) for t in (*root.parameters(), *root.buffers())}
    env: dict[fx.Node, Any] = {}
    given = iter(values)
    for node in graph.nodes:
        if node.op == "output":
            break
        used = [(source, t, version_of(t)) for source in node.all_input_nodes for _, t in tensors_in(env[source])]
        result = env[node] = next(given) if node.op == "placeholder" else _run(node, root, env)
        fact = facts.of[node] = _fact(result, memory)
        changed = {source: t for source, t, version in used if version_of(t) != version}
        fact.changed = tuple(source for source in changed if _is_target(node, source, env))
        fact.silent = bool(changed) and (not fact.changed or _out_of_sight(changed))
        if fact.silent:
            fact.changed = tuple(changed)
        if node.op in ("placeholder", "get_attr"):
            facts.outside.update(fact.memory)
        if fact.tensor and base_of(result) is not None:
            facts.views.add(node)
    return facts


def _is_target(node: fx.Node, source: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
    """Whether ``source`` is what an in-place node changes: its first argument, a tensor."""
    return bool(node.args) and node.args[0] is source and isinstance(env[source], Tensor)


def _out_of_sight(changed: Mapping[fx.Node, Tensor]) -> bool:
    return not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in changed.values())


def _fact(result: Any, memory: _Memory) -> Fact:
    placed = [(position, t) for position, t in tensors_in(result) if t.layout is torch.strided and not t.is_nested]
    if not placed:
        return Fact(grad_enabled=torch.is_grad_enabled())
    found = [t for _, t in placed]
    return Fact(
        tuple(map(id, found)), tuple(map(memory.of, found)), tensor=isinstance(result, Tensor), several=_plain(result),
        layout=tuple((tuple(t.shape), t.stride(), t.dtype) for t in found),
        outputs=tuple((position, t.requires_grad, t.device) for position, t in placed),
        grad_enabled=torch.is_grad_enabled(),
    )  # fmt: skip


def _plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(isinstance(item, Tensor) or item is None or _plain(item) for item in value)
    return False


def _run(node: fx.Node, root: nn.Module, env: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
    if node.op == "get_attr":
        value: Any = root
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*args, **kwargs)


# ---- the decision ----------------------------------------------------------------------------------------------


def decide(graph: fx.Graph, facts: Facts, word: Callable[[fx.Node], str]) -> Decisions:
    """Which in-place nodes may work on a copy, and which nodes must not be probed.

    Args:
        graph: the graph that was run.
        facts: of its run.
        word: the op word or module type of a node, for the ops that may or may not return a view.
    """
    groups = _groups(graph, facts, word)
    order = {node: number for number, node in enumerate(graph.nodes)}
    same = _same(graph, facts)
    on_copy: dict[fx.Node, fx.Node] = {}
    unprobed: dict[fx.Node, str] = {}
    for members in groups:
        changes = [(node, target) for node in graph.nodes for target in facts.of.get(node, Fact()).changed
                   if target in members]  # fmt: skip
        if not changes:
            continue
        outside = any(m in facts.outside for node in members for m in facts.of[node].memory)
        if outside or not all(_alone(change, members, order, facts) for change in changes):
            unprobed.update(dict.fromkeys(members, SHARED))
        else:
            on_copy.update(changes)
    return Decisions(on_copy, unprobed, {n: first for n, first in same.items() if n not in unprobed})


def _same(graph: fx.Graph, facts: Facts) -> dict[fx.Node, fx.Node]:
    """Nodes that return the very tensor of an earlier node; an in-place change makes a new value of it."""
    first: dict[int, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        fact = facts.of.get(node, Fact())
        for target in fact.changed:
            for identity in facts.of[target].objects:
                first.pop(identity, None)
        if fact.tensor:
            if fact.objects[0] in first:
                same[node] = first[fact.objects[0]]
            else:
                first[fact.objects[0]] = node
    return same


def _alone(change: tuple[fx.Node, fx.Node], members: set[fx.Node], order: Mapping[fx.Node, int], facts: Facts) -> bool:
    """Whether a change may be made on a copy: nothing but the changed tensor itself is read behind it."""
    node, target = change
    fact = facts.of[node]
    if fact.silent or len(fact.changed) != 1 or target in facts.views or len(facts.of[target].objects) != 1:
        return False
    if not _dense(facts.of[target].layout[0]):
        return False  # a copy would have other strides
    own = facts.of[target].objects[0]
    others = [
        m for m in members if order[m] < order[node] and not (facts.of[m].tensor and facts.of[m].objects[0] == own)
    ]
    return not any(order[user] > order[node] for other in others for user in other.users)


def _dense(layout: Any) -> bool:
    """Whether the entries of a tensor of this layout fill its memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(layout[0], layout[1], strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _groups(graph: fx.Graph, facts: Facts, word: Callable[[fx.Node], str]) -> list[set[fx.Node]]:
    """Nodes whose tensors share memory, or may."""
    group: dict[int, set[fx.Node]] = {}
    for node in graph.nodes:
        keys = list(facts.of.get(node, Fact()).memory)
        if not keys:
            continue
        if word(node) in _MAY_BE_VIEWS:
            keys += [m for source in node.all_input_nodes for m in facts.of[source].memory]
        _join(group, node, keys)
    return list({id(members): members for members in group.values()}.values())


def _join(group: dict[int, set[fx.Node]], node: fx.Node, keys: Iterable[int]) -> None:
    members = {node}
    for key in keys:
        members |= group.get(key, set())
    for key in [*keys, *(k for k, old in group.items() if old & members)]:
        group[key] = members
