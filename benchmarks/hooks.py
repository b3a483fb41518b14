"""What people write themselves: module hooks, tensor hooks, ``retain_grad``, anomaly detection."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runners import Configuration, Runner, Seen


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that a module returned, as people look for them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [t for t in output if isinstance(t, Tensor)] if isinstance(output, (tuple, list)) else []


class _PerModule(Runner):
    """Something on every submodule, by name; ``norms`` is what the latest step told."""

    def attach(self) -> None:
        """Hook every submodule."""
        self.norms: dict[str, float] = {}
        self.handles = [self.hook(name, module) for name, module in self.built.model.named_modules() if name]

    def hook(self, name: str, module: nn.Module) -> Any:
        """Hook one submodule; the handle."""
        raise NotImplementedError

    def seen(self) -> Seen:
        """One norm by module name; a module that is called twice overwrites its first call."""
        return Seen(activations=len(self.norms), told="norm, by module name")

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


class ModuleHooks(_PerModule):
    """``register_full_backward_hook`` with ``.norm().item()``."""

    def hook(self, name: str, module: nn.Module) -> Any:
        """A full backward hook."""

        def hook(_module: nn.Module, _grad_input: Any, grad_output: Any) -> None:
            if isinstance(grad_output[0], Tensor):
                self.norms[name] = grad_output[0].norm().item()

        return module.register_full_backward_hook(hook)


class TensorHooks(_PerModule):
    """A forward hook that puts a tensor hook with ``.item()`` on what the module returns."""

    def hook(self, name: str, module: nn.Module) -> Any:
        """A forward hook."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.norms.__setitem__(name, grad.norm().item()))

        return module.register_forward_hook(hook)


class RetainGrad(_PerModule):
    """``retain_grad`` on what every submodule returns, and the norms after the backward pass."""

    def attach(self) -> None:
        """Hook every submodule."""
        self.kept: dict[str, Tensor] = {}
        super().attach()

    def hook(self, name: str, module: nn.Module) -> Any:
        """A forward hook that keeps the tensor."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.retain_grad()
                    self.kept[name] = tensor

        return module.register_forward_hook(hook)

    def backward(self, loss: Tensor) -> None:
        """Backward, then one norm each."""
        loss.backward()
        self.norms = {name: t.grad.norm().item() for name, t in self.kept.items() if t.grad is not None}
        self.kept.clear()


class Anomaly(Runner):
    """``torch.autograd.detect_anomaly`` around the step."""

    def step(self) -> None:
        """A step inside of the context."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it is slow
            with torch.autograd.detect_anomaly():
                super().step()

    def seen(self) -> Seen:
        """No statistic: it raises at the first NaN."""
        return Seen(told="raises at the first NaN, no statistic")


HOOKS = (
    Configuration("module_hooks", "full backward hooks, `.norm().item()`", ModuleHooks, "peer"),
    Configuration("tensor_hooks", "forward hook + tensor hook, `.norm().item()`", TensorHooks, "peer"),
    Configuration("retain_grad", "`retain_grad`, then `.norm().item()`", RetainGrad, "peer"),
    Configuration("detect_anomaly", "`torch.autograd.detect_anomaly`", Anomaly, "peer"),
)
