"""Traps for NaN and Inf: one operation between a linear and a head turns finite numbers into others.

The guilty operation is proved by replaying each call on its own, see ``replay.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.faults.program import Built, Register

TRAPS = Register("traps")


class Trap(nn.Module):
    """``head(op(lin(x)))``: without bias, so that a row of zeros stays one."""

    def __init__(self, op: Callable[[Tensor], Tensor], out: int) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.op = op
        self.head = nn.Linear(out, 1) if out else nn.Identity()

    def forward(self, x):
        return self.head(self.op(self.lin(x)))


def zero_row() -> Tensor:
    """Five samples, one of them all zeros (padding, a silent microphone, an empty graph)."""
    x = torch.randn(5, 4)
    x[1] = 0.0
    return x


def plain() -> Tensor:
    """Five ordinary samples."""
    return torch.randn(5, 4)


def one() -> Tensor:
    """A last batch of one sample."""
    return torch.randn(1, 4)


def trap(*culprits: str, x: Callable[[], Tensor] = zero_row, out: int = 0, steps: int = 3):
    """Registers the decorated op as a trap; ``out``: width of what it returns, for a head behind it."""

    def decorate(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def make() -> Built:
            return Built(Trap(op, out), (x(),), lambda y: y.float().mean(), steps=steps)

        TRAPS.add(op.__name__, make, ["nonfinite"], culprits=culprits)
        return op

    return decorate


# ---- the forward is finite, or is made finite again -------------------------------------------------------------


@trap("sqrt")
def sqrt_of_summed_squares(h):
    return (h * h).sum(-1).sqrt()


@trap("sqrt")
def sqrt_of_abs(h):
    return h.abs().sqrt()


@trap("sqrt")
def clamp_after_sqrt(h):
    return torch.sqrt(h.square()).clamp(min=1e-6)


@trap("sqrt")
def sqrt_of_var_of_constant_row(h):
    return torch.sqrt(h.var(dim=-1))


@trap("sqrt", x=plain)
def pairwise_distance_with_itself(h):
    return (h[:, None] - h[None]).pow(2).sum(-1).sqrt()


@trap("pow", out=4)
def power_of_a_half_at_zero(h):
    return h.abs() ** 0.5


@trap("pow")
def where_around_power(h):
    return torch.where(h > 0, h.abs().pow(0.5), torch.zeros_like(h))


@trap("log")
def where_around_log(h):
    return torch.where(h > 0, h.log(), 0.0)


@trap("acos", x=plain)
def angle_of_a_vector_with_itself(h):
    # clamped as one is told to, which does not keep the slope of acos finite
    return torch.acos(F.cosine_similarity(h, h, dim=-1).clamp(-1, 1) * 0 + 1.0 + (h * 0).sum(-1))


@trap("hypot")
def hypot_of_zeros(h):
    return torch.hypot(h[:, :2], h[:, 2:])


@trap("exp", x=plain)
def tanh_of_exp(h):
    return torch.tanh(torch.exp(h + 100))


@trap("div")
def nan_to_num_behind_zero_by_zero(h):
    return torch.nan_to_num(h / h.abs().sum(-1, keepdim=True))


@trap("div")
def where_around_division(h):
    total = h.abs().sum(-1, keepdim=True)
    return torch.where(total > 0, h / total, 0.0)


@trap("log")
def nan_to_num_behind_log(h):
    return torch.nan_to_num(torch.log(h * h) * -0.3, nan=0.0, posinf=0.0, neginf=0.0)


@trap("asin", x=plain)
def asin_at_its_end(h):
    return torch.asin(1.0 - (h * 0).clamp(-1, 1))


@trap("acos", x=plain)
def rotation_angle_at_identity(h):
    trace = 3.0 + (h * 0).sum(-1)
    return torch.acos((trace - 1) / 2)


@trap("pow", out=1)
def geometric_mean(h):
    return h.abs().prod(-1, keepdim=True).pow(1 / 4)


@trap("pow", x=plain)
def focal_weight_at_certainty(h):
    p = torch.sigmoid(h * 1e3)
    return (1 - p) ** 0.5 * p


@trap("mul", x=lambda: torch.randn(5, 4) * 1e-32)
def backward_overflow(h):
    return (h * 1e30).div(1e-30)


@trap("svd", x=plain, steps=1)  # the next step raises
def svd_of_equal_singular_values(h):
    left, values, _ = torch.linalg.svd(torch.eye(4) * 2 + (h * 0).sum())
    return left.sum() + values.sum()


@trap("eigh", x=plain, steps=1)
def eigh_of_equal_eigenvalues(h):
    _, vectors = torch.linalg.eigh(torch.eye(4) + torch.diag(h[0] * 0))
    return (vectors * torch.arange(16.0).view(4, 4)).sum()


@trap("logsumexp", x=plain)
def logsumexp_over_nothing(h):
    closed = torch.zeros(5, 1)
    closed[2] = -math.inf
    return torch.logsumexp(h + closed, dim=-1)[:2]


@trap("logaddexp", x=plain)
def logaddexp_of_unreachable_states(h):
    closed = torch.tensor([0.0, 0.0, -math.inf, 0.0])
    return torch.logaddexp(h + closed, h.flip(0) + closed)[:, :2]


@trap("xlogy")
def xlogy_with_a_learned_zero(h):
    return torch.special.xlogy(h.abs() + 1, h.abs())


# ---- the forward shows it ---------------------------------------------------------------------------------------


@trap("log")
def log_of_zero(h):
    return h.abs().log()


@trap("mul")
def zero_times_infinity(h):
    return h * math.inf


@trap("log")
def x_log_x_at_zero(h):
    p = h.abs()
    return -(p * p.log()).sum(-1)


@trap("std", x=one)
def std_of_one_sample(h):
    return h.std(dim=0)


@trap("var", x=one, out=4)
def var_of_one_sample(h):
    return h / (torch.var(h, dim=0) + 1e-5)


@trap("pow", x=plain)
def power_of_a_negative(h):
    return h.pow(1.5)


@trap("div", x=plain)
def masked_mean_of_nothing(h):
    mask = torch.ones(5, 4)
    mask[3] = 0.0
    return (h * mask).sum(-1) / mask.sum(-1)


@trap("log", x=plain)
def log_of_sigmoid(h):
    return torch.log(torch.sigmoid(h - 200))


@trap("exp", x=plain)
def softplus_by_hand(h):
    return torch.log(1 + torch.exp(h + 100))


@trap("softmax", x=plain, out=4)
def softmax_over_nothing(h):
    mask = torch.zeros(5, 4, dtype=torch.bool)
    mask[2] = True
    return h.masked_fill(mask, -math.inf).softmax(dim=-1) * h


@trap("layer_norm", out=4)
def layer_norm_without_eps(h):
    return F.layer_norm(h, (4,), eps=0.0)


@trap("div", x=plain)
def eps_too_small_for_half(h):
    half = h.half()
    return half / (half * 0 + 1e-8)


@trap("div", x=plain)
def mask_behind_one_by_zero(h):
    total = h.relu().sum(-1) * torch.tensor([1.0, 0, 1, 1, 1])
    return (1 / total) * torch.tensor([1.0, 0, 1, 1, 1])


@trap("atanh", x=plain)
def atanh_at_one(h):
    return torch.atanh(torch.tanh(h * 1e3))


@trap("log1p", x=plain)
def log1p_of_minus_one(h):
    return torch.log1p(-torch.sigmoid(h * 1e3))


@trap("logdet", x=plain)
def logdet_of_a_singular_matrix(h):
    return torch.logdet(h.T[:1].T @ h[:, 0][None] * 0)


@trap("rsqrt", out=4)
def rms_norm_without_eps(h):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True))


@trap("reciprocal")
def reciprocal_of_zero(h):
    return h.norm(dim=-1).reciprocal()


@trap("div", out=4)
def standardised_constant_row(h):
    return (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)


@trap("exp", x=plain)
def softmax_by_hand(h):
    weights = torch.exp(h * 10 + 200)
    return weights / weights.sum(-1, keepdim=True)


@trap("log", x=plain)
def log_of_saturated_softmax(h):
    return torch.log(torch.softmax(h * 1e3, dim=-1))


@trap("log", x=plain)
def binary_cross_entropy_by_hand(h):
    p = torch.sigmoid(h * 1e3)
    return -(0.3 * torch.log(p) + 0.7 * torch.log(1 - p))


@trap("log", x=plain)
def entropy_of_a_certain_choice(h):
    p = F.softmax(h * 1e3, dim=-1)
    return -(p * p.log()).sum(-1)


@trap("exp", x=plain)
def half_precision_exp(h):
    return torch.exp(h.half() + 15)


@trap("square", x=plain)
def half_precision_square(h):
    return (h.half() * 1000).square().sum(-1)


@trap("erfinv", x=plain)
def erfinv_at_one(h):
    return torch.erfinv((h * 100).clamp(-1, 1))


@trap("logit", x=plain)
def logit_without_eps(h):
    return torch.logit((h * 100).clamp(0, 1))


@trap("exp", x=plain)
def variance_from_log_variance(h):
    mean, log_variance = h.chunk(2, dim=-1)
    return mean + torch.exp(0.5 * (log_variance + 400)) * torch.ones_like(mean)


@trap("div")
def largest_entry_of_nothing(h):
    return h / h.amax(dim=-1, keepdim=True)


@trap("div", x=plain)
def intersection_over_union_of_nothing(h):
    boxes = torch.relu(h) * torch.tensor([[1.0], [0], [1], [1], [1]])
    both, either = boxes[:, 0] * boxes[:, 1], boxes.sum(-1)
    return both / either


@trap("cosh", x=plain)
def log_cosh_by_hand(h):
    return torch.log(torch.cosh(h * 10 + 300))


@trap("normalize", "div")
def normalize_without_eps(h):
    return F.normalize(h, dim=-1, eps=0.0)


@trap("gumbel_softmax", "div", x=plain)
def gumbel_softmax_without_temperature(h):
    return F.gumbel_softmax(h, tau=0.0)


@trap("log", x=plain)
def complex_log_of_zero(h):
    return torch.log(torch.complex(h * 0, h * 0)).real
