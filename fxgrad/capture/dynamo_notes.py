"""What dynamo notes on the nodes of its graphs: modules, source lines, names of what comes in."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import fx

from fxgrad.capture.names import from_torch

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_ROOT = re.compile(r"[LG]\['\w+'\]")
_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['(?P<item>[^']+)'\]|\.(?P<name>\w+)|\['(?P<key>[^']+)'\]")
_ENTERED = frozenset({
    "Sequential", "ModuleList", "ModuleDict", "MultiheadAttention", "Transformer", "TransformerEncoder",
    "TransformerDecoder", "TransformerEncoderLayer", "TransformerDecoderLayer", "AdaptiveLogSoftmaxWithLoss",
})  # fmt: skip  # modules of torch.nn with child modules: the leaf policy in terms of classes


class Place(NamedTuple):
    """A module, parameter or buffer: the module that dynamo entered by, and the path from there."""

    root: str
    path: str


class Owner(NamedTuple):
    """A module: its ``id`` when the graph was made, where it is, and the name of its class."""

    id: int | None
    place: Place | None
    type: str


def _stack(node: fx.Node) -> list[tuple[str, Any]]:
    stack = node.meta.get("nn_module_stack") or {}
    return [(key, kind) for key, (_, kind) in stack.items()]


def leaf_of(node: fx.Node) -> str | None:
    """Which call of a leaf module a node belongs to."""
    for key, kind in _stack(node):
        if _leaf_type(kind):
            return key
    return None


def _leaf_type(kind: Any) -> bool:
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__name__", "")
    return module.startswith(("torch.nn.", "torch.ao.nn.")) and name not in _ENTERED


def owner_of(node: fx.Node) -> Owner:
    """The module whose forward made the call (the leaf itself, for what happens inside of one)."""
    owner = Owner(None, None, "")
    stack = node.meta.get("nn_module_stack") or {}
    for key, (text, kind) in stack.items():
        number = key.partition("@")[0]
        place = place_of(text.partition("@")[0])
        owner = Owner(int(number) if number.isdigit() else None, place, getattr(kind, "__name__", str(kind)))
        if _leaf_type(kind):
            break
    return owner


def place_of(text: str | None) -> Place | None:
    """Where a module, parameter or buffer is, from how dynamo writes it; None for anything else."""
    found = _ROOT.match(text or "")
    if found is None:
        return None
    rest = text[found.end() :] if text is not None else ""
    if _STEP.sub("", rest):
        return None
    return Place(found[0], ".".join(m["item"] or m["name"] or m["key"] for m in _STEP.finditer(rest)))


def tensor_at(node: fx.Node) -> Place | None:
    """Where a placeholder's parameter or buffer is."""
    return place_of(_text_of(node))


def argument_of(node: fx.Node) -> str:
    """What the user's code calls a placeholder: the name of the local variable, with the keys behind it."""
    text = _text_of(node)
    found = re.fullmatch(r"L\['(?P<name>\w+)'\](?P<rest>.*)", text or "")
    return found["name"] + found["rest"] if found else node.name


def source_of(node: fx.Node) -> str | None:
    """``file:line`` of the user's code that made a node."""
    lines = [(m["file"], m["line"]) for m in _LINE.finditer(node.meta.get("stack_trace") or "")]
    own = [entry for entry in lines if not from_torch(entry[0])]
    return ":".join(own[-1]) if own else None


def _text_of(node: fx.Node) -> str | None:
    """How dynamo writes where a placeholder comes from."""
    made = node.meta.get("grapharg")
    source = getattr(getattr(made, "source", None), "name", None)
    text: str | None = source() if callable(source) else source
    return text
