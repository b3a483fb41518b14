"""The face of a forward that stands in for another: whoever looks at it sees the one below.

``inspect.signature``, ``__self__``, ``__func__``, the name and the doc string are read by the Hugging Face Trainer, by
``generate``, by Accelerate and by Lightning, which then call the model in another way.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

#: No forward in the instance's own ``__dict__``: calls go to the forward of its class.
ABSENT = object()

_SHOWN = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__kwdefaults__")


class Plain:
    """The forward that the model has without us.

    Where the instance has none of its own, the class is asked at each call, so that a patched class or another
    ``__class__`` takes effect.

    Attributes:
        model: whose forward it is.
        own: what stood in the instance's ``__dict__``, or ``ABSENT``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own = model.__dict__.get("forward", ABSENT)

    @property
    def forward(self) -> Any:
        """What ``model.forward`` is now, without us."""
        return class_forward(self.model) if self.own is ABSENT else self.own

    @property
    def __func__(self) -> Any:
        return getattr(self.forward, "__func__", None)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if self.own is not ABSENT:
            return self.own(*args, **kwargs)
        model = self.model
        found = type(model).__dict__.get("forward")
        if type(found) is types.FunctionType:  # the usual case, without the detour
            return found(model, *args, **kwargs)
        return class_forward(model)(*args, **kwargs)

    def is_below(self, forward: Any) -> bool:
        """Whether ``forward`` is surely the model's own, bare or with some of its ``functools.wraps`` taken off."""
        unwrapped, found = self.forward, _function(forward)
        while unwrapped is not None:
            if found is _function(unwrapped):
                return True
            unwrapped = getattr(unwrapped, "__wrapped__", None)
        return False


def class_forward(model: nn.Module) -> Any:
    """The forward of the model's class, bound to the model, past whatever stands in the instance's ``__dict__``."""
    kind = type(model)
    found = next(one.__dict__["forward"] for one in kind.__mro__ if "forward" in one.__dict__)
    if type(found) is types.FunctionType:
        return types.MethodType(found, model)
    return found.__get__(model, kind) if hasattr(type(found), "__get__") else found


def is_property(model: nn.Module) -> bool:
    """Whether the class keeps its forward in a data descriptor, past which nothing can be put in the instance."""
    return inspect.isdatadescriptor(inspect.getattr_static(type(model), "forward"))


def face_of(plain: Plain, run: Callable[..., Any]) -> Any:
    """What to put in place of ``plain``: calls go to ``run(args, kwargs)``, all else is seen as it was.

    A bound method is replaced by one that is bound to the same object.  Bound to another one, as in a deepcopy by
    somebody who keeps bound methods of the model (Accelerate does), it runs the plain forward of that one.
    """
    below = plain.forward
    if not isinstance(below, types.MethodType):
        return _dressed(_function_face(run), plain, below)
    owner, own = below.__self__, plain.own

    def elsewhere(self: Any, *args: Any, **kwargs: Any) -> Any:
        """On an object that is not ours."""
        bound = class_forward(self) if own is ABSENT else types.MethodType(own.__func__, self)
        return bound(*args, **kwargs)

    return types.MethodType(_dressed(_method_face(owner, run, elsewhere), plain, below.__func__), owner)


def _method_face(owner: object, run: Callable[..., Any], elsewhere: Callable[..., Any]) -> types.FunctionType:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is owner:
            return run(args, kwargs)
        return elsewhere(self, *args, **kwargs)

    return forward  # type: ignore[return-value]


def _function_face(run: Callable[..., Any]) -> types.FunctionType:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    return forward  # type: ignore[return-value]


def _dressed(made: types.FunctionType, plain: Plain, below: Any) -> types.FunctionType:
    """``made`` with what ``below`` shows, and its globals, in which annotations written as strings are looked up."""
    names = getattr(below, "__globals__", made.__globals__)
    face = types.FunctionType(made.__code__, names, made.__name__, None, made.__closure__)
    if isinstance(below, types.FunctionType):
        face.__dict__.update(below.__dict__)  # __wrapped__ with it, so that who takes wrappers off ends where it would
    for name in _SHOWN:
        with contextlib.suppress(AttributeError, TypeError):
            setattr(face, name, getattr(below, name))
    face.__signature__ = _LiveSignature(plain)  # type: ignore[attr-defined]
    return face


def _function(forward: Any) -> Any:
    return getattr(forward, "__func__", forward)


class _LiveSignature(inspect.Signature):
    """The signature that the forward below has now, its ``self`` included where it is a method."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self._plain = plain

    def _now(self) -> inspect.Signature:
        return inspect.signature(_function(self._plain.forward))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:  # type: ignore[override]
        """Of the forward below."""
        return self._now().parameters

    @property
    def return_annotation(self) -> Any:
        """Of the forward below."""
        return self._now().return_annotation

    def replace(self, **changes: Any) -> inspect.Signature:  # type: ignore[override]
        """A plain signature with these parts changed."""
        return self._now().replace(**changes)
