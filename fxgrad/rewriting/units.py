"""Where a rule acts at parameters: each alone, by layer, or by group of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fxgrad.errors import OptionError
from fxgrad.rewriting.patterns import Kind, Pattern, check_kinds, check_pattern, fits, is_of, kind_word, pattern_words
from fxgrad.schema.lines import in_a_line

Per = Literal["step", "backward", "arrival"]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that a rule sees together: one parameter, one layer, or one group.

    Attributes:
        name: of the parameter, or path of the module.
        members: by the name inside of the unit; of a single parameter ``""``.
    """

    name: str
    members: tuple[tuple[str, Tensor], ...]


@in_a_line("path", "module_type", "dtype", "predicate", "per")
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
        return f"parameters({'' if self.path is None else pattern_words(self.path)})"

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
        if self.path is not None and not fits(self.path, name):
            return False
        if self.dtype is not None and parameter.dtype != self.dtype:
            return False
        path = name.rpartition(".")[0]
        if self.module_type and not is_of(model, path, "", self.module_type):
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
    check_pattern(path)
    _check_per(per, ("step", "backward", "arrival"))
    kinds = module_type if isinstance(module_type, tuple) else (module_type,)
    check_kinds(kinds)
    return Parameters(path, kinds, dtype, predicate, per)


@in_a_line("kinds", "path", "predicate", "per")
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
        path = "" if self.path is None else f", {pattern_words(self.path)}"
        return f"layers({'|'.join(map(kind_word, self.kinds))}{path})"

    def units(self, model: nn.Module) -> list[Unit]:
        """One unit per module, in the order of ``named_modules``."""
        found = []
        for path, module in model.named_modules():
            if not is_of(model, path, type(module).__name__, self.kinds):
                continue
            if self.path is not None and not fits(self.path, path):
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
    check_pattern(path)
    _check_per(per, ("step", "backward"))
    chosen = kinds if isinstance(kinds, tuple) else (kinds,)
    check_kinds(chosen)
    return Layers(chosen, path, predicate, per)


@in_a_line("path", "per")
@dataclass(frozen=True, slots=True)
class Groups:
    """A selection of modules, each seen with all the parameters below it.  Made by ``groups``."""

    path: Pattern
    per: Per

    @property
    def words(self) -> str:
        """The selection as it was written."""
        return f"groups({pattern_words(self.path)})"

    def units(self, model: nn.Module) -> list[Unit]:
        """One unit per module."""
        found = []
        for path, module in model.named_modules():
            members = tuple(module.named_parameters()) if fits(self.path, path) else ()
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
    check_pattern(path)
    _check_per(per, ("step", "backward"))
    return Groups(path, per)


def _own_parameters(module: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    """The parameters of a module itself, those behind its parametrizations included."""
    own = list(module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += module.parametrizations.named_parameters(prefix="parametrizations")  # type: ignore[union-attr]
    return tuple(own)


def _check_per(per: str, allowed: tuple[str, ...]) -> None:
    if per not in allowed:
        more = ": a layer's gradients do not arrive together" if per == "arrival" else ""
        message = f"per={per!r} is not possible here{more}; it is one of {', '.join(map(repr, allowed))}"
        raise OptionError(message)
