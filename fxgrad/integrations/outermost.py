"""Which module trains, where nobody says so: the outermost that a step calls and whose parameters an optimizer has."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["Calls", "parameters_of", "unwrapped"]


class Calls:
    """The modules that are called in training from now on, by a hook of torch's for all modules, until ``stop``.

    Nothing that is computed depends on it; code under ``torch.compile`` is left alone.
    """

    def __init__(self) -> None:
        self._called: dict[int, weakref.ref[nn.Module]] = {}  # in the order of their first calls
        self._handle = register_module_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        del args
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if id(module) not in self._called:
            self._called[id(module)] = weakref.ref(module)

    @property
    def called(self) -> list[nn.Module]:
        """All of them that are still there, in the order of their first calls."""
        return [module for reference in self._called.values() if (module := reference()) is not None]

    def stop(self) -> None:
        """Take the hook off.  May be called twice."""
        self._handle.remove()

    def outermost(self, parameters: Collection[int]) -> list[nn.Module]:
        """Those that lie in no other one and have parameters with these ids, the most entries first."""
        called = self.called
        inside = {id(child) for module in called for child in module.modules() if child is not module}
        sizes = {
            id(module): sum(one.numel() for one in module.parameters() if id(one) in parameters) for module in called
        }
        roots = [module for module in called if id(module) not in inside and sizes[id(module)]]
        return sorted(roots, key=lambda module: -sizes[id(module)])


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a wrapper that spreads it over devices."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Ids of what they train."""
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
