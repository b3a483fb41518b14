"""Facts of a call that need no session: its word, its torch.fx op, whether it is the call of an earlier step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.captured import Call, Ref, as_constant, plain
from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import op_word, operator_of
from fxgrad.schema import Constant
from fxgrad.torch_support.private import tampered

#: What tells Python a tensor's value; by function name, since ``x.float()`` is a cast and ``float(x)`` isn't.
ASKS = frozenset({
    "__bool__", "__float__", "__int__", "__index__", "__complex__", "item", "tolist", "numpy", "allclose", "equal",
})  # fmt: skip
_words: dict[Any, str] = {}  # of torch's functions, which live as long as the process
_NOT_REFLECTED = frozenset({"__repr__", "__reduce__", "__reduce_ex__", "__reversed__", "__rshift__"})


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    """The arguments of a forward call with their names; further positional ones are ``args[n]``."""
    listed = [
        (names[index] if index < len(names) else f"args[{index - len(names)}]", value)
        for index, value in enumerate(args)
    ]
    return listed + list(kwargs.items())


def positional_names(forward: Callable[..., Any]) -> list[str]:
    """Names of the parameters of ``forward`` that can be given by position."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # a builtin or scripted forward has none; its arguments are args[0], args[1] ...
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def function_word(func: Callable[..., Any]) -> str:
    """The op word; a reflected operator's begins with two underscores, the attribute ``.grad`` says nothing."""
    name = getattr(func, "__name__", "")
    word = op_word(func)
    if name == "__get__" and word == "grad":
        return "shape"
    return f"__{word}" if name.startswith("__r") and name not in _NOT_REFLECTED else word


def word_of(func: Callable[..., Any]) -> str:
    """``function_word``, found once."""
    word = _words.get(func)
    if word is None:
        word = _words[func] = function_word(func)
    return word


def same_call(old: Call, stem: str, func: Any, refs: tuple[Ref | None, ...], found: list[tuple[str, Tensor]]) -> bool:
    """Whether a call is the one that an earlier step wrote down at this place, so that its facts may be used again."""
    if old.key_stem != stem or old.refs != refs or old.function != func:
        return False
    if old.grad_enabled != torch.is_grad_enabled():
        return False
    if len(old.outputs) != len(found):
        return False
    for output, (position, tensor) in zip(old.outputs, found, strict=True):
        if output.position != position or output.requires_grad != tensor.requires_grad or output.dtype != tensor.dtype:
            return False
    return True


def fx_op(func: Callable[..., Any], word: str) -> tuple[str, Any]:
    """How torch.fx would write the call: methods by name, operators and functions by object."""
    operator = operator_of(word)
    if operator is not None:
        return "call_function", operator
    name = getattr(func, "__name__", "")
    # Not torch.overrides.is_tensor_method_or_property: it enters catch_warnings, which makes Python forget which of the
    # user's warnings were shown already.
    if name == "__get__" or getattr(Tensor, name, None) is func:
        return "call_method", word
    return "call_function", func


def frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them requires a gradient."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def leaf_facts(modules: ModuleMap, op: str, target: Any) -> tuple[bool, tuple[Constant, ...], tuple[str, ...]]:
    """Of the leaf module that a call runs: whether it is hooked, its settings, its parameters' and buffers' names."""
    if op not in ("call_module", "external") or not isinstance(target, str):
        return False, (), ()
    place = modules.at.get(target)
    if place is None:
        return False, (), ()
    return op == "call_module" and tampered(place.module), *facts_of(modules, place.module)


def given_if_hooked(place: Place, args: tuple[Any, ...], template: Callable[[Any], Any]) -> Any:
    """What a hooked leaf module is given, before a hook may put something else in its place; None for other modules."""
    hooked = place.leaf and not place.opaque and tampered(place.module)
    return template(args) if hooked else None


def facts_of(modules: ModuleMap, module: nn.Module) -> tuple[tuple[Constant, ...], tuple[str, ...]]:
    """A module's settings (public attributes that are numbers or words), and its parameters' and buffers' names."""
    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training")
    settings = tuple(as_constant(name, value) for name, value in public if plain(value))
    owned = [*module.parameters(), *module.buffers()]
    return settings, tuple(modules.tensors[id(tensor)] for tensor in owned if id(tensor) in modules.tensors)
