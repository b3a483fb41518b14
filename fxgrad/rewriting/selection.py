"""Where a rule acts: selections of sites, of parameters, and of layers and groups of parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fxgrad.errors import OptionError
from fxgrad.schema import Site

Pattern = str | re.Pattern[str]
Kind = type[nn.Module] | str
Per = Literal["step", "backward", "arrival"]


# ---- sites ---------------------------------------------------------------------------------------------------------


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
        parts = [] if self.path is None else [_pattern_words(self.path)]
        if self.op:
            parts.append(f"op={'|'.join(self.op)!r}")
        parts += [f"{name}={getattr(self, name)!r}" for name in ("target", "dtype", "call_index")
                  if getattr(self, name) is not None]  # fmt: skip
        if self.module_type:
            parts.append(f"module_type={'|'.join(_kind_word(kind) for kind in self.module_type)}")
        if self.predicate is not None:
            parts.append("predicate=...")
        return f"nodes({', '.join(parts)})"

    def matches(self, site: Site, around: Surroundings) -> bool:
        """Whether the site is selected."""
        node = site.node
        named = self.path is None or any(_fits(self.path, n) for n in (site.id, node.key, node.module_path))
        if not named or (self.dtype is not None and site.dtype != self.dtype):
            return False
        if self.op and not any(fnmatchcase(word, wanted) for wanted in self.op for word in (op_word(site), node.op)):
            return False
        if self.target is not None and not fnmatchcase(node.target, self.target):
            return False
        if self.call_index is not None and node.call_index != self.call_index:
            return False
        if self.module_type and not _is_of(around.model, node.module_path, node.module_type, self.module_type):
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
    _check_pattern(path)
    ops = (op,) if isinstance(op, str) else tuple(op)
    if callable(target):
        ops, target = (*ops, str(getattr(target, "__name__", target))), None
    kinds = module_type if isinstance(module_type, tuple) else (module_type,)
    _check_kinds(kinds)
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
        return f"outputs({_pattern_words(self.path)})"

    def matches(self, site: Site, around: Surroundings) -> bool:
        """Whether the site is selected."""
        return any(site.id in ids for path, ids in around.returned.items() if _fits(self.path, path))


def outputs(path: Pattern, *, optional: bool = False) -> Outputs:
    """The sites that the calls of the modules at ``path`` return: where the gradient enters these modules.

    Args:
        path: module path (``""`` is the model), with ``*``, or a compiled regular expression.
        optional: whether it is fine when nothing is found.

    Raises:
        OptionError: ``path`` is of another type.
    """
    _check_pattern(path)
    return Outputs(path, optional)


@dataclass(frozen=True, slots=True)
class Edges:
    """Edge sites: the part of a gradient that one consumer sends back.  Made by ``edges``."""

    producer: Pattern
    consumer: Pattern | None = None
    argument: str | None = None

    @property
    def words(self) -> str:
        """The selection as it was written."""
        consumer = "" if self.consumer is None else f", {_pattern_words(self.consumer)}"
        return f"edges({_pattern_words(self.producer)}{consumer})"


def edges(producer: Pattern, consumer: Pattern | None = None, argument: str | None = None) -> Edges:
    """Edge sites.  ``fxgrad.rewrite`` refuses them with a ``RuleError``: it can rewrite whole values only so far."""
    return Edges(producer, consumer, argument)


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


# ---- parameters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that a rule sees together: one parameter, one layer, or one group.

    Attributes:
        name: of the parameter, or path of the module.
        members: by the name inside of the unit; of a single parameter ``""``.
    """

    name: str
    members: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A selection of parameters, each seen alone.  Made by ``parameters``."""

    path: Pattern | None
    module_type: tuple[Kind, ...]
    dtype: torch.dtype | None
    predicate: Callable[[str, Tensor], bool] | None
    per: Per

    @property
    def words(self) -> str:
        """The selection, as far as it can be told."""
        return f"parameters({'' if self.path is None else _pattern_words(self.path)})"

    def units(self, model: nn.Module) -> list[Unit]:
        """One unit per parameter; a tied one has its first name, and each of its names can select it."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            tensors[id(parameter)] = parameter
        return [
            Unit(known[0], (("", tensors[key]),))
            for key, known in names.items()
            if any(self._matches(model, name, tensors[key]) for name in known)
        ]

    def _matches(self, model: nn.Module, name: str, parameter: Tensor) -> bool:
        if self.path is not None and not _fits(self.path, name):
            return False
        if self.dtype is not None and parameter.dtype != self.dtype:
            return False
        path = name.rpartition(".")[0]
        if self.module_type and not _is_of(model, path, "", self.module_type):
            return False
        return self.predicate is None or bool(self.predicate(name, parameter))


def parameters(
    path: Pattern | None = None, *, module_type: Kind | tuple[Kind, ...] = (), dtype: torch.dtype | None = None,
    predicate: Callable[[str, Tensor], bool] | None = None, per: Per = "step",
) -> Parameters:  # fmt: skip
    """Parameters, each by itself.  What is given has to fit altogether; nothing given means all.

    Args:
        path: full name (``"fc1.weight"``), with ``*``, or a compiled regular expression.
        module_type: class or class name of the module that holds it; or several.
        dtype: of the parameter.
        predicate: takes the full name and the parameter.
        per: ``"step"``: before each optimizer step, on ``.grad``; ``"backward"``: at the end of each backward pass, on
            what it contributed; ``"arrival"``: as the gradient arrives, before it is accumulated, and before
            DistributedDataParallel reduces it.

    Raises:
        OptionError: an argument is of another type.
    """
    _check_pattern(path)
    _check_per(per, ("step", "backward", "arrival"))
    kinds = module_type if isinstance(module_type, tuple) else (module_type,)
    _check_kinds(kinds)
    return Parameters(path, kinds, dtype, predicate, per)


