"""A second wave: bugs that are easy to make and hard to see, and healthy nets that look ill."""

# ruff: noqa: PLC3002  # traps in one line

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.hard1 import Reverse
from tests.faults_heldout.nets import GPT, image, lm, tokens
from tests.faults_heldout.program import Case, fault, healthy
from tests.faults_heldout.seeded1 import ce, sq
from tests.faults_heldout.traps1 import K, bad, pad, trap


@fault(
    "symmetry",
    "symmetry",
    r"\d.*",
    lambda g: bool((g.grads["0.weight"] - g.grads["0.weight"][:1]).abs().max() < 1e-9) and g.norm("0.weight") > 1e-4,
)
def constant_init_one_output() -> Case:
    m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    y = torch.randn(16, 1)
    return Case(m, (torch.randn(16, 8),), lambda o: F.mse_loss(o, y))


@fault("zero", "zero", r".*mul.*", lambda g: g.norm("a.weight") == 0)
def gate_buffer_of_zeros() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("gate", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.gate)

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


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
trap("abs_power", lambda h: pad(h).abs() ** 0.3, "/pow", "backward")
trap("acos_of_ratio", lambda h: torch.acos((h / h.detach()).clamp(1, 1) * (h / h.detach())), "/acos", "backward")
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
    "backward",
)
trap(
    "tan_at_pole_half",
    lambda h: (1 / torch.cos(h.half() * 0 + 1.5708).float().round()) + h,
    "/(true)?div|/reciprocal|/rdiv|/rtruediv",
)
trap("xlogy_by_hand_zero_target", lambda h: (lambda t: t * (t / t.softmax(-1)).log())(F.relu(h)), "/log /mul.*")
trap("gru_like_exponential_gate", lambda h: torch.exp(torch.exp(h.abs() + 5)), rf"/exp{K}")


@fault("backward", "nonfinite", r".*pow.* p", bad, "trap")
def gem_pooling_negative() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.p, self.out = nn.Conv2d(3, 8, 3), nn.Parameter(torch.tensor(3.0)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.conv(x) ** self.p).mean((2, 3)))

    return Case(M(), (image(4),), ce(4, 3))


@fault("input", "nonfinite", r"input:.* a a.weight outside.*", bad, "trap")
def masked_row_holds_inf() -> Case:
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
    return Case(M(), (x, keep), sq)


@fault("parameter", "nonfinite", r"emb.*", bad, "trap")
def nan_embedding_row() -> Case:
    m = GPT(2)
    with torch.no_grad():
        m.emb.weight[7] = float("nan")
    i = tokens()
    i[0, 3] = 7
    return Case(m, (i,), lm())


@fault("parameter", "nonfinite", r"teacher.*", bad, "trap")
def teacher_is_nan() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 3).requires_grad_(False), nn.Linear(8, 3)
            self.teacher.weight[0, 0] = float("nan")

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                t = self.teacher(x).softmax(-1)
            return F.kl_div(self.student(x).log_softmax(-1), t, reduction="batchmean")

    return Case(M(), (torch.randn(8, 8),))


@fault("forward", "nonfinite", r".*log.*", bad, "trap")
def teacher_probability_zero() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 3).requires_grad_(False), nn.Linear(8, 3)
            self.teacher.weight.mul_(2000)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                t = self.teacher(x).softmax(-1)
            return (t * (t.log() - self.student(x).log_softmax(-1))).sum()

    return Case(M(), (torch.randn(8, 8),))


@fault("forward", "nonfinite", r"attn.*", bad, "trap")
def attention_all_keys_padded() -> Case:
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
    return Case(M(), (torch.randn(4, 5, 8), padded), ce(4, 3))


# ---- healthy that look ill
@healthy("looks ill")
def nan_input_imputed() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

        def forward(self, x: Tensor) -> Tensor:
            gone = torch.isnan(x)
            return self.net(torch.cat([torch.nan_to_num(x), gone.float()], -1))

    x = torch.randn(32, 8)
    x[torch.rand(32, 8) < 0.1] = float("nan")
    return Case(M(), (x,), ce(32, 2))


@healthy("looks ill")
def additive_mask_argument() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out((self.q(x) @ self.k(x).transpose(1, 2) / 4 + mask).softmax(-1) @ self.v(x))

    mask = torch.zeros(4, 6, 6).masked_fill(torch.rand(4, 6, 6) < 0.3, float("-inf"))
    mask[:, :, 0] = 0
    return Case(M(), (torch.randn(4, 6, 16), mask), sq)


@healthy("looks ill")
def observer_buffers_start_at_inf() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("low", torch.tensor(float("inf")))
            self.register_buffer("best", torch.tensor(float("-inf")))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def distance_inf_kernel_zero() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, d: Tensor) -> Tensor:
            return self.b(torch.exp(-d) @ F.relu(self.a(x)))

    d = torch.rand(16, 16)
    d[torch.rand(16, 16) < 0.5] = float("inf")
    d.fill_diagonal_(0)
    return Case(M(), (torch.randn(16, 8), d), ce(16, 3))


@healthy("looks ill")
def domain_reversal() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.y, self.d = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.f(x)
            return self.y(h), self.d(Reverse.apply(h, 0.3))

    y, d = torch.randint(0, 3, (16,)), torch.randint(0, 2, (16,))
    return Case(M(), (torch.randn(16, 8),), lambda o: F.cross_entropy(o[0], y) + F.cross_entropy(o[1], d))


@healthy("looks ill")
def gradient_penalty_inside() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            t = torch.rand(len(a), 1)
            m = (t * a + (1 - t) * b).requires_grad_()
            (g,) = torch.autograd.grad(self.d(m).sum(), m, create_graph=True)
            return self.d(a).mean() - self.d(b).mean() + 10 * (g.norm(dim=-1) - 1).pow(2).mean()

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 8)))


@healthy("looks ill")
def accuracy_and_logs_in_forward() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.a(x))
            self.active = (h > 0).float().mean().item()
            o = self.b(h)
            self.last = o.detach()
            return F.cross_entropy(o, y), (o.argmax(-1) == y).float().mean()

    return Case(M(), (torch.randn(16, 8), torch.randint(0, 3, (16,))), lambda o: o[0])


@healthy("looks ill")
def guidance_drops_the_condition() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cond, self.a, self.b = nn.Linear(4, 16), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, c: Tensor, keep: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x) + self.cond(c) * keep))

    return Case(M(), (torch.randn(4, 8), torch.randn(4, 4), torch.zeros(4, 1)), sq)


@healthy("looks ill")
def stochastic_depth_drops_block() -> Case:
    class B(nn.Module):
        def __init__(self, keep: float) -> None:
            super().__init__()
            self.a, self.b, self.keep = nn.Linear(16, 32), nn.Linear(32, 16), keep

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.bernoulli(torch.full((len(x), 1), self.keep))
            return x + self.b(F.gelu(self.a(x))) * keep

    return Case(
        nn.Sequential(nn.Linear(8, 16), B(1.0), B(0.0), B(1.0), nn.Linear(16, 3)), (torch.randn(8, 8),), ce(8, 3)
    )
