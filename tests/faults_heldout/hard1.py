"""A second wave: bugs that are easy to make and hard to see, and healthy nets that look ill."""

# ruff: noqa: PLW0108  # traps in one line

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.nets import GPT, Captioner, image, lm, tokens
from tests.faults_heldout.program import Case, fault
from tests.faults_heldout.seeded1 import ce
from tests.faults_heldout.seeded2 import none


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
    seeds=1,
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