@dataclass(frozen=True, slots=True)
class Layers:
    """A selection of modules by their class, each seen with all its parameters.  Made by ``layers``."""

    kinds: tuple[Kind, ...]
    path: Pattern | None
    predicate: Callable[[nn.Module], bool] | None
    per: Per

    @property
    def words(self) -> str:
        """The selection, as far as it can be told."""
        path = "" if self.path is None else f", {_pattern_words(self.path)}"
        return f"layers({'|'.join(map(_kind_word, self.kinds))}{path})"

    def units(self, model: nn.Module) -> list[Unit]:
        """One unit per module, in the order of ``named_modules``."""
        found = []
        for path, module in model.named_modules():
            if not _is_of(model, path, type(module).__name__, self.kinds):
                continue
            if self.path is not None and not _fits(self.path, path):
                continue
            if self.predicate is None or self.predicate(module):
                members = _own_parameters(module)
                if members:
                    found.append(Unit(path, members))
        return found


def layers(
    kinds: Kind | tuple[Kind, ...] = nn.Linear, path: Pattern | None = None, *,
    predicate: Callable[[nn.Module], bool] | None = None, per: Per = "step",
) -> Layers:  # fmt: skip
    """Layers: modules of some classes, each with all the parameters of its own, seen together.

    A parameter that is tied into two layers belongs to both; the layers come in the order of ``named_modules``, and the
    second one sees what the rule made of the parameter in the first.

    Args:
        kinds: class (with its subclasses) or class name; or several.
        path: module path, with ``*``, or a compiled regular expression.
        predicate: takes the module.
        per: ``"step"``: before each optimizer step; ``"backward"``: at the end of each backward pass, on what it
            contributed.

    Raises:
        OptionError: an argument is of another type, or ``per="arrival"``: then a layer's gradients aren't together yet.
    """
    _check_pattern(path)
    _check_per(per, ("step", "backward"))
    chosen = kinds if isinstance(kinds, tuple) else (kinds,)
    _check_kinds(chosen)
    return Layers(chosen, path, predicate, per)


@dataclass(frozen=True, slots=True)
class Groups:
    """A selection of modules, each seen with all the parameters below it.  Made by ``groups``."""

    path: Pattern
    per: Per

    @property
    def words(self) -> str:
        """The selection as it was written."""
        return f"groups({_pattern_words(self.path)})"

    def units(self, model: nn.Module) -> list[Unit]:
        """One unit per module."""
        found = []
        for path, module in model.named_modules():
            members = tuple(module.named_parameters()) if _fits(self.path, path) else ()
            if members:
                found.append(Unit(path, members))
        return found


def groups(path: Pattern, *, per: Per = "step") -> Groups:
    """Module groups: each module at ``path`` with all the parameters below it, seen together.

    Args:
        path: module path (``""`` is the whole model), with ``*``, or a compiled regular expression.
        per: as for ``layers``.

    Raises:
        OptionError: an argument is of another type.
    """
    _check_pattern(path)
    _check_per(per, ("step", "backward"))
    return Groups(path, per)


def _own_parameters(module: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    """The parameters of a module itself, those behind its parametrizations included."""
    own = list(module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += module.parametrizations.named_parameters(prefix="parametrizations")  # type: ignore[union-attr]
    return tuple(own)


# ---- patterns ------------------------------------------------------------------------------------------------------


def near(word: str, known: Iterable[str]) -> str:
    """``near names are 'a', 'b'``, or how many names there are."""
    names = list(dict.fromkeys(known))
    found = difflib.get_close_matches(word, names, n=5, cutoff=0.4)
    return f"near names are {', '.join(map(repr, found))}" if found else f"there are {len(names)} names"


def _fits(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return pattern == name or (("*" in pattern or "?" in pattern) and fnmatchcase(name, _glob(pattern)))
    return pattern.fullmatch(name) is not None


def _glob(pattern: str) -> str:
    """Brackets stand for themselves: ids such as ``lstm[1][0]`` have them."""
    return pattern.replace("[", "[[]")


def _pattern_words(pattern: Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"re.compile({pattern.pattern!r})"


def _kind_word(kind: Kind) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _is_of(model: nn.Module, path: str, name: str, kinds: tuple[Kind, ...]) -> bool:
    """Whether the module at ``path`` is of one of the classes; ``name`` is its class name where it is gone."""
    try:
        module: nn.Module | None = model.get_submodule(path)
    except AttributeError:
        module = None
    names = {name} if module is None else {kind.__name__ for kind in type(module).__mro__}
    return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in kinds)


def _check_pattern(path: object) -> None:
    if path is not None and not isinstance(path, (str, re.Pattern)):
        message = f"a path is text or a compiled regular expression, but is {type(path).__name__}"
        raise OptionError(message)


def _check_per(per: str, allowed: tuple[str, ...]) -> None:
    if per not in allowed:
        more = ": a layer's gradients do not arrive together" if per == "arrival" else ""
        message = f"per={per!r} is not possible here{more}; it is one of {', '.join(map(repr, allowed))}"
        raise OptionError(message)


def _check_kinds(kinds: tuple[Any, ...]) -> None:
    for kind in kinds:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            message = f"a module type is a class of modules or its name, but is {kind!r}"
            raise OptionError(message)
