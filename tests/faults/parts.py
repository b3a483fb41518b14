"""Nets made of parts and a function, and what programs that use them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import Plain, Real, fault
from tests.faults.program import Built


def between(op, n: int = 16, width: int = 10, bias: float | None = None) -> Built:
    """Linear a, the operation, linear c."""
    model = Net(lambda m, x: m.c(op(m.a(x))), a=nn.Linear(6, width), c=nn.Linear(width, 3))
    if bias is not None:
        nn.init.constant_(model.a.bias, bias)
    return Built(model, (torch.randn(n, 6),), ce(n, 3))


class Attention(nn.Module):
    """Causal multi-query attention with ALiBi."""

    def __init__(self, dim: int = 24, heads: int = 4, hidden: float = -math.inf) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim // heads), nn.Linear(dim, dim)
        self.heads, self.hidden = heads, hidden

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        s = torch.einsum("bhqd,bkd->bhqk", q, k) * (d // self.heads) ** -0.5
        if memory is None:
            pos = torch.arange(t)
            slope = 2.0 ** -torch.arange(1, self.heads + 1)
            s = s - slope[:, None, None] * (pos[:, None] - pos[None]).abs()
            s = s + torch.full((t, t), self.hidden).triu(1)
        return self.o(torch.einsum("bhqk,bkd->bhqd", s.softmax(-1), v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, hidden: float, post: bool, cross: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 24)
        self.att = nn.ModuleList(Attention(hidden=hidden) for _ in range(4))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24)) for _ in range(4))
        self.n = nn.ModuleList(nn.LayerNorm(24) for _ in range(8))
        self.cross = nn.ModuleList(Attention() for _ in range(4)) if cross else None
        self.post, self.head = post, nn.Linear(24, 30)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Out:
        x = self.emb(ids)
        for i, (att, ff) in enumerate(zip(self.att, self.ff, strict=True)):
            if self.post:
                x = self.n[2 * i](x + att(x))
                x = self.n[2 * i + 1](x + ff(x))
            else:
                x = x + att(self.n[2 * i](x))
                x = x + ff(self.n[2 * i + 1](x))
            if self.cross is not None:
                x = x + self.cross[i](x, memory)
        logits = self.head(x)
        return Out(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits)


def mlp(i: int, o: int, width: int = 32, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, width), act(), nn.Linear(width, width), act(), nn.Linear(width, o))


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


def fit(case: Built, steps: int = 50, lr: float = 3e-3, momentum: bool = False) -> Built:
    """The same after some training."""
    ps = [p for p in case.model.parameters() if p.requires_grad]
    opt: torch.optim.Optimizer = torch.optim.Adam(ps, lr=lr)
    if momentum:
        opt = torch.optim.SGD(ps, lr=lr, momentum=0.9)
    for _ in range(steps):
        opt.zero_grad()
        case.loss_at(0).backward()
        opt.step()
    case.model.zero_grad(set_to_none=True)
    return case


def fresh(case: Built, step: int) -> Built:
    """Another batch of floats each step."""
    torch.manual_seed(500 + step)
    args = tuple(torch.randn_like(a) if a.is_floating_point() else a[torch.randperm(len(a))] for a in case.args)
    return Built(case.model, args, case.loss)


INF = float("inf")


def trap(name: str, places: str, op: Callable[[Tensor], Any], rows: int = 6) -> None:
    """Linear a, the operation, a sum."""

    def make() -> Built:
        model = Net(lambda m, x: m.c(op(m.a(x))), a=nn.Linear(5, 8), c=nn.LazyLinear(3))
        x = torch.randn(rows, 5)
        with torch.no_grad():
            model.c(op(model.a(x)).nan_to_num(0, 0, 0))
        return Built(model, (x,), lambda o: o.square().mean())

    fault("nonfinite", places, bad, name=name)(make)


def blank(h: Tensor) -> Tensor:
    """The second row and a column are padding."""
    mask = torch.ones(h.shape[0], 1)
    mask[1] = 0
    return h * mask
