"""Nets and losses that several files of programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import Plain, fault
from tests.faults.program import Built


def trained(case: Built, steps: int = 60, lr: float = 3e-3) -> Built:
    """The same after some steps of Adam."""
    opt = torch.optim.Adam([p for p in case.model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        case.loss_at(0).backward()
        opt.step()
    case.model.zero_grad(set_to_none=True)
    return case


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(r, base.in_features) * 0.02),
            nn.Parameter(torch.zeros(base.out_features, r)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * (x @ self.a.t()) @ self.b.t()


class Net(nn.Module):
    """Linear ``a``, a function, linear ``b``."""

    def __init__(self, op: Any, widths: tuple[int, int, int, int] = (8, 16, 16, 3)) -> None:
        super().__init__()
        self.a, self.b, self.op = nn.Linear(*widths[:2]), nn.Linear(*widths[2:]), op

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.op(h))


def dull(limit: float = 1e-7) -> Any:
    return lambda g: g.norm("a.weight") <= limit * max(g.norm("b.weight"), g.norm("b.bias"))


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.rate * g, None


def image(n: int, size: int = 20) -> Tensor:
    return torch.randn(n, 3, size, size)


def tokens(n: int = 3, t: int = 12) -> Tensor:
    return torch.randint(0, 40, (n, t))


def lm() -> Callable[[Tensor], Tensor]:
    y = tokens()
    return lambda o: F.cross_entropy(o.float().flatten(0, 1), y.flatten())


def adjacency(n: int) -> Tensor:
    a = (torch.rand(n, n) < 0.15).float()
    a = ((a + a.t()) > 0).float() + torch.eye(n)
    d = a.sum(1).rsqrt()
    return d[:, None] * a * d[None]


class Captioner(nn.Module):
    """An image's code is the first state of a recurrence of 50 steps."""

    def __init__(self, gain: float, act: bool = True, steps: int = 40) -> None:
        super().__init__()
        self.encoder, self.cell, self.head = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 5)
        nn.init.orthogonal_(self.cell.weight, gain)
        nn.init.zeros_(self.cell.bias)
        self.act, self.steps = act, steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        for _ in range(self.steps):
            h = self.cell(h)
            h = torch.tanh(h) if self.act else h
        return self.head(h)


class Plain2d(nn.Module):
    def __init__(self, depth: int, he: bool = False) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for i in range(depth):
            parts += [nn.Conv2d(3 if i == 0 else 12, 12, 3, padding=1), nn.ReLU()]
        self.features, self.head = nn.Sequential(*parts), nn.Linear(12, 6)
        if he:
            for p in self.features.parameters():
                nn.init.kaiming_normal_(p) if p.ndim > 1 else nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class GCN(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(8 if i == 0 else 16, 16) for i in range(depth))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        for lin in self.lins:
            x = torch.relu(a @ lin(x))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, options: tuple[bool, bool, bool], act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.residual, norm, self.post = options
        self.heads, self.act = heads, act
        self.n1, self.n2 = (nn.LayerNorm(dim), nn.LayerNorm(dim)) if norm else (nn.Identity(), nn.Identity())
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.n1(x + self.attend(x))
            return self.n2(x + self.down(self.act(self.up(x))))
        a = self.attend(self.n1(x))
        x = x + a if self.residual else a
        f = self.down(self.act(self.up(self.n2(x))))
        return x + f if self.residual else f


