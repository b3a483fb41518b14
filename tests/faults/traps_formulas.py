"""Ways to NaN and Inf: formulas in a net made of parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults.parts import INF, Net, bad, blank, ce, trap
from tests.faults.places import fault
from tests.faults.program import Built


def causal_off_by_one(h: Tensor) -> Tensor:
    s = torch.einsum("qd,kd->qk", h, h)
    bias = torch.full_like(s, -INF).triu(0)
    return F.softmax(s + bias, -1) @ h


def linear_attention(h: Tensor) -> Tensor:
    q, k = F.relu(h - 50), F.relu(h)
    return (q @ (k.t() @ h)) / (q @ k.sum(0)).unsqueeze(-1)


def plain_softmax(h: Tensor) -> Tensor:
    e = torch.exp(h * 100 + 100)
    return e / e.sum(-1, keepdim=True)


def l2_clip(h: Tensor) -> Tensor:
    n = blank(h).pow(2).sum(-1, keepdim=True).pow(0.5)
    return blank(h) * torch.minimum(torch.ones(()), 1 / (n + 1e-3))


def instance_std(h: Tensor) -> Tensor:
    y = blank(h)
    return (y - y.mean(-1, keepdim=True)) / y.std(-1, keepdim=True)


def polar(h: Tensor) -> Tensor:
    y = blank(h)
    return torch.cat([y[:, :1].div(y[:, :1].square().add(y[:, 1:2].square()).sqrt()), h], -1)


def angle_loss(h: Tensor) -> Tensor:
    n = F.normalize(h, dim=-1, eps=0.0)
    return torch.arccos((n[:, None] * n[None]).sum(-1))


def soft_count(h: Tensor) -> Tensor:
    picked = (h > 100).float()
    return h * ((h * picked).sum(0) / picked.sum(0))


def geometric(h: Tensor) -> Tensor:
    return F.relu(h).prod(-1, keepdim=True).pow(1 / 8) + h


def running_product(h: Tensor) -> Tensor:
    for _ in range(8):
        h = h * h * 30
    return h


def half_scores(h: Tensor) -> Tensor:
    q = (h * 300).half()
    return (q @ q.t()).float() @ h


def normal_log_prob(h: Tensor) -> Tensor:
    return torch.distributions.Normal(h, F.relu(h - 50), validate_args=False).log_prob(torch.ones(()))


def categorical_entropy(h: Tensor) -> Tensor:
    p = F.softmax(h * 1e4, -1)
    return -(p * p.log())


def cholesky(h: Tensor) -> Tensor:
    return torch.linalg.inv_ex((h * 0) @ (h * 0).t() + 0.0).inverse @ h


def double_where(h: Tensor) -> Tensor:
    return torch.where(h > 0, h.pow(-0.5), torch.zeros_like(h))


def masked_exp(h: Tensor) -> Tensor:
    return torch.where(h < 10, torch.exp(h + torch.linspace(0, 200, 8)), torch.zeros(())).clamp(max=5)


def index_mean(h: Tensor) -> Tensor:
    group = torch.tensor([0, 0, 2, 2, 3, 3])
    total = torch.zeros(4, 8).index_add(0, group, h)
    count = torch.zeros(4).index_add(0, group, torch.ones(6))
    return total / count[:, None]


def tversky(h: Tensor) -> Tensor:
    p, t = F.relu(h - 99), torch.zeros_like(h)
    return h * ((p * t).sum() / (p.sum() + t.sum()))


def sqrt_alpha(h: Tensor) -> Tensor:
    alpha = torch.linspace(1, -0.001, 8)
    return h * torch.sqrt(alpha)


def inverse_sigmoid(h: Tensor) -> Tensor:
    p = torch.hardtanh(h * 40, 0, 1) if hasattr(torch, "hardtanh") else F.hardtanh(h * 40, 0, 1)
    return torch.log(p) - torch.log1p(-p)


trap("causal_mask_hides_the_diagonal_too", "/softmax", causal_off_by_one)
trap("linear_attention_of_silent_queries", "/div", linear_attention)
trap("softmax_by_exp_of_hundreds", "/exp", plain_softmax)
trap("clip_by_power_norm_of_a_blank_row", "/pow.*", l2_clip)
trap("standardised_blank_row", "/div /std", instance_std)
trap("unit_circle_at_the_origin", "/div.*", polar)
trap("angles_between_all_pairs", "/arccos /acos", angle_loss, 24)
trap("mean_of_nothing_picked", "/div", soft_count)
trap("geometric_mean_with_relu", "/pow", geometric)
trap("squares_squared_eight_times", r"/mul(#\d+)?", running_product)
trap("half_precision_scores_overflow", "/matmul", half_scores)
trap("normal_density_of_width_zero", r".*(log_prob|log|div|pow|square).*", normal_log_prob)
trap("entropy_of_hard_probabilities", "/log /mul", categorical_entropy)
trap("inverse_of_a_zero_matrix", "/(linalg_)?inv.*", cholesky)
trap("where_around_a_negative_power", "/pow", double_where)
trap("masked_exponential_overflows", "/exp", masked_exp)
trap("group_three_has_no_members", "/div", index_mean)
trap("tversky_of_empty_sets", "/div", tversky)
trap("schedule_slightly_under_zero", "/sqrt", sqrt_alpha)
trap("logit_of_hard_probability", "/log /log1p", inverse_sigmoid)
trap("reciprocal_in_place", "/reciprocal_?", lambda h: F.relu(h).clone().reciprocal_())
trap("rsqrt_of_squares_of_blank", "/rsqrt", lambda h: blank(h).square().sum(-1, keepdim=True).rsqrt() * h)
trap("log2_of_relu", "/log2", lambda h: torch.log2(F.relu(h)))
trap("float_power_of_negative", r"/(float_)?pow.*", lambda h: torch.pow(h, 0.3))
trap("acosh_below_one", "/acosh", lambda h: torch.acosh(1 + h))
trap("xlogy_negative", "/xlogy", lambda h: torch.xlogy(h, h))
trap("expm1_of_thousands", "/expm1", lambda h: torch.expm1(h * 1000))
trap("cosh_of_thousands", "/cosh", lambda h: torch.cosh(h * 1000))
trap("division_inf_by_inf", "/exp", lambda h: torch.exp(h.abs() * 900).div(torch.exp(h.abs() * 901)))
trap("power_pool_of_a_blank_row", ".*lp_pool.*|/pow.*", lambda h: F.lp_pool1d(blank(h)[None], 0.5, 2)[0])
trap("std_over_axis_of_one", "/std", lambda h: h / h.unsqueeze(0).std(0))
trap(
    "log_of_cosine_distance",
    "/log",
    lambda h: torch.log(1 - F.cosine_similarity(h, h, dim=-1).clamp(max=1))[:, None] + h,
)
trap(
    "sum_of_minus_inf_biases",
    "/sub",
    lambda h: (h + torch.tensor([-INF] * 2 + [0.0] * 6)) - (torch.zeros(8) + torch.tensor([-INF] * 2 + [0.0] * 6)),
)
trap(
    "lse_trick_without_finite_max",
    "/(sub|logsumexp)",
    lambda h: (h + torch.full((8,), -INF)).sub((h + torch.full((8,), -INF)).amax(-1, keepdim=True)).exp(),
)


@fault("nonfinite", r".*(sqrt|checkpoint|pow).*", bad)
def checkpointed_root_of_blank_row() -> Built:
    def inner(h: Tensor) -> Tensor:
        return blank(h).square().sum(-1, keepdim=True).sqrt() * h

    model = Net(lambda m, x: m.c(checkpoint(inner, m.a(x), use_reentrant=False)), a=nn.Linear(5, 8), c=nn.Linear(8, 3))
    return Built(model, (torch.randn(6, 5),), ce(6, 3))


@fault("nonfinite", r".*(up|lin).*|/(linear|mul|square|pow).*", bad)
def half_autocast_square_overflows() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = m.up(x * 100)
            return m.c(h.half().square() * 1000)

    return Built(Net(run, up=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(6, 5) * 100,), ce(6, 3))


@fault("nonfinite", r"/(conv1d|linear).*|w", bad)
def functional_weight_holds_inf() -> Built:
    w = torch.randn(8, 5)
    w[2, 1] = -INF
    return Built(Net(lambda m, x: m.c(F.linear(x, m.w)), w=w, c=nn.Linear(8, 3)), (torch.randn(6, 5),), ce(6, 3))


@fault("nonfinite", r".*b_scale.*|/mul.*", bad)
def buffer_scale_is_nan() -> Built:
    model = Net(
        lambda m, x: m.c(m.a(x) * m.b_scale), a=nn.Linear(5, 8), c=nn.Linear(8, 3), b_scale=torch.tensor(float("nan"))
    )
    return Built(model, (torch.randn(6, 5),), ce(6, 3))


@fault("nonfinite loss_seed", r"outside.*", bad)
def class_never_seen_weighted_by_inverse_count() -> Built:
    y = torch.randint(0, 2, (8,))
    weight = 1 / torch.bincount(y, minlength=3).float()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return Built(model, (torch.randn(8, 5),), lambda o: (o.log_softmax(-1) * weight * F.one_hot(y, 3)).sum())
