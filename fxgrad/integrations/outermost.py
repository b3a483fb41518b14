"""Which module trains, where nobody says so: the outermost with what an optimizer has, or its part that is called."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["alive", "optimizers_of", "outermost", "parameters_of", "part_of", "scaler", "unwrapped"]

Kind = TypeVar("Kind")


def parameters_of(optimizers: Sequence[Optimizer]) -> set[int]:
    """Ids of what they train."""
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}


def outermost(modules: Iterable[nn.Module], trained: Collection[int]) -> list[nn.Module]:
    """Those that lie in no other of them and have parameters with these ids, the most entries first."""
    sized = [(module, size) for module in modules if (size := _trained_in(module, trained))]
    inside = {id(child) for module, _ in sized for child in module.modules() if child is not module}
    return [module for module, _ in sorted(sized, key=lambda pair: -pair[1]) if id(module) not in inside]


def part_of(module: nn.Module, trained: Collection[int]) -> nn.Module | None:
    """The child with the most entries of the parameters with these ids; None where none has any.

    For a module that holds what trains, and is not called itself.
    """
    return next(iter(outermost(module.children(), trained)), None)


def _trained_in(module: nn.Module, trained: Collection[int]) -> int:
    return sum(one.numel() for one in module.parameters() if id(one) in trained)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a wrapper that spreads it over devices."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


# ---- what lies in memory -------------------------------------------------------------------------------------------


def alive(kind: type[Kind]) -> Iterator[Kind]:
    """All objects of this class.  Their types are asked, and not they themselves: proxies would run code."""
    yield from (one for one in gc.get_objects() if issubclass(type(one), kind) and vars(one))


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Those that have a parameter of the model, and are no wrappers around one of torch's."""
    own = {id(parameter) for parameter in model.parameters()}
    made = ("_optimizer_step_pre_hooks", "param_groups")
    return [one for one in alive(Optimizer) if all(name in vars(one) for name in made) and own & parameters_of([one])]


def scaler() -> GradScaler | None:
    """The only one that scales; None where there is none, or more than one."""
    found = [one for one in alive(GradScaler) if one.is_enabled()]
    return found[0] if len(found) == 1 else None