class GPT(nn.Module):
    def __init__(self, depth: int, residual: bool = True, norm: bool = True, act: Callable[[Tensor], Tensor] = F.gelu,
                 post: bool = False, tied: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.emb, self.pos = nn.Embedding(40, 32), nn.Parameter(torch.randn(16, 32) * 0.02)
        self.blocks = nn.ModuleList(Block(32, 4, (residual, norm, post), act) for _ in range(depth))
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()
        self.head = nn.Linear(32, 40, bias=False)
        if tied:
            nn.init.normal_(self.emb.weight, std=0.02)
            self.head.weight = self.emb.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.emb(i) + self.pos[: i.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HyperNet(nn.Module):
    """Weights of four square layers come from a small net."""

    def __init__(self, scale: float = 1.0, depth: int = 5) -> None:
        super().__init__()
        self.enter, self.gen, self.leave = nn.Linear(10, 12), nn.Linear(4, depth * 144), nn.Linear(12, 2)
        self.scale, self.depth = scale, depth

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        weights = self.gen(z).view(self.depth, 12, 12)
        h = self.enter(x)
        for w in weights:
            h = torch.tanh(h @ (w * self.scale))
        return self.leave(h)


class UNet(nn.Module):
    """Two levels, time embedding, skip."""

    def __init__(self, mid_scale: float = 1.0, skip: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.time = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24))
        self.mid, self.up = nn.Conv2d(24, 24, 3, padding=1), nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.n1, self.n2 = nn.GroupNorm(4, 24), nn.GroupNorm(4, 24)
        self.out = nn.Conv2d(24 if skip else 12, 3, 3, padding=1)
        self.scale, self.skip = mid_scale, skip
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.pow(10.0, torch.arange(4))
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        s = F.silu(self.stem(x))
        h = F.silu(self.n1(self.down(s)) + emb[:, :, None, None])
        h = F.relu(self.mid(h))
        h = h * self.scale if self.scale != 1 else self.n2(h)
        h = self.up(h)
        return self.out(torch.cat([h, s], 1) if self.skip else h)


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(12, 24), nn.Linear(24, 4)
        self.gates = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.works = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for gate, work in zip(self.gates, self.works, strict=True):
            g = torch.sigmoid(gate(h))
            h = g * torch.tanh(work(h)) + (1 - g) * h
        return self.head(h)


class MoE(nn.Module):
    def __init__(self, loop: int = 4) -> None:
        super().__init__()
        self.router, self.loop = nn.Linear(12, 4), loop
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12)) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        y = sum(p[:, i, None] * self.experts[i](x) for i in range(self.loop))
        return self.head(y)


class BasicBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.c2, self.b2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.down = (
            nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if stride > 1 else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.b1(self.c1(x)))
        h = self.b2(self.c2(h))
        h += self.down(x)
        return self.relu(h)


class ResNet(nn.Module):
    def __init__(self, depth: int = 2, zero_gamma: bool = False) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        blocks: list[nn.Module] = [BasicBlock(16, 16, 1) for _ in range(depth)]
        blocks += [BasicBlock(16, 32, 2)] + [BasicBlock(32, 32, 1) for _ in range(depth - 1)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(32, 5)
        if zero_gamma:
            for b in blocks:
                nn.init.zeros_(b.b2.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = (
            nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)]),
            nn.Linear(16, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = F.gelu(cell(x))
        return self.head(x) * 1.0


C = r"(#\d+)?"


def sq(o: Tensor) -> Tensor:
    return o.float().pow(2).mean()


def ce(n: int, classes: int):
    y = torch.randint(0, classes, (n,))
    return lambda o: F.cross_entropy(o.float(), y)


class Around(nn.Module):
    """Linear, the operation, linear."""

    def __init__(self, op: Callable[[Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.leave = nn.LazyLinear(3)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(self.op(h))


def bad(plain: Plain) -> bool:
    """The step is of no use."""
    return not plain.finite


def trap(name: str, op: Callable[[Tensor], Tensor], places: str, rows: int = 4) -> None:
    """Register one."""

    def make() -> Built:
        model = Around(op)
        x = torch.randn(rows, 5)
        with torch.no_grad():
            h = model.enter(x)
            model.leave(op(h).nan_to_num())
        return Built(model, (x,), lambda out: (out**2).mean())

    fault("nonfinite", places, bad, name=name)(make)


def pad(h: Tensor) -> Tensor:
    """The first row is padding."""
    mask = torch.ones(h.shape[0], 1)
    mask[0] = 0
    return h * mask


K = r"(#\d+)?"
