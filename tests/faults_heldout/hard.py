"""A second wave: bugs that are easy to make and hard to see, and healthy nets that look ill."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.nets import GPT, Captioner, image, lm, tokens
from tests.faults_heldout.program import Case, fault, healthy
from tests.faults_heldout.seeded import ce, none, sq
from tests.faults_heldout.traps import K, bad, pad, trap


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


@fault("zero", "zero saturated", ".*softmax.*", lambda g: g.norm("score.weight") < 1e-8)
def softmax_over_wrong_axis() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.out = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            w = torch.softmax(self.score(h), dim=-1)
            return self.out((w * h).sum(1))

    return Case(M(), (torch.randn(4, 7, 8),), ce(4, 3))


@fault("zero", "zero vanishing scale_break saturated", ".*norm.*", dull())
def layer_norm_over_one_feature() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 1), nn.LayerNorm(1), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("vanishing", "vanishing scale_break saturated zero", ".*bn.*", dull(1e-3))
def batch_norm_over_two_samples() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.bn(self.a(x))))

    return Case(M(), (torch.randn(2, 8) * 100,), ce(2, 3))


@fault("vanishing", "vanishing scale_break zero saturated", ".*normalize.* .*", dull(1e-5))
def normalize_of_one_dimension() -> Case:
    return Case(Net(lambda h: F.normalize(h, dim=-1), (8, 1, 1, 3)), (torch.randn(16, 8),), ce(16, 3))


@fault("scale_break", "scale_break vanishing", "bn.*", dull(1e-4))
def running_var_broken_in_eval() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.bn(self.a(x))).mean((2, 3)))

    m = M().eval()
    m.bn.running_var.fill_(1e14)
    return Case(m, (image(4),), ce(4, 3))


@fault("dead", "dead zero saturated", r".*gelu.*", lambda g: g.norm("a.weight") < 1e-12)
def gelu_pushed_far_left() -> Case:
    m = Net(F.gelu)
    nn.init.constant_(m.a.bias, -60)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero saturated", r".*silu.*", lambda g: g.norm("a.weight") < 1e-12)
def silu_pushed_far_left() -> Case:
    m = Net(F.silu)
    nn.init.constant_(m.a.bias, -150)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero", r"/(maximum|clamp).*", dull())
def hand_written_relu_dead() -> Case:
    m = Net(lambda h: torch.maximum(h, torch.zeros(())))
    nn.init.constant_(m.a.bias, -30)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero", r"/clamp.*", dull())
def clamp_min_dead() -> Case:
    m = Net(lambda h: h.clamp(min=0))
    nn.init.constant_(m.a.bias, -30)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero", r"/relu_.*", dull())
def in_place_relu_dead() -> Case:
    m = Net(lambda h: F.relu_(h))
    nn.init.constant_(m.a.bias, -30)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero", r"/mul.* /.*", dull())
def relu_as_product_dead() -> Case:
    m = Net(lambda h: h * (h > 0))
    nn.init.constant_(m.a.bias, -30)
    return Case(m, (torch.randn(32, 8),), ce(32, 3))


@fault("zero", "zero dead", r"/where.* /.*", lambda g: g.norm("f.weight") == 0)
def where_never_taken() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.f, self.b = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(torch.where(h > 1.5, self.f(h), h))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("loss", "dead zero loss_seed", r".*relu.* outside.*", lambda g: g.norm("net.weight") == 0)
def hinge_inside_all_satisfied() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.relu(1e-3 - (self.net(a) - self.net(b)).pow(2).sum(-1)).mean()

    return Case(M(), (torch.randn(8, 8), torch.randn(8, 8) + 20))


@fault("vanishing", "vanishing scale_break zero saturated underflow", r"/prod.* .*", dull(1e-6))
def product_of_probabilities() -> Case:
    return Case(
        Net(lambda h: torch.sigmoid(h - 4).prod(-1, keepdim=True), (8, 30, 1, 3)), (torch.randn(16, 8),), ce(16, 3)
    )


@fault("vanishing", "vanishing scale_break zero saturated dead", r"/exp.* .*", dull(1e-6))
def rbf_too_narrow() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(10, 3)
            self.register_buffer("centres", torch.randn(10, 16) * 3)

        def forward(self, x: Tensor) -> Tensor:
            d = (self.a(x)[:, None] - self.centres).pow(2).sum(-1)
            return self.b(torch.exp(-d))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("exploding", "exploding scale_break", r"/.*div.*|/.*", lambda g: g.norm("a.weight") > 1e3)
def standardise_near_constant() -> Case:
    def op(h: Tensor) -> Tensor:
        h = h * 1e-8
        return (h - h.mean(-1, keepdim=True)) / 1e-14

    return Case(Net(op), (torch.randn(16, 8),), lambda o: o.mean())


@fault("saturated", "saturated vanishing", r".*sigmoid.*", dull(1e-2))
def sigmoid_image_with_mse() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 48)
            nn.init.constant_(self.b.bias, 30)

        def forward(self, z: Tensor) -> Tensor:
            return torch.sigmoid(self.b(torch.relu(self.a(z))))

    return Case(M(), (torch.randn(8, 8),), lambda o: F.mse_loss(o, torch.full_like(o, 0.3)))


@fault(
    "saturated",
    "saturated vanishing",
    r"/tanh.* cell.*",
    lambda g: g.norm("encoder.weight") < 1e-3 * g.norm("head.weight"),
)
def recurrence_saturates() -> Case:
    return Case(Captioner(gain=60.0, steps=12), (torch.randn(4, 12) * 10,), ce(4, 5))


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.rate * g, None


@fault("zero", "zero", r".*Reverse.*|.*apply.*", dull())
def reversal_with_rate_zero() -> Case:
    return Case(Net(lambda h: torch.tanh(Reverse.apply(h, 0.0))), (torch.randn(16, 8),), ce(16, 3))


@fault("scale_break", "scale_break vanishing", r".*Reverse.*|.*apply.*", dull(1e-5))
def reversal_with_rate_1e_minus_8() -> Case:
    return Case(Net(lambda h: torch.tanh(Reverse.apply(h, 1e-8))), (torch.randn(16, 8),), ce(16, 3))


@fault("detached", "detached", r".*(detach|requires_grad).*", none("a.weight"))
def detach_then_requires_grad() -> Case:
    return Case(Net(lambda h: torch.tanh(h).detach().requires_grad_()), (torch.randn(16, 8),), ce(16, 3))


@fault("cut", "detached zero", r".*(byte|to|type).*", none("a.weight"))
def bytes_in_the_middle() -> Case:
    return Case(Net(lambda h: (torch.sigmoid(h) * 255).byte().float() / 255), (torch.randn(16, 8),), ce(16, 3))


@fault("detached", "detached unused", r"w|/.*", none("w"))
def weight_by_data() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w, self.b = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 16) * 0.2), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(F.linear(self.a(x), self.w.data)))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("no_grad", "detached", r"image.*", none("image.0.weight"))
def one_tower_under_no_grad() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            self.text = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, i: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                u = F.normalize(self.image(i), dim=-1)
            return u @ F.normalize(self.text(t), dim=-1).t() / 0.1

    return Case(M(), (torch.randn(8, 8), torch.randn(8, 6)), lambda o: F.cross_entropy(o, torch.arange(8)))


@fault("detached", "detached", r".*detach.*", none("blocks.0.up.weight"))
def gpt_detached_in_the_middle() -> Case:
    class M(GPT):
        def forward(self, i: Tensor) -> Tensor:
            x = self.emb(i) + self.pos[: i.shape[1]]
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 1:
                    x = x.detach()
            return self.head(self.norm(x))

    return Case(M(4), (tokens(),), lm())


@fault("detached", "detached", r".*", none("a.weight"))
def copied_into_data_of_buffer() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("memory", torch.zeros(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            self.memory.data.copy_(h)
            return self.b(self.memory)

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("dead", "dead", r"1", lambda g: bool((g.grads["0.weight"].norm(dim=1) == 0).float().mean() > 0.6))
def dead_after_a_large_step() -> Case:
    y = torch.randn(64, 2) * 30
    m = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.rand(64, 8)
    opt = torch.optim.SGD(m.parameters(), lr=0.5)
    F.mse_loss(m(x), y.abs()).backward()
    opt.step()
    for _ in range(1):
        opt.zero_grad()
        F.mse_loss(m(x), -y.abs()).backward()
        opt.step()
    with torch.no_grad():
        m[0].bias[:50] -= 20
    return Case(m, (x,), lambda o: F.mse_loss(o, y))


@fault("underflow", "underflow", r".* outside.*", lambda g: float((g.grads["emb.weight"] == 0).float().mean()) > 0.9)
def half_gpt_unscaled() -> Case:
    loss = lm()
    return Case(GPT(3).half(), (tokens(),), lambda o: loss(o.float()) * 1e-6)


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


@healthy("looks ill")
def maml_inner_step() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 1) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(torch.tanh(x @ self.w1) @ self.w2, y)
            g1, g2 = torch.autograd.grad(loss, (self.w1, self.w2), create_graph=True)
            return F.mse_loss(torch.tanh(x @ (self.w1 - 0.1 * g1)) @ (self.w2 - 0.1 * g2), y)

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 1)))


@healthy("looks ill")
def padded_sample_in_sdpa() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, :].expand(-1, x.shape[1], -1))
            return self.out((h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1))

    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1, 3:] = False
    keep[2] = False
    return Case(M(), (torch.randn(4, 6, 16), keep), ce(4, 3))


@healthy("looks ill")
def sigmoid_gate_closed_by_design() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.gate, self.f, self.b = (
                nn.Linear(8, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 3),
            )
            nn.init.constant_(self.gate.bias, -4.0)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h + torch.sigmoid(self.gate(h)) * self.f(h))

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def sampled_softmax_hard_attention() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.v, self.out, self.base = (
                nn.Linear(8, 6),
                nn.Embedding(6, 16),
                nn.Linear(16, 3),
                nn.Linear(8, 1),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            dist = torch.distributions.Categorical(logits=self.q(x))
            a = dist.sample()
            loss = F.cross_entropy(self.out(self.v(a)), y, reduction="none")
            b = self.base(x)[:, 0]
            return (
                loss.mean() + (dist.log_prob(a) * (loss - b).detach()).mean() + 0.5 * (b - loss.detach()).pow(2).mean()
            )

    return Case(M(), (torch.randn(16, 8), torch.randint(0, 3, (16,))), trains=False)


@healthy("looks ill")
def quantised_with_learned_scale() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.s, self.b = nn.Linear(8, 16), nn.Parameter(torch.tensor(0.1)), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = (self.a(x) / self.s).clamp(-8, 7)
            return self.b((h + (h.round() - h).detach()) * self.s)

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def surrogate_spikes() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            v, out = torch.zeros(len(x), 32), 0.0
            for _ in range(8):
                v = 0.9 * v + self.a(x)
                soft = torch.sigmoid(4 * (v - 0.5))
                s = soft + ((v > 0.5).float() - soft).detach()
                v = v - 0.5 * s.detach()
                out = out + self.b(s)
            return out / 8

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


@healthy("looks ill")
def relu_autoencoder_bottleneck_of_two() -> Case:
    x = torch.randn(32, 12)
    m = nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh(), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 12)
    )
    return Case(m, (x,), lambda o: F.mse_loss(o, x))


@healthy("looks ill")
def loss_of_a_summed_video() -> Case:
    m = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 3, padding=1))
    y = torch.randn(2, 3, 6, 24, 24)
    return Case(m, (torch.randn(2, 3, 6, 24, 24),), lambda o: F.mse_loss(o, y, reduction="sum"))


@healthy("looks ill")
def confident_trained_attention() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (
                nn.Embedding(12, 16),
                nn.Embedding(12, 16),
                nn.Embedding(12, 16),
                nn.Linear(16, 12),
            )

        def forward(self, i: Tensor) -> Tensor:
            s = self.q(i) @ self.k(i).transpose(1, 2) / 4
            return self.out(s.softmax(-1) @ self.v(i))

    i = torch.stack([torch.randperm(12) for _ in range(8)])
    m = M()
    opt = torch.optim.Adam(m.parameters(), lr=0.02)
    target = (i + 1) % 12
    for _ in range(120):
        opt.zero_grad()
        F.cross_entropy(m(i).flatten(0, 1), target.flatten()).backward()
        opt.step()
    return Case(m, (i,), lambda o: F.cross_entropy(o.flatten(0, 1), target.flatten()))
