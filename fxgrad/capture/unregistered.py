"""Modules and parameters that a model keeps in plain lists and dicts, where ``parameters()`` does not find them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from torch import nn

_OWN = frozenset(nn.Module().__dict__)
_DEPTH = 3  # lists in lists


class Found(NamedTuple):
    """One of them.

    Attributes:
        path: as the user would write it: ``layers[0]``, ``heads['cls']``.
        item: the module or parameter.
        holder: the list or dict that it is in.
    """

    path: str
    item: nn.Module | nn.Parameter
    holder: list[Any] | tuple[Any, ...] | dict[Any, Any]


def unregistered(root: nn.Module, known: Container[int]) -> Iterator[Found]:
    """Those with parameters that require a gradient; ``known``: ids of what is registered.

    A module that has a registered one inside of it (a parent, another view of the model) is left out.
    """
    seen: set[int] = set()
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in _OWN and isinstance(value, (list, tuple, dict)):
                for found in _inside(value, f"{path}.{name}" if path else name, _DEPTH):
                    if id(found.item) not in seen and _counts(found.item, known):
                        seen.add(id(found.item))
                        yield found


def _inside(holder: Any, path: str, depth: int) -> Iterator[Found]:
    for key, item in list(holder.items()) if isinstance(holder, dict) else enumerate(holder):
        place = f"{path}[{key!r}]" if isinstance(key, (int, str)) else f"{path}[...]"
        if isinstance(item, (nn.Module, nn.Parameter)):
            yield Found(place, item, holder)
        elif depth and isinstance(item, (list, tuple, dict)):
            yield from _inside(item, place, depth - 1)


def _counts(item: nn.Module | nn.Parameter, known: Container[int]) -> bool:
    if isinstance(item, nn.Parameter):
        return item.requires_grad and id(item) not in known
    if any(id(module) in known for module in item.modules()):
        return False
    return any(parameter.requires_grad and id(parameter) not in known for parameter in item.parameters())
