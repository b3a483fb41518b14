"""Ways to NaN in formulas written by hand, in parameters and in the input."""

# ruff: noqa: PLC3002  # traps in one line

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, K, bad, ce, image, lm, pad, sq, tokens, trap


# ---- traps
def masked_tail(h: Tensor) -> Tensor:
    return h.masked_fill(torch.arange(6) > 3, float("-inf"))


trap("hand_softplus_where", lambda h: torch.where(h > 20, h, torch.log1p(torch.exp(h * 300))), "/exp")
trap(
    "minus_inf_minus_itself",
    lambda h: (lambda s: s - s.amax(-1, keepdim=True))(
        h.masked_fill(torch.arange(h.shape[0])[:, None] == 1, float("-inf"))
    ),
    "/sub",
)
trap("minus_inf_times_zero", lambda h: masked_tail(h) * (torch.arange(6) <= 3), "/mul")
trap("matrix_exp_overflow", lambda h: h @ torch.matrix_exp(h.t() @ h * 4e3), ".*matrix_exp")
trap(
    "hadamard_overflow_half",
    lambda h: ((h.half() * 0 - 60000) + (h.half() * 0 - 60000)).softmax(-1).float() + h,
    "/add.* /softmax /sub.*",
)
trap("abs_power", lambda h: pad(h).abs() ** 0.3, "/pow")
trap("acos_of_ratio", lambda h: torch.acos((h / h.detach()).clamp(1, 1) * (h / h.detach())), "/acos")
trap("two_origins", lambda h: torch.cat([torch.log(F.relu(h)), torch.sqrt(pad(h).abs() * 0)], -1), "/log /sqrt")
trap("norm_by_max_of_nothing", lambda h: h / F.relu(h - 1e4).amax(-1, keepdim=True), "/(true)?div")
trap("cumprod_log_ratio", lambda h: torch.cumprod(torch.sigmoid(h) * 0, -1).log(), "/log")
trap(
    "logsumexp_pool_empty",
    lambda h: (
        torch.logsumexp(
            h + torch.zeros(len(h), 1).index_fill_(0, torch.tensor([2]), float("-inf")), -1, keepdim=True
        ).exp()
        + h
    ),
    "/logsumexp",
)
trap(
    "tan_at_pole_half",
    lambda h: (1 / torch.cos(h.half() * 0 + 1.5708).float().round()) + h,
    "/(true)?div|/reciprocal|/rdiv|/rtruediv",
)
trap("xlogy_by_hand_zero_target", lambda h: (lambda t: t * (t / t.softmax(-1)).log())(F.relu(h)), "/log /mul.*")
trap("gru_like_exponential_gate", lambda h: torch.exp(torch.exp(h.abs() + 5)), rf"/exp{K}")


@fault("nonfinite", r".*pow.* p", bad)
def gem_pooling_negative() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.p, self.out = nn.Conv2d(3, 8, 3), nn.Parameter(torch.tensor(3.0)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.conv(x) ** self.p).mean((2, 3)))

    return Built(M(), (image(4),), ce(4, 3))


@fault("nonfinite", r"input:.* a a.weight outside.*", bad)
def masked_row_holds_inf() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            y = self.b(torch.tanh(self.a(x)))
            return y.masked_fill(~keep[:, None], 0.0)

    x = torch.randn(6, 8)
    x[2] = float("inf")
    keep = torch.ones(6, dtype=torch.bool)
    keep[2] = False
    return Built(M(), (x, keep), sq)


@fault("nonfinite", r"emb.*", bad)
def nan_embedding_row() -> Built:
    m = GPT(2)
    with torch.no_grad():
        m.emb.weight[7] = float("nan")
    i = tokens()
    i[0, 3] = 7
    return Built(m, (i,), lm())


@fault("nonfinite", r"teacher.*", bad)
def teacher_is_nan() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 3).requires_grad_(False), nn.Linear(8, 3)
            self.teacher.weight[0, 0] = float("nan")

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                t = self.teacher(x).softmax(-1)
            return F.kl_div(self.student(x).log_softmax(-1), t, reduction="batchmean")

    return Built(M(), (torch.randn(8, 8),))


@fault("nonfinite", r".*log.*", bad)
def teacher_probability_zero() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 3).requires_grad_(False), nn.Linear(8, 3)
            self.teacher.weight.mul_(2000)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                t = self.teacher(x).softmax(-1)
            return (t * (t.log() - self.student(x).log_softmax(-1))).sum()

    return Built(M(), (torch.randn(8, 8),))


@fault("nonfinite", r"attn.*", bad)
def attention_all_keys_padded() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.attn, self.out = (
                nn.Linear(8, 16),
                nn.MultiheadAttention(16, 2, batch_first=True),
                nn.Linear(16, 3),
            )

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            h = self.inp(x)
            return self.out(self.attn(h, h, h, key_padding_mask=padded)[0].mean(1))

    padded = torch.zeros(4, 5, dtype=torch.bool)
    padded[1] = True
    return Built(M(), (torch.randn(4, 5, 8), padded), ce(4, 3))


@fault("nonfinite", r"fix(#\d+)? fix/.*(#\d+)? /.*", bad)
def deq_diverges() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject = nn.Linear(5, 8)
            self.fix = nn.Linear(8, 8)
            nn.init.orthogonal_(self.fix.weight, 4.0)

        def forward(self, x: Tensor) -> Tensor:
            u = self.inject(x)
            z = torch.zeros_like(u)
            for _ in range(90):
                z = self.fix(z) + u
            return z

    return Built(M(), (torch.randn(4, 5),), lambda o: o.mean())


@fault("nonfinite", r"lin.*", bad)
def weight_norm_zero_row() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            lin = nn.Linear(6, 4)
            with torch.no_grad():
                lin.weight[1] = 0
            self.lin = nn.utils.parametrizations.weight_norm(lin)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.tanh(self.first(x)))

    return Built(M(), (torch.randn(4, 5),), lambda o: o.pow(2).mean())


@fault("nonfinite", r"lin.*", bad)
def spectral_norm_of_zero() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            lin = nn.Linear(6, 4)
            nn.init.zeros_(lin.weight)
            self.lin = nn.utils.parametrizations.spectral_norm(lin)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.tanh(self.first(x)))

    return Built(M(), (torch.randn(4, 5),), lambda o: o.pow(2).mean())
