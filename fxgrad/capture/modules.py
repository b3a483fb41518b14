"""Which module is where: paths of modules and names of parameters, kept current at little cost."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import is_
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import stateless

from fxgrad.capture.names import is_leaf, is_opaque
from fxgrad.capture.unregistered import unregistered
from fxgrad.torch_support.private import registries_of
from fxgrad.torch_support.shards import is_fsdp, is_sharded


@dataclass(slots=True, eq=False)
class Place:
    """A module in the tree; ``registered``: found by ``modules()``, and not in a plain list or dict."""

    module: nn.Module
    path: str
    leaf: bool
    opaque: bool
    type: str
    registered: bool = True


class ModuleMap:
    """Paths of all modules and names of all parameters and buffers of a model.

    A module or parameter that is registered twice keeps its first name, as in ``named_modules``.  A tensor that stands
    in for a parameter during a call, as ``torch.func.functional_call`` puts it there, is another value: the parameter
    is the one that was registered.

    Attributes:
        places: by id of a module; ``at``: by path.
        parameters: with all names of each; the unregistered ones come last.
        outside: names of parameters that are in plain lists and dicts.
        reduced: names of those whose gradients ``fully_shard`` adds up over the ranks.
        rebuilt: how often a module came, went, was swapped or got another class, or a parameter or buffer came or went.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.places: dict[int, Place] = {}
        self.at: dict[str, Place] = {}
        self.tensors: dict[int, str] = {}
        self.parameters: list[tuple[tuple[str, ...], Tensor]] = []
        self.buffers: list[tuple[str, Tensor]] = []
        self.outside: frozenset[str] = frozenset()
        self.reduced: frozenset[str] = frozenset()
        self._holders: list[tuple[Any, list[Any]]] = []
        self.structure: Any = None  # paths, types and names; another object where they have changed
        self._structure: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self.rebuilt = 0
        self._modules: list[nn.Module] = []
        self._classes: list[type[nn.Module]] = []  # as they were when all of this was built
        self._registered: dict[str, Tensor] = {}  # parameters, by name
        self._library: Any = None
        self._quick: Any = None  # answers in C++ whether all is as it was
        self._build()

    def use(self, library: Any) -> None:
        """Look at the registries in C++ from here on."""
        self._library = library
        self._hasten()

    def _hasten(self) -> None:
        plain = all(isinstance(registry, dict) for registry, _ in self._structure)  # a scripted module's are not
        self._quick = self._library.Registries(self._structure) if plain else None

    def _build(self) -> None:
        self.places = {}
        names: dict[int, list[str]] = {}
        values: dict[int, Tensor] = {}
        self._structure = []
        self.tensors = {}
        for path, module in self.root.named_modules():
            self.places[id(module)] = Place(module, path, is_leaf(module), is_opaque(module), type(module).__name__)
            self._structure += [(registry, tuple(registry.values())) for registry in registries_of(module)]
        for name, parameter in self._registered_parameters():
            names.setdefault(id(parameter), []).append(name)
            values[id(parameter)] = parameter
            self.tensors.setdefault(id(parameter), name)
        self.buffers = list(self.root.named_buffers())
        for name, buffer in self.buffers:
            self.tensors.setdefault(id(buffer), name)
            values[id(buffer)] = buffer
        self._add_unregistered(names, values)
        self._alive = values  # ids stay theirs as long as the tensors live
        self.parameters = [(tuple(found), values[key]) for key, found in names.items()]
        by_fsdp = tuple(f"{path}." if path else "" for path, module in self.root.named_modules() if is_fsdp(module))
        self.reduced = frozenset(
            found[0] for key, found in names.items() if is_sharded(values[key]) and found[0].startswith(by_fsdp)
        )
        self.at = {place.path: place for place in self.places.values()}
        self._modules = [place.module for place in self.places.values()]
        self._classes = list(map(type, self._modules))
        paths = tuple(zip((place.path for place in self.places.values()), self._classes, strict=True))
        structure = paths, tuple(found for found, _ in self.parameters)
        if structure != self.structure:
            self.structure = structure
        if self._library is not None:
            self._hasten()

    def _registered_parameters(self) -> list[tuple[str, Tensor]]:
        before, substituted = self._registered, bool(self._registered) and _in_functional_call()
        self._registered = {}
        for name, found in self.root.named_parameters(remove_duplicate=False):
            known = before.get(name, found)
            gathered = is_sharded(known) and not is_sharded(found)  # whole for the time of a call
            stands_in = substituted or gathered or not isinstance(found, nn.Parameter)
            self._registered[name] = known if stands_in else found
        return list(self._registered.items())

    def _add_unregistered(self, names: dict[int, list[str]], values: dict[int, Tensor]) -> None:
        """What is kept in plain lists and dicts gets gradients like any other, and is named like it is written."""
        known = {*self.places, *values}
        self._holders, outside = [], []
        for path, item, holder in unregistered(self.root, known):
            if all(holder is not other for other, _ in self._holders):
                self._holders.append((holder, _items(holder)))
            found = [(path, item)] if isinstance(item, nn.Parameter) else list(item.named_parameters(path))
            for name, parameter in found:
                names.setdefault(id(parameter), []).append(name)
                values[id(parameter)] = parameter
                self.tensors.setdefault(id(parameter), name)
                outside.append(name)
            for name, module in item.named_modules(prefix=path) if isinstance(item, nn.Module) else ():
                kind = type(module).__name__
                self.places[id(module)] = Place(
                    module, name, is_leaf(module), is_opaque(module), kind, registered=False
                )
                self._structure += [(registry, tuple(registry.values())) for registry in registries_of(module)]
        self.outside = frozenset(outside)

    def _holders_changed(self) -> bool:
        return any(
            len(items) != len(now := _items(holder)) or not all(map(is_, now, items)) for holder, items in self._holders
        )

    def refresh(self) -> bool:
        """Rebuild if a module, parameter or buffer was added, removed or swapped or is of another class; whether so."""
        if list(map(type, self._modules)) != self._classes or (self._holders and self._holders_changed()):
            self._build()
            self.rebuilt += 1
            return True
        if self._quick is not None and self._quick.unchanged():
            return False
        for registry, values in self._structure:
            if len(registry) != len(values) or not all(map(is_, registry.values(), values)):
                before = self._skeleton()
                self._build()
                after = self._skeleton()
                self.rebuilt += len(before) != len(after) or not all(map(_same_bone, before, after))
                return True
        return False

    def _skeleton(self) -> list[Any]:
        """The modules, and of each parameter and buffer whether it is there."""
        bones: list[Any] = [place.module for place in self.places.values()]
        for registry, values in self._structure:
            bones += [value if isinstance(value, nn.Module) else value is None for value in values]
            bones.append(len(registry))
        return bones


def _in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` is at work: its substitutes may be parameters themselves."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files
    while frame is not None and frame.f_code.co_filename != stateless.__file__:
        frame = frame.f_back
    return frame is not None


def _items(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else list(holder)


def _same_bone(one: Any, two: Any) -> bool:
    return one is two or (isinstance(one, int) and one == two)
