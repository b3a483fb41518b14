"""Where a rule acts in the graph: selections of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fxgrad.errors import OptionError
from fxgrad.rewriting.patterns import Kind, Pattern, check_kinds, check_pattern, fits, is_of, kind_word, pattern_words
from fxgrad.schema import Edge, Node, Site
from fxgrad.schema.lines import in_a_line


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a site is looked up in.

    Attributes:
        model: for the classes of its modules.
        returned: by path of a module, the ids of the sites that its calls returned.
    """

    model: nn.Module
    returned: Mapping[str, frozenset[str]] = field(default_factory=dict)


@in_a_line("path", "op", "target", "module_type", "dtype", "call_index", "predicate")
@dataclass(frozen=True, slots=True)
class Nodes:
    """A selection of node sites; all that is given has to fit.  Made by ``nodes``."""

    path: Pattern | None = None
    op: tuple[str, ...] = ()
    target: str | None = None
    module_type: tuple[Kind, ...] = ()
    dtype: str | None = None
    call_index: int | None = None
    predicate: Callable[[Site], bool] | None = None
    optional: bool = False

    @property
    def words(self) -> str:
        """The selection as it was written, as far as that can be told."""
        parts = [] if self.path is None else [pattern_words(self.path)]
        if self.op:
            parts.append(f"op={'|'.join(self.op)!r}")
        parts += [f"{name}={getattr(self, name)!r}" for name in ("target", "dtype", "call_index")
                  if getattr(self, name) is not None]  # fmt: skip
        if self.module_type:
            parts.append(f"module_type={'|'.join(kind_word(kind) for kind in self.module_type)}")
        if self.predicate is not None:
            parts.append("predicate=...")
        return f"nodes({', '.join(parts)})"

    def matches(self, site: Site, around: Surroundings) -> bool:
        """Whether the site is selected."""
        node = site.node
        named = self.path is None or any(fits(self.path, n) for n in (site.id, node.key, node.module_path))
        if not named or (self.dtype is not None and site.dtype != self.dtype):
            return False
        if self.op and not any(fnmatchcase(word, wanted) for wanted in self.op for word in (op_word(site), node.op)):
            return False
        if self.target is not None and not fnmatchcase(node.target, self.target):
            return False
        if self.call_index is not None and node.call_index != self.call_index:
            return False
        if self.module_type and not is_of(around.model, node.module_path, node.module_type, self.module_type):
            return False
        return self.predicate is None or bool(self.predicate(site))


def nodes(  # noqa: PLR0913  # each is another way to name a node
    path: Pattern | None = None,
    *,
    op: str | Iterable[str] = (),
    target: str | Callable[..., Any] | None = None,
    module_type: Kind | tuple[Kind, ...] = (),
    dtype: torch.dtype | str | None = None,
    call_index: int | None = None,
    predicate: Callable[[Site], bool] | None = None,
    optional: bool = False,
) -> Nodes:
    """Node sites: the total gradient of each value.  What is given has to fit altogether; nothing given means all.

    Args:
        path: a site id (``"lstm[0]"``), node key (``"layer1.0/relu#1"``) or module path (``"layer1.0"``: the calls that
            this very module makes); ``*`` and ``?`` stand for anything, also across dots.  Or a compiled regular
            expression that matches one of these from end to end.
        op: op word as in keys (``"relu"``, ``"add_"``) or torch.fx opcode (``"call_module"``), with ``*``; or several.
        target: torch.fx target as text, with ``*``; or a function, which stands for its name as op word.
        module_type: class (with its subclasses) or class name of the module: of the leaf module itself, or of the
            module whose forward makes the call; or several.
        dtype: of the value.
        call_index: which call, from 0.
        predicate: takes a ``Site`` without statistics.
        optional: whether it is fine when nothing is found, as in a model that takes different paths.

    Raises:
        OptionError: an argument is of another type.
    """
    check_pattern(path)
    ops = (op,) if isinstance(op, str) else tuple(op)
    if callable(target):
        ops, target = (*ops, str(getattr(target, "__name__", target))), None
    kinds = module_type if isinstance(module_type, tuple) else (module_type,)
    check_kinds(kinds)
    word = str(dtype).removeprefix("torch.") if dtype is not None else None
    return Nodes(path, ops, target, kinds, word, call_index, predicate, optional)


@in_a_line("path")
@dataclass(frozen=True, slots=True)
class Outputs:
    """What the calls of some modules return.  Made by ``outputs``."""

    path: Pattern
    optional: bool = False

    @property
    def words(self) -> str:
        """The selection as it was written."""
        return f"outputs({pattern_words(self.path)})"

    def matches(self, site: Site, around: Surroundings) -> bool:
        """Whether the site is selected."""
        return any(site.id in ids for path, ids in around.returned.items() if fits(self.path, path))


