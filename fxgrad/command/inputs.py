"""``--input``: from its words to the arguments of a model.

8x3x224x224                  a tensor of this shape, float32, standard normal
8x3x224x224:bfloat16         of another dtype
8x3x224x224:float32:0-1      uniform in [0, 1)
8x128:int64:0-30522          integers from 0 to 30521
scalar:float32               a tensor without dimensions
input_ids=8x128:int64:0-100  passed by this name
batch.pt                     torch.load with weights_only=True: a tensor, a tuple of arguments, a dict of names
package.module:make          a function returning a tensor, a tuple of arguments, a dict of names, or both (tuple, dict)
file.py:make
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxgrad.command.references import Asked, resolve
from fxgrad.errors import InputError

__all__ = ["Arguments", "make_arguments"]

_FORMS = (
    "An input is SHAPE[:DTYPE[:LOW-HIGH]] (8x3x224x224:float32, 8x128:int64:0-30522), a .pt file, "
    "or a function that returns the arguments (file.py:name); NAME=... passes it by name"
)
_SHAPE = re.compile(r"(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>\w+)(?::(?P<range>.*))?)?")
_NUMBER = r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})-({_NUMBER})")
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SAVED = (".pt", ".pth")
_WIDE = (torch.float64, torch.complex64, torch.complex128)  # that torch.randn makes as they are


@dataclass(slots=True)
class Arguments:
    """What a model is called with."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def add(self, value: Any, asked: Asked) -> None:
        """Take the arguments that a file or a function gave: a tensor, a sequence, a mapping, or (tuple, dict)."""
        match value:
            case (tuple() | list() as args, Mapping() as kwargs):
                self.args.extend(args)
                self._name(kwargs, asked)
            case tuple() | list():
                self.args.extend(value)
            case Mapping():
                self._name(value, asked)
            case _:
                self.args.append(value)

    def put(self, name: str, value: Any, asked: Asked) -> None:
        """Pass ``value`` by name."""
        self._name({name: value}, asked)

    def _name(self, values: Mapping[Any, Any], asked: Asked) -> None:
        for name, value in values.items():
            if not isinstance(name, str):
                asked.refuse(f"holds a dict with the key {name!r}, but the names of arguments are text")
            if name in self.kwargs:
                asked.refuse(f"gives the argument {name!r} a second time")
            self.kwargs[name] = value


@dataclass(frozen=True, slots=True)
class Source:
    """Where tensors come from and go to.

    Attributes:
        generator: of the random values, on the CPU, so that a seed means the same on every device.
        device: of the model.
    """

    generator: torch.Generator
    device: torch.device


def make_arguments(words: Sequence[str], seed: int, device: torch.device) -> Arguments:
    """The arguments that all ``--input`` words describe together, in their order.

    Args:
        words: each one input in one of the forms above.
        seed: of the random values.
        device: where described and loaded tensors are put; a function's own tensors stay where they are.

    Raises:
        InputError: a description is wrong, a file cannot be read, a function raised.
    """
    source = Source(torch.Generator().manual_seed(seed), device)
    arguments = Arguments()
    for word in words:
        asked = Asked(word, "--input", InputError)
        named = _NAMED.fullmatch(word)
        value, several = _make(named[2] if named else word, asked, source)
        if named:
            arguments.put(named[1], value, asked)
        elif several:
            arguments.add(value, asked)
        else:
            arguments.args.append(value)
    return arguments


def _make(words: str, asked: Asked, source: Source) -> tuple[Any, bool]:
    """The value, and whether it may hold several arguments."""
    if words.endswith(_SAVED):
        return _load(Path(words), asked, source), True
    if ".py:" not in words and re.match(r"[-\d]|scalar\b", words):
        return _random(words, asked, source), False
    if ":" not in words:
        asked.refuse(f"is no description of an input. {_FORMS}")
    return _call(words, asked), True


def _random(words: str, asked: Asked, source: Source) -> Tensor:
    found = _SHAPE.fullmatch(words)
    if found is None:
        asked.refuse(f"is no shape. {_FORMS}")
    shape = () if found["shape"] == "scalar" else tuple(map(int, found["shape"].split("x")))
    dtype = getattr(torch, found["dtype"] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        asked.refuse(f"torch has no dtype {found['dtype']!r}. Try float32, float16, bfloat16, int64 or bool")
    bounds = None if found["range"] is None else _bounds(found["range"], dtype, asked)
    try:
        if bounds is not None:
            return _between(shape, dtype, bounds, source.generator).to(source.device)
        return _unbounded(shape, dtype, asked, source.generator).to(source.device)
    except (RuntimeError, TypeError, OverflowError) as error:  # too large, out of the dtype's range, no such kernel
        asked.refuse(f"torch cannot make this tensor: {error}", error)


def _bounds(text: str, dtype: torch.dtype, asked: Asked) -> tuple[float, float]:
    found = _RANGE.fullmatch(text)
    if found is None:
        asked.refuse(f"{text!r} is no range. Write LOW-HIGH, such as 0-100; HIGH itself is not drawn")
    if dtype.is_complex or dtype == torch.bool:
        asked.refuse(f"a {_word(dtype)} input takes no range")
    number = float if dtype.is_floating_point else int
    try:
        low, high = number(found[1]), number(found[2])
    except ValueError as error:
        asked.refuse(f"the range {text!r} of a {_word(dtype)} input must have whole numbers", error)
    if low >= high:
        asked.refuse(f"the range {text!r} is empty: LOW must be below HIGH, which itself is not drawn")
    return low, high


def _between(
    shape: tuple[int, ...], dtype: torch.dtype, bounds: tuple[float, float], generator: torch.Generator
) -> Tensor:
    low, high = bounds
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).mul(high - low).add(low).to(dtype)
    return torch.randint(int(low), int(high), shape, generator=generator, dtype=dtype)


def _unbounded(shape: tuple[int, ...], dtype: torch.dtype, asked: Asked, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        example = f"{asked.words}:0-100"
        message = (
            f"an input of {_word(dtype)} needs a range, such as {example} "
            "(0-N for token numbers, where N is the size of the vocabulary)"
        )
        asked.refuse(message)
    made = dtype if dtype in _WIDE else torch.float32
    return torch.randn(shape, generator=generator, dtype=made).to(dtype)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(path: Path, asked: Asked, source: Source) -> Any:
    if not path.is_file():
        asked.refuse(f"there is no file {path} (looked in {Path.cwd()})")
    try:
        return torch.load(path, map_location=source.device, weights_only=True)
    except pickle.UnpicklingError as error:
        message = (
            f"{path} holds more than tensors and plain containers, or is damaged, and is not loaded, because loading "
            f"it could run code. Save the tensors only, or pass a function that makes them. torch says: {error}"
        )
        asked.refuse(message, error)
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        asked.refuse(f"{path} cannot be loaded: {type(error).__name__}: {error}", error)


def _call(words: str, asked: Asked) -> Any:
    function = resolve(Asked(words, asked.role, asked.error))
    if not callable(function):
        return function
    try:
        return function()
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        asked.refuse(f"raised {type(error).__name__} when called without arguments: {error}", error)
