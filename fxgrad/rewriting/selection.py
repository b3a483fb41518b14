"""Where a rule acts in the graph: selections of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fxgrad.rewriting.patterns import Kind, Pattern, check_kinds, check_pattern, fits, is_of, kind_word, pattern_words
from fxgrad.schema import Node, Site


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a site is looked up in.

    Attributes:
        model: for the classes of its modules.
        returned: by path of a module, the ids of the sites that its calls returned.
    """

    model: nn.Module
    returned: Mapping[str, frozenset[str]] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Edges:
    """Edge sites: the part of a gradient that one consumer sends back.  Made by ``edges``."""

    producer: Pattern
    consumer: Pattern | None = None
    argument: str | None = None
    optional: bool = False

    @property
    def words(self) -> str:
        """The selection as it was written."""
        consumer = "" if self.consumer is None else f", {pattern_words(self.consumer)}"
        return f"edges({pattern_words(self.producer)}{consumer})"

    def matches(self, site: Site, consumer: Node, argument: str) -> bool:
        """Whether the use of a site's value by a node as this argument is selected."""
        if not any(fits(self.producer, name) for name in (site.id, site.key, site.module_path)):
            return False
        if self.consumer is not None and not any(fits(self.consumer, n) for n in (consumer.key, consumer.module_path)):
            return False
        return self.argument is None or self.argument == argument


def edges(
    producer: Pattern, consumer: Pattern | None = None, argument: str | None = None, *, optional: bool = False
) -> Edges:
    """Edge sites: the part of the gradient of ``producer`` that ``consumer`` sends back.

    Args:
        producer: as ``path`` of ``nodes``.
        consumer: node key or module path, with ``*``, or a compiled regular expression; None: every one.
        argument: as which argument, as in ``Consumer.argument``: ``"args[0]"``, ``"kwargs['mask']"``.
        optional: whether it is fine when nothing is found.

    Raises:
        OptionError: a pattern is of another type.
    """
    check_pattern(producer)
    check_pattern(consumer)
    return Edges(producer, consumer, argument, optional)


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
