"""Give a model back as it was: what a one-shot look may change is noted before and restored after."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.torch_support.private import version_of
from fxgrad.torch_support.streams import random_streams

_CONTAINERS = (dict, list, set, deque)
_SIMPLE = (int, float, complex, str, bytes, bool, type(None))
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_ABSENT = object()


@contextmanager
def preserved(model: nn.Module, inputs: Iterable[Tensor], *, compiled: bool = False) -> Iterator[None]:
    """Restore, also after an error: ``.grad``, buffers, attributes of modules, hooks, flags and random streams.

    ``compiled``: see ``random_streams``.

    Parameters are not copied.  A forward that writes into a parameter is reported by a warning.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in _unique(model.buffers())]
    leaves = [t for t in _unique((*model.parameters(), *inputs)) if t.requires_grad and t.is_leaf]
    grads = [(leaf, leaf.grad) for leaf in leaves]
    versions = [(name, parameter, version_of(parameter)) for name, parameter in model.named_parameters()]
    for leaf in leaves:
        leaf.grad = None
    try:
        with modules_preserved(model), random_streams(compiled=compiled):
            yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # batch_norm writes without counting up the version
                    buffer.copy_(value)
        _warn_of_changed(versions)


@dataclass(frozen=True, slots=True)
class Written:
    """Something that was bound or put into a module; its text says what and where."""

    place: str
    value: Any

    def __str__(self) -> str:
        return self.place


@contextmanager
def modules_preserved(model: nn.Module) -> Iterator[Callable[[], list[Written]]]:
    """Restore the attributes of all modules: rebound ones, and the entries of lists, dicts and sets among them.

    Gives a function that says what is not as it was.
    """
    modules = [(path, module, dict(module.__dict__), _contents(module.__dict__)) for path, module in _named(model)]
    try:
        yield lambda: _written(modules)
    finally:
        _restore_modules(modules)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path or "the model", module) for path, module in model.named_modules())


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """Shallow copies of the containers among the attributes (hook registries among them); None for an empty one."""
    return {
        name: value.copy() if value else None for name, value in attributes.items() if isinstance(value, _CONTAINERS)
    }


def _untouched(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> bool:
    """Whether nothing at all was bound or put in: the usual answer, which is to cost little."""
    now = module.__dict__
    if len(now) != len(attributes) or not all(map(is_, now.values(), attributes.values())):
        return False
    return all(_same(attributes[name], saved) for name, saved in contents.items())


_Saved = list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]


def _written(modules: _Saved) -> list[Written]:
    found = []
    for path, module, attributes, contents in modules:
        if _untouched(module, attributes, contents):
            continue
        now = module.__dict__
        for name in dict.fromkeys((*attributes, *now)):
            old, new = attributes.get(name, _ABSENT), now.get(name, _ABSENT)
            if new is not old and not (isinstance(old, _SIMPLE) and type(old) is type(new) and old == new):
                found.append(Written(f"attribute {name!r} of {path}", new))
        for name, saved in contents.items():
            container = attributes[name]
            if _same(container, saved):
                continue
            if not isinstance(container, dict):
                found.append(Written(f"the entries of {name!r} of {path}", None))
                continue
            before = saved or {}
            for key in dict.fromkeys((*before, *container)):
                if container.get(key, _ABSENT) is not before.get(key, _ABSENT):
                    where = f"{key!r} of {path}" if name in _REGISTRIES else f"entry {key!r} of {name!r} of {path}"
                    found.append(Written(where, container.get(key)))
    return found


def _restore_modules(modules: _Saved) -> None:
    for _, module, attributes, contents in modules:
        if _untouched(module, attributes, contents):
            continue
        for name in [name for name in module.__dict__ if name not in attributes]:
            del module.__dict__[name]
        module.__dict__.update(attributes)
        for name, saved in contents.items():
            container = attributes[name]
            if not _same(container, saved):
                container.clear()
                if saved:
                    getattr(container, "extend" if isinstance(saved, (list, deque)) else "update")(saved)


def _same(container: Any, saved: Any) -> bool:
    """Same entries in the same order, by identity: entries may be tensors, whose == is no answer."""
    if saved is None:
        return not container
    if len(container) != len(saved):
        return False
    if isinstance(saved, dict):
        return all(map(is_, container, saved)) and all(map(is_, container.values(), saved.values()))
    return isinstance(saved, set) or all(map(is_, container, saved))


def _warn_of_changed(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    changed = [name for name, parameter, version in versions if version_of(parameter) != version]
    if changed:
        listed = ", ".join(changed[:5]) + (" ..." if len(changed) > 5 else "")  # noqa: PLR2004  # a readable list
        warnings.warn(
            f"the model writes into its own parameters when it runs ({listed}); fxgrad cannot undo that. "
            "Use fxgrad.watch inside of the training loop, where nothing has to be undone.",
            stacklevel=5,
        )
