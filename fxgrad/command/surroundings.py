"""What trains around a model, where nobody says so: its optimizers and the loss scaler, as they lie in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.integrations.outermost import parameters_of

__all__ = ["optimizers_of", "scaler"]

Kind = TypeVar("Kind")


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Those that have a parameter of the model, and have hooks: no wrappers."""
    own = {id(parameter) for parameter in model.parameters()}
    return [one for one in _alive(Optimizer) if _real(one) and own & parameters_of([one])]


def scaler() -> GradScaler | None:
    """The only one that scales; None where there is none, or more than one."""
    found = [one for one in _alive(GradScaler) if one.is_enabled()]
    return found[0] if len(found) == 1 else None


def _alive(kind: type[Kind]) -> Iterator[Kind]:
    """Objects of this class.  Their types are asked, and not they themselves, which may be proxies that run code."""
    yield from (one for one in gc.get_objects() if issubclass(type(one), kind))


def _real(optimizer: Any) -> bool:
    """Whether it is one of torch's, and no wrapper around one that is found itself."""
    return all(name in vars(optimizer) for name in ("_optimizer_step_pre_hooks", "param_groups"))
