"""Loops in other number formats: autocast, loss scaling, pure half precision, doubles, weights of eight bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad.schema import GradientFlow
from tests.fidelity.loops import Loop, batch, loop, small


class Simple(Loop):
    """Clear, forward, backward, step."""

    def loss(self, i: int) -> Tensor:
        """Of step ``i``."""
        return self.model(batch(i)).float().square().mean()

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(i)
        loss.backward()
        self.optimizer.step()
        return loss


@loop
class Single(Simple):
    """float32, as a measure of the others."""


@loop
class AutocastBfloat16(Simple):
    def loss(self, i: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(i)

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        assert {s.dtype for f in flows["model"] for s in f.sites if s.op == "call_module"} >= {"bfloat16"}
        assert {p.dtype for f in flows["model"] for p in f.parameters} == {"float32"}


@loop
class AutocastFloat16Scaled(Loop):
    """With a scaler, a clipped norm and a schedule; some losses are Inf, and their steps are skipped."""

    BAD = (3, 4, 20)

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.5)

    def watched(self) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        return {"model": (self.model, {"optimizer": self.optimizer, "scaler": self.scaler})}

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(batch(i)).float().square().mean()
        self.scaler.scale(loss * math.inf if i in self.BAD else loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        taken = [flow.optimizer.step for flow in flows["model"] if flow.optimizer]
        assert [i for i, number in enumerate(taken) if number is None] == list(self.BAD)
        assert [number for number in taken if number is not None] == list(range(self.steps - len(self.BAD)))
        assert [flow.optimizer.skipped for flow in flows["model"] if flow.optimizer][-1] == len(self.BAD)
        scales = [flow.event.loss_scale for flow in flows["model"]]
        assert scales[0] == 1024.0 and scales[5] == 256.0 and scales[13] == 512.0


@loop
class AccumulatedScaled(AutocastFloat16Scaled):
    """Three micro-batches a step."""

    events = 3
    BAD = (2, 9)
    steps = 20

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad(set_to_none=i % 2 == 0)
        for part in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.model(batch(3 * i + part)).float().square().mean() / 3
            bad = i in self.BAD and part == 1
            self.scaler.scale(loss * math.inf if bad else loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        taken = [flow.optimizer.step for flow in flows["model"] if flow.optimizer]
        want: list[int | None] = []
        number = 0
        for i in range(self.steps):
            want += [None] * 3 if i in self.BAD else [number] * 3
            number += i not in self.BAD
        assert taken == want


@loop
class PureBfloat16(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.model = small().to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, i: int) -> Tensor:
        return self.model(batch(i).bfloat16()).float().square().mean()


@loop
class PureFloat16(PureBfloat16):
    def __init__(self) -> None:
        super().__init__()
        self.model = small().half()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def loss(self, i: int) -> Tensor:
        return self.model(batch(i).half()).float().square().mean()


@loop
class Doubles(PureBfloat16):
    def __init__(self) -> None:
        super().__init__()
        self.model = small().double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, amsgrad=True)

    def loss(self, i: int) -> Tensor:
        return self.model(batch(i).double()).square().mean()


@loop
class MasterWeights(Loop):
    """bfloat16 for the model, float32 copies for the optimizer, as trainers without autocast do it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small(0.0).bfloat16()
        self.master = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.master, lr=1e-2)

    def step(self, i: int) -> Any:
        loss = self.model(batch(i).bfloat16()).float().square().mean()
        loss.backward()
        for own, parameter in zip(self.master, self.model.parameters(), strict=True):
            own.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for own, parameter in zip(self.master, self.model.parameters(), strict=True):
                parameter.copy_(own)
        return loss


class Rounded(torch.autograd.Function):
    """Eight-bit matmul: inputs and weights are rounded to one float8 with a scale each, gradients to the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = rounded(grads[0], torch.float8_e5m2)
        return gradient @ rounded(weight, torch.float8_e4m3fn), gradient.t() @ rounded(x, torch.float8_e4m3fn)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Through float8 and back, scaled to its range."""
    scale = torch.finfo(dtype).max / value.abs().max().clamp(min=1e-12)
    return (value * scale).to(dtype).to(value.dtype) / scale


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


@loop
class Float8(Simple):
    """As torchao's float8 training: matmuls in float8, master weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Float8Linear(6, 8), nn.GELU(), Float8Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)


class Eight(torch.Tensor):
    """A weight held as int8 with a scale a row, that is a float32 tensor to all who use it (as torchao's are)."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Eight:  # noqa: PYI034
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_8, self.scale = data, scale

    @classmethod
    def of(cls, value: Tensor, noise: bool = False) -> Eight:
        """Rounded; ``noise``: up or down by chance, so that small updates count."""
        scale = value.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        at = value / scale
        at = (at + torch.rand_like(at)).floor() if noise else at.round()
        return cls(at.clamp(-128, 127).to(torch.int8), scale)

    def plain(self) -> Tensor:
        """As float32."""
        return self.data_8.float() * self.scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].data_8, args[0].scale)
        if func in (aten.copy_.default, aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.addcdiv_.default):
            own = args[0]
            rest = [a.plain() if isinstance(a, cls) else a for a in args[1:]]
            new = rest[0] if func is aten.copy_.default else func(own.plain(), *rest, **kwargs)
            made = cls.of(new, noise=func is not aten.copy_.default)
            own.data_8.copy_(made.data_8)
            own.scale.copy_(made.scale)
            return own
        if func is aten.clone.default:
            return cls(args[0].data_8.clone(), args[0].scale.clone())
        plain = torch.utils._pytree.tree_map(lambda a: a.plain() if isinstance(a, cls) else a, (args, kwargs))
        return func(*plain[0], **plain[1])


class EightLinear(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Eight.of(torch.randn(outside, inside) / math.sqrt(inside)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@loop
class EightBitWeights(Simple):
    """A tensor subclass as parameter, updated with random rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(EightLinear(6, 8), nn.Tanh(), EightLinear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, foreach=False)
