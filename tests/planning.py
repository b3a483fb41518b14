"""The same steps of one model with and without a probe plan, and the comparison of what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxgrad
from tests.runs import plain_run

EXACT = ("numel", "max_abs", "min_abs_nonzero", "nan_count", "inf_count", "zero_count", "flush_count",
         "subnormal_count", "overflow_count")  # fmt: skip


def watched_flow(
    model: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Tensor], *, plans: bool, steps: int = 4,
    **options: Any,
) -> fxgrad.GradientFlow:  # fmt: skip
    """The flow of the last of ``steps`` steps at ``full``."""
    with fxgrad.watch(model, statistics="full", **options) as watch:
        watch.engine.may_plan = plans
        for step in range(steps):
            plain_run(model, args, kwargs, loss, seed=step)
        return watch.flow()


def assert_same_numbers(planned: fxgrad.GradientFlow, unplanned: fxgrad.GradientFlow) -> None:
    """Counts and extrema exact, norms within 1e-6; the same blind spots."""
    assert [site.id for site in planned] == [site.id for site in unplanned]
    assert planned.blind_spots == unplanned.blind_spots
    assert not any(site.derived_from for site in unplanned)
    for one, two in zip(planned, unplanned, strict=True):
        assert (one.shape, one.dtype, one.measured) == (two.shape, two.dtype, two.measured), one.id
        if one.statistics is not None and two.statistics is not None:
            for name in EXACT:
                assert getattr(one.statistics, name) == getattr(two.statistics, name), (one.id, name)
            assert math.isclose(one.statistics.l2_norm, two.statistics.l2_norm, rel_tol=1e-6), one.id


def derived(flow: fxgrad.GradientFlow) -> dict[str, str]:
    """From which site each derived one is."""
    return {site.id: site.derived_from for site in flow if site.derived_from is not None}


def pair(make: Callable[[], tuple[nn.Module, Any, Any]]) -> list[tuple[nn.Module, Any, Any]]:
    """Two equal models with equal inputs."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made


# ---- models --------------------------------------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


def squares(output: Any) -> Tensor:
    return output.square().sum()


def build(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(3, 4)


class Rearranges(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h.reshape(3, 2, 2).permute(0, 2, 1).contiguous().flatten(1)
        h = h[:, None].squeeze(1).to(torch.float32)
        h = F.dropout(h, 0.5, training=False)
        return self.b(h + torch.tanh(self.a(x)))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]
