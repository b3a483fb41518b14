"""What the second examiner's programs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.program import Case, Plain, Real, scalar


class Net(nn.Module):
    """Parts and a function ``run(self, *args)`` that uses them; tensors become parameters, ``b_`` ones buffers."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif name.startswith("b_"):
                self.register_buffer(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


@dataclass
class Out:
    """What a wrapped model gives back."""

    loss: Tensor
    logits: Tensor


def ce(n: int, classes: int) -> Callable[[Tensor], Tensor]:
    y = torch.randint(0, classes, (n,))
    return lambda o: F.cross_entropy(o.float(), y)


def mse(*shape: int, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    y = torch.randn(*shape) * scale
    return lambda o: F.mse_loss(o.float(), y)


def params(n: int, *shape: int, std: float) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(*shape) * std) for _ in range(n))


def lins(n: int, width: int, bias: bool = True) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(n))


def he(module: nn.Module, gain: float = 2.0) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=(gain / p[0].numel()) ** 0.5) if p.ndim > 1 else nn.init.zeros_(p)
    return module


def tiny(first: str, last: str, below: float) -> Real:
    """The first gradient is under ``below`` of the last."""
    return lambda g: g.finite and g.ratio(first, last) < below


def big(first: str, last: str, above: float) -> Real:
    return lambda g: g.finite and g.ratio(first, last) > above


def nil(name: str, below: float = 0.0) -> Real:
    return lambda g: g.finite and g.norm(name) <= below


def none(name: str) -> Real:
    return lambda g: g.grads[name] is None


def bad(plain: Plain) -> bool:
    return not plain.finite


def fit(case: Case, steps: int = 50, lr: float = 3e-3, momentum: bool = False) -> Case:
    """The same after some training."""
    ps = [p for p in case.model.parameters() if p.requires_grad]
    opt: torch.optim.Optimizer = torch.optim.Adam(ps, lr=lr)
    if momentum:
        opt = torch.optim.SGD(ps, lr=lr, momentum=0.9)
    for _ in range(steps):
        opt.zero_grad()
        scalar(case, case.model(*case.args, **case.kwargs)).backward()
        opt.step()
    case.model.zero_grad(set_to_none=True)
    return case
