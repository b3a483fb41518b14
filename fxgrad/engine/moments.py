"""What one training step began with: copied before it, and kept beside the run file where an error was found in it.

A replay needs the arguments, parameters, buffers, random streams and modes before the forward, and what the loss sent
back to the model's outputs: with these no loss function is needed.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.errors import RunFileError
from fxgrad.torch_support.private import version_of, without_dispatch_modes, without_torch_function
from fxgrad.torch_support.structure import tensors_in

__all__ = ["Moment", "load_moment", "moment_path", "set_streams", "streams"]

FORMAT, VERSION = "fxgrad-moment", 1
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True, eq=False)
class Moment:
    """One forward call: what it began with, what it gave, and what came back to that.

    Attributes:
        args, kwargs: of the call, tensors copied.
        state: parameters and buffers by name, copied.
        modes: ``training`` by module name.
        streams: the random streams, see ``streams``.
        autocast: dtype by device type, where it was on.
        outputs: the tensors that were returned, by position, and how often each had been written to by then.
        gradients: what the loss sent back to them, by position.
        lacking: why it cannot be replayed; None where it can.
    """

    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    modes: dict[str, bool] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    outputs: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    lacking: str | None = None

    @classmethod
    def before(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Moment:
        """A forward call is about to run.  Copies its arguments, and all parameters and buffers; never raises."""
        try:
            with without_torch_function(), without_dispatch_modes(), torch.no_grad():
                return cls(
                    _copied(args), _copied(dict(kwargs)), state_of(model),
                    {name: module.training for name, module in model.named_modules()}, streams(), _autocast(),
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # training goes on, whatever the arguments are
            return cls(lacking=f"{type(error).__name__}: {error}")

    def returned(self, result: Any) -> None:
        """The forward has returned: note what comes back to its outputs, where they are made."""
        if self.lacking is not None:
            return
        with without_torch_function(), without_dispatch_modes():
            for position, tensor in tensors_in(result):
                self.outputs[position] = tensor.detach(), version_of(tensor)
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(_Arriving(self.gradients, position, tensor.output_nr))

    def save(self, path: Path, step: int) -> None:
        """Write it.

        Raises:
            RunFileError: it cannot be written.
        """
        content = {
            "format": FORMAT, "version": VERSION, "torch": str(torch.__version__), "step": step,
            "lacking": self.lacking, "args": self.args, "kwargs": self.kwargs, "state": self.state,
            "modes": self.modes, "streams": self.streams, "autocast": self.autocast, "gradients": self.gradients,
            # One that was written to since then is not what the forward gave.
            "outputs": {at: tensor for at, (tensor, version) in self.outputs.items() if version_of(tensor) == version},
        }  # fmt: skip
        staged = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
        try:
            torch.save(content, staged)
            staged.replace(path)
        except (OSError, RuntimeError) as error:
            message = f"{path} cannot be written: {error}"
            raise RunFileError(message) from error
        finally:
            staged.unlink(missing_ok=True)


class _Arriving:
    """A hook where an output was made, which is no hook on the user's tensor.  Never raises."""

    __slots__ = ("_gradients", "_number", "_position")

    def __init__(self, gradients: dict[str, Tensor], position: str, number: int) -> None:
        self._gradients = gradients
        self._position = position
        self._number = number

    def __call__(self, arriving: tuple[Tensor | None, ...]) -> None:
        gradient = arriving[self._number] if self._number < len(arriving) else None
        if gradient is not None:
            with without_torch_function(), without_dispatch_modes(), torch.no_grad():
                self._gradients[self._position] = gradient.detach().clone()


def moment_path(run: Path) -> Path:
    """Where the moment of a run file is kept."""
    return run.with_name(f"{run.name}.batch")


def load_moment(run: Path) -> dict[str, Any]:
    """What ``Moment.save`` wrote beside a run file.

    Raises:
        RunFileError: it is not there, damaged, or cannot be replayed; the message says why.
    """
    path = moment_path(run)
    if not path.is_file():
        message = (
            f"{path} is not there: no step was kept of {run}. Train with watch(run_file=..., capture_batch=True); "
            "the step of the first error that is found is kept"
        )
        raise RunFileError(message)
    try:
        content: Any = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is cut off
        message = f"{path} is damaged: {type(error).__name__}: {error}".splitlines()[0]
        raise RunFileError(message) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        message = f"{path} was written by another version of fxgrad, or is something else"
        raise RunFileError(message)
    if content["lacking"] is not None:
        message = f"step {content['step']} of {run} cannot be replayed: {content['lacking']}"
        raise RunFileError(message)
    return content


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, those that are not saved too, by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def streams() -> dict[str, Any]:
    """The random streams of torch on every device in use, of Python, and of NumPy where that is loaded."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def set_streams(found: Mapping[str, Any]) -> None:
    """Set what ``streams`` gave."""
    torch.set_rng_state(found["cpu"])
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"])
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(found["numpy"]))


def _autocast() -> dict[str, torch.dtype]:
    kinds = ("cpu", "cuda")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _copied(value: Any) -> Any:
    """A copy of nested arguments whose tensors are our own.

    Raises:
        TypeError: something else is in there.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, _PLAIN):
        return value
    message = f"the batch holds a {type(value).__name__}, and no more than tensors and plain containers can be kept"
    raise TypeError(message)