def outputs(path: Pattern, *, optional: bool = False) -> Outputs:
    """The sites that the calls of the modules at ``path`` return: where the gradient enters these modules.

    Args:
        path: module path (``""`` is the model), with ``*``, or a compiled regular expression.
        optional: whether it is fine when nothing is found.

    Raises:
        OptionError: ``path`` is of another type.
    """
    check_pattern(path)
    return Outputs(path, optional)


End = Pattern | Nodes | Outputs


@in_a_line("producer", "consumer", "argument", "predicate")
@dataclass(frozen=True, slots=True)
class Edges:
    """Edge sites: the part of a gradient that one consumer sends back.  Made by ``edges``."""

    producer: End | None = None
    consumer: End | None = None
    argument: Pattern | None = None
    predicate: Callable[[Edge], bool] | None = None
    optional: bool = False

    @property
    def words(self) -> str:
        """The selection as it was written, as far as that can be told."""
        parts = [] if self.producer is None else [_end_words(self.producer)]
        if self.consumer is not None:
            parts.append(("" if parts else "consumer=") + _end_words(self.consumer))
        if self.argument is not None:
            parts.append(f"argument={pattern_words(self.argument)}")
        if self.predicate is not None:
            parts.append("predicate=...")
        return f"edges({', '.join(parts)})"

    def takes_producer(self, site: Site, around: Surroundings) -> bool:
        """Whether the value at a site may be the one of a selected edge."""
        end = self.producer
        if end is None or isinstance(end, (Nodes, Outputs)):
            return end is None or end.matches(site, around)
        return any(fits(end, name) for name in (site.id, site.key, site.module_path))

    def takes_use(self, edge: Edge, consumer: Node, returned: Iterable[Site], around: Surroundings) -> bool:
        """Whether a use of such a value is selected; ``returned``: the sites that its consumer returned."""
        if not _is_end(self.consumer, consumer, returned, around):
            return False
        if self.argument is not None and not fits(self.argument, edge.consumer.argument):
            return False
        return self.predicate is None or bool(self.predicate(edge))


def edges(
    producer: End | None = None,
    consumer: End | None = None,
    argument: Pattern | None = None,
    *,
    predicate: Callable[[Edge], bool] | None = None,
    optional: bool = False,
) -> Edges:
    """Edge sites: the part of the gradient of ``producer`` that ``consumer`` sends back.

    What is given has to fit altogether; nothing given means every edge.

    Args:
        producer: as ``path`` of ``nodes``; or ``nodes(...)`` or ``outputs(...)``, to choose by op, target, module type,
            dtype or a predicate.
        consumer: node key or module path, with ``*``, or a compiled regular expression; or ``nodes(...)`` or
            ``outputs(...)``, one of whose sites the consumer has to return.  The graph's output returns none, so only a
            path, op, target or module type finds it.
        argument: as which argument, as in ``Consumer.argument``: ``"args[0]"``, ``"kwargs['mask']"``; with ``*``, or a
            compiled regular expression.
        predicate: takes an ``Edge`` without statistics.
        optional: whether it is fine when nothing is found.

    Raises:
        OptionError: an argument is of another type, or ``optional=True`` stands inside of an end.
    """
    for end in (producer, consumer):
        if not isinstance(end, (Nodes, Outputs)):
            check_pattern(end)
        elif end.optional:
            message = f"optional=True belongs to edges(..., optional=True), not to {end.words} inside of it"
            raise OptionError(message)
    check_pattern(argument)
    return Edges(producer, consumer, argument, predicate, optional)


def _is_end(end: End | None, node: Node, sites: Iterable[Site], around: Surroundings) -> bool:
    """Whether a node is the consumer that a selection asks for."""
    if end is None:
        return True
    if not isinstance(end, (Nodes, Outputs)):
        return any(fits(end, name) for name in (node.key, node.module_path))
    listed = list(sites)
    if not listed and isinstance(end, Nodes) and end.dtype is None and end.predicate is None:
        listed = [Site(node, "", (), "", "", None)]
    return any(end.matches(site, around) for site in listed)


def asks_python(where: Any) -> bool:
    """Whether a selection has a predicate of the user's, which may look at anything."""
    if getattr(where, "predicate", None) not in (None, is_relu):  # ours looks at the node and its module's class only
        return True
    return isinstance(where, Edges) and any(asks_python(end) for end in (where.producer, where.consumer))


def _end_words(end: End) -> str:
    return end.words if isinstance(end, (Nodes, Outputs)) else pattern_words(end)


def is_relu(site: Site) -> bool:
    """Whether a site is what a ReLU returns, as a module, function or method, in place or not."""
    if site.node.op == "call_module":
        return site.node.module_type == "ReLU"
    return op_word(site) in ("relu", "relu_")


def op_word(site: Site) -> str:
    """The op word in a node's key; empty for module calls, inputs and the output."""
    if site.node.op not in ("call_function", "call_method", "external"):
        return ""
    return site.node.key.rpartition("/")[2].partition("#")[0]
