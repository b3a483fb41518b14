"""Ways to NaN: each a small net around one operation."""

# ruff: noqa: PLW0108, PLC3002  # traps in one line

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import K, bad, pad, trap


def slerp(h: Tensor) -> Tensor:
    n = F.normalize(h, dim=-1)
    omega = torch.acos((n * n.detach()).sum(-1, keepdim=True).clamp(1, 1))
    return torch.sin(0.3 * omega) / torch.sin(omega) * n


def selfloop(h: Tensor) -> Tensor:
    d2 = ((h[:, None] - h[None]) ** 2).sum(-1)
    return torch.where(d2 > 0, torch.sqrt(d2), torch.zeros(())) @ h


def one_hot_attention(h: Tensor) -> Tensor:
    scores = h @ h.t()
    mask = torch.ones_like(scores, dtype=torch.bool)
    mask[1] = False
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ h


def masked_mean(h: Tensor) -> Tensor:
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]).expand(h.shape[0], 6).clone()
    mask[2] = 0
    mean = (h * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return torch.where(mask.sum(-1, keepdim=True) > 0, mean, torch.zeros(())) + h


def crf(h: Tensor) -> Tensor:
    emit = h.clone()
    alpha = emit + torch.full((6,), float("-inf"))
    return torch.logsumexp(alpha, -1, keepdim=True) + h


def policy(h: Tensor) -> Tensor:
    allowed = torch.ones(h.shape)
    allowed[3] = 0
    return F.log_softmax(h + allowed.log(), -1)


def sinkhorn(h: Tensor) -> Tensor:
    p = F.relu(pad(h))
    for _ in range(3):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(0, keepdim=True)
    return p


def gram_eig(h: Tensor) -> Tensor:
    _, vectors = torch.linalg.eigh((h * 0).t() @ h + torch.eye(6))
    return h @ vectors


def degenerate_svd(h: Tensor) -> Tensor:
    u, _, _ = torch.linalg.svd(h[:3, :3] * 0 + torch.eye(3))
    return h[:3, :3] @ u


def scan(h: Tensor) -> Tensor:
    state = torch.ones_like(h)
    for _ in range(60):
        state = state * torch.exp(h.abs() + 3)
    return state


def bernoulli_entropy(h: Tensor) -> Tensor:
    p = torch.sigmoid(h * 400 + 300)
    return p * torch.log(p) + (1 - p) * torch.log(1 - p)


def stddev_channel(h: Tensor) -> Tensor:
    spread = h.var(0, unbiased=False).sqrt().mean()
    return torch.cat([h, spread.expand(h.shape[0], 1)], 1)


def half_norm(h: Tensor) -> Tensor:
    x = pad(h).half()
    return (x / (x.abs().amax(-1, keepdim=True) + 1e-8)).float()


def spectrum(h: Tensor) -> Tensor:
    return torch.log(torch.fft.rfft(pad(h)).abs())


def attention_entropy(h: Tensor) -> Tensor:
    p = h.masked_fill(torch.arange(6) > 3, float("-inf")).softmax(-1)
    return -(p * p.log()).sum(-1, keepdim=True) + h


class Bad(torch.autograd.Function):
    """A hand-written backward that divides by its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * y / y


trap(
    "siamese_same_pair",
    lambda h: torch.sqrt(((h - h.flip(0).flip(0)) ** 2).sum(-1, keepdim=True)) + h,
    "/sqrt",
)
trap("minibatch_stddev_one", stddev_channel, "/sqrt", rows=1)
trap("rmsnorm_no_eps", lambda h: (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))(pad(h)), "/rsqrt")
trap("log_of_hard_softmax", lambda h: (h * 4000).softmax(-1).log(), "/log")
trap("entropy_of_masked", attention_entropy, "/log")
trap("kl_exp_overflow", lambda h: torch.exp(h * 0 + 100 + h), "/exp")
trap("softplus_by_hand", lambda h: torch.log(1 + torch.exp(100 * h.abs() + 90)), "/exp")
trap("atanh_of_tanh", lambda h: torch.atanh(torch.tanh(h.abs() * 50 + 30)), "/atanh")
trap("slerp_equal", slerp, "/(true)?div")
trap("self_loop_where", selfloop, "/sqrt")
trap("padded_query_row", one_hot_attention, "/softmax")
trap("empty_group_mean", masked_mean, "/(true)?div")
trap("crf_impossible", crf, "/logsumexp")
trap("policy_no_action", policy, "/log_softmax")
trap("std_of_one", lambda h: (h - h.mean(0)) / (h.std(0) + 1e-5), "/std", rows=1)
trap("var_mean_of_one", lambda h: h / torch.var_mean(h, 0)[0], "/var_mean", rows=1)
trap("sinkhorn_zero_row", sinkhorn, "/(true)?div")
trap("eigh_identity", gram_eig, r".*eigh")
trap("svd_identity", degenerate_svd, r".*svd")
trap("ssm_unstable", scan, rf"/mul{K}")
trap("bernoulli_entropy", bernoulli_entropy, rf"/log{K}")
trap("half_eps_flushed", half_norm, "/(true)?div")
trap("half_square", lambda h: ((h.half() * 400 + 300) ** 2).float(), "/pow")
trap("log_spectrum_silence", spectrum, "/log")
trap("squashed_gaussian", lambda h: torch.log(1 - torch.tanh(h * 60 + 40) ** 2) + h, "/log")
trap("erfinv_edge", lambda h: torch.erfinv((h * 50).clamp(-1, 1)), "/erfinv")
trap("logit_edge", lambda h: torch.logit(torch.sigmoid(h * 500)), "/logit")
trap("lgamma_zero", lambda h: torch.lgamma(F.relu(h)), "/lgamma")
trap(
    "inverse_square",
    lambda h: (1 / (h * 1e-15) ** 2) * 1e-30,
    r"/(true)?div|/reciprocal|/rsub|/rdiv|/rtruediv|/pow",
)
trap(
    "cosine_by_hand",
    lambda h: (
        (lambda a: (a * h).sum(-1, keepdim=True) / (a.norm(dim=-1, keepdim=True) * h.norm(dim=-1, keepdim=True)))(
            pad(h)
        )
        + h
    ),
    "/(true)?div",
)
trap("custom_backward", lambda h: Bad.apply(h), r".*Bad.*|.*apply.*")
trap("group_norm_eps0", lambda h: F.group_norm(h[..., None] * 0 + 1, 2, eps=0.0)[..., 0] + h, "/group_norm")
trap("direction_of_zero", lambda h: pad(h) / pad(h).norm(dim=-1, keepdim=True), "/(true)?div")
trap(
    "dice_empty",
    lambda h: 2 * F.relu(h - 1e3).sum(-1, keepdim=True) / (F.relu(h - 1e3).sum(-1, keepdim=True) + torch.zeros(1)) + h,
    "/(true)?div",
)
trap("nerf_log_alpha", lambda h: torch.cumsum(torch.log(1 - torch.sigmoid(h * 300).round() * 1.0 + h * 0), -1), "/log")
trap("softmax_temperature_zero", lambda h: torch.softmax(h / (h.detach() * 0), -1), "/(true)?div")
trap(
    "sqrt_negative",
    lambda h: torch.sqrt(h.pow(2).mean(-1, keepdim=True) - h.abs().amax(-1, keepdim=True) ** 2),
    "/sqrt",
)
trap("fmod_zero", lambda h: torch.fmod(h, torch.zeros(1)), "/fmod|/remainder")


@fault("nonfinite", "net.2.weight net.2", bad)
def corrupt_checkpoint() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    m = M()
    with torch.no_grad():
        m.net[2].weight[3, 1] = float("nan")
    return Built(m, (torch.randn(4, 5),), lambda o: o.pow(2).mean())


@fault("nonfinite", "rnn.weight_hh_l0 rnn rnn.*", bad)
def inf_recurrent_weight() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 6)
            self.rnn = nn.RNN(6, 8, batch_first=True, nonlinearity="relu")
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(self.emb(x))[0])

    m = M()
    with torch.no_grad():
        m.rnn.weight_hh_l0[0, 0] = float("inf")
    return Built(m, (torch.randint(0, 10, (3, 7)),), lambda o: o.pow(2).mean())


@fault("nonfinite", "1 1.running_var", bad)
def nan_running_var() -> Built:
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).eval()
    x = torch.randn(2, 3, 8, 8)
    m(x)
    m[1].running_var[2] = float("nan")
    return Built(m, (x,), lambda o: o.pow(2).mean())


@fault("nonfinite", "input:.* outside.*", bad)
def missing_value_in_table() -> Built:
    x = torch.randn(16, 7)
    x[3, 2] = float("nan")
    return Built(nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1)), (x,), lambda o: o.pow(2).mean())


@fault("nonfinite", "input:.* outside.*", bad)
def inf_pixel() -> Built:
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 0, 0] = float("inf")
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return Built(m, (x,), lambda o: o.pow(2).mean())


@fault("nonfinite loss_seed", "outside.*", bad)
def nan_target() -> Built:
    y = torch.randn(8, 2)
    y[1, 0] = float("nan")
    return Built(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), (torch.randn(8, 4),), lambda o: F.mse_loss(o, y)
    )


@fault("nonfinite loss_seed", "outside.*", bad)
def loss_over_no_tokens() -> Built:
    mask = torch.zeros(8)
    return Built(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        (torch.randn(8, 4),),
        lambda o: (o.pow(2).sum(-1) * mask).sum() / mask.sum(),
    )


@fault("nonfinite loss_seed zero", "outside.*", bad)
def all_labels_ignored() -> Built:
    y = torch.full((8,), -100)
    return Built(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        (torch.randn(8, 4),),
        lambda o: F.cross_entropy(o, y),
    )


@fault("nonfinite loss_seed", "outside.*", bad)
def ctc_too_short() -> Built:
    def loss(o: Tensor) -> Tensor:
        return F.ctc_loss(
            o.log_softmax(-1).transpose(0, 1),
            torch.ones(2, 9, dtype=torch.long),
            torch.tensor([6, 6]),
            torch.tensor([9, 9]),
        )

    return Built(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)), (torch.randn(2, 6, 4),), loss)


@fault("nonfinite loss_seed", "outside.*", bad)
def sqrt_of_perfect_loss() -> Built:
    m = nn.Linear(4, 1)
    x = torch.randn(8, 4)
    y = m(x).detach()
    return Built(m, (x,), lambda o: torch.sqrt(((o - y) ** 2).mean()))
