"""Seeded faults in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.nets import (
    GCN,
    GPT,
    Captioner,
    HyperNet,
    Plain2d,
    UNet,
    adjacency,
    image,
    lm,
    tokens,
)
from tests.faults_heldout.program import Case, fault

C = r"(#\d+)?"


def sq(o: Tensor) -> Tensor:
    return o.float().pow(2).mean()


def ce(n: int, classes: int):
    y = torch.randint(0, classes, (n,))
    return lambda o: F.cross_entropy(o.float(), y)


# ---- vanishing
@fault("vanishing", "vanishing", rf"cell.*{C} /.*", lambda g: g.norm("encoder.weight") < 1e-8)
def captioner_forgets() -> Case:
    m = Captioner(gain=0.35)
    return Case(m, (torch.randn(4, 12),), ce(4, 5))


@fault("vanishing", "vanishing", r"\d+", lambda g: g.ratio("0.weight", "40.weight") < 1e-5)
def deep_sigmoid_default_init() -> Case:
    parts: list[nn.Module] = [nn.Linear(20, 48), nn.Sigmoid()]
    for _ in range(19):
        parts += [nn.Linear(48, 48), nn.Sigmoid()]
    return Case(nn.Sequential(*parts, nn.Linear(48, 4)), (torch.randn(16, 20),), ce(16, 4))


@fault("vanishing", "vanishing", r"features\.\d+ .*", lambda g: g.ratio("features.0.weight", "head.weight") < 3e-5)
def vgg_without_norm() -> Case:
    return Case(Plain2d(18), (image(4),), ce(4, 6))


@fault("vanishing", "vanishing", r".*(lins|matmul|relu).*", lambda g: g.ratio("lins.0.weight", "head.weight") < 1e-5)
def deep_gcn_smooths() -> Case:
    return Case(GCN(22), (torch.randn(30, 8), adjacency(30)), ce(30, 3))


@fault("vanishing", "vanishing", r"blocks\..* head.* .*", lambda g: g.ratio("emb.weight", "head.weight") < 1e-4)
def gpt_without_residual() -> Case:
    return Case(GPT(10, residual=False, norm=False), (tokens(),), lm())


@fault("vanishing", "vanishing scale_break", r"/.* main.* gen.*", lambda g: g.norm("enter.weight") < 1e-8)
def hypernet_tiny_weights() -> Case:
    return Case(HyperNet(scale=1e-3), (torch.randn(8, 10), torch.randn(4)), sq)


@fault("vanishing", "vanishing", r"\d+ layers.* .*", lambda g: g.norm("0.weight") < 1e-6)
def gelu_mlp_std_002() -> Case:
    m = nn.Sequential(*[x for _ in range(8) for x in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 3))
    for p in m.parameters():
        nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(16, 64),), ce(16, 3))


@fault("vanishing", "vanishing", r".*", lambda g: g.ratio("net.0.weight", "net.36.weight") < 1e-4)
def autocast_sigmoid_chain() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *[x for _ in range(18) for x in (nn.Linear(32, 32), nn.Sigmoid())], nn.Linear(32, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    return Case(M(), (torch.randn(8, 32),), ce(8, 3))


@fault("vanishing", "vanishing", r".*dw.* .*", lambda g: g.ratio("stem.weight", "head.weight") < 1e-4)
def temporal_conv_batch_one() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv1d(4, 16, 3, padding=1)
            self.dw = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(16))
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            for conv in self.dw:
                h = torch.relu(conv(h))
            return self.head(h.mean(-1))

    return Case(M(), (torch.randn(1, 4, 40),), ce(1, 2))


# ---- exploding
@fault("exploding", "exploding", r"\d+ .*", lambda g: g.norm("0.weight") > 1e4)
def generator_three_times_he() -> Case:
    m = nn.Sequential(*[x for _ in range(14) for x in (nn.Linear(48, 48), nn.LeakyReLU(0.2))], nn.Linear(48, 10))
    for p in m.parameters():
        nn.init.normal_(p, std=3 * (2 / 48) ** 0.5) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(8, 48),), lambda o: o.mean())


class Loud(nn.Module):
    """Residual blocks whose branch is four times too loud."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(16))
        for p in self.blocks.parameters():
            if p.ndim > 1:
                nn.init.kaiming_normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + 4 * block(h)
        return self.head(h)


@fault("exploding", "exploding", r"blocks.* /.*", lambda g: g.norm("stem.weight") > 1e5)
def residual_branch_times_four() -> Case:
    return Case(Loud(), (torch.randn(8, 16),), lambda o: o.mean())


@fault(
    "exploding",
    "exploding",
    rf"cell.*{C} /.*",
    lambda g: g.ratio("encoder.weight", "head.weight") > 1e3 or g.norm("encoder.weight") > 1e6,
)
def linear_rnn_radius_two() -> Case:
    m = Captioner(gain=2.5, act=False)
    return Case(m, (torch.randn(4, 12),), lambda o: o.mean())


@fault("exploding", "exploding", r".*", lambda g: g.norm("lins.0.weight") > 1e6)
def gnn_sums_dense_graph() -> Case:
    m = GCN(10)
    return Case(m, (torch.randn(60, 8), torch.ones(60, 60)), lambda o: o.mean())


@fault("exploding", "exploding", r"\d+ .*", lambda g: g.norm("0.weight") > 1e4)
def orthogonal_gain_four() -> Case:
    m = nn.Sequential(*[x for _ in range(12) for x in (nn.Linear(32, 32), nn.GELU())], nn.Linear(32, 3))
    for p in m.parameters():
        nn.init.orthogonal_(p, 5) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(2, 32),), lambda o: o.sum())


# ---- scale break
@fault("scale_break", "scale_break vanishing", r"/(true)?div", lambda g: g.ratio("first.weight", "last.weight") < 1e-4)
def divides_pixels_again_inside() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.mid = nn.Conv2d(8, 8, 3)
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x)) / 255**3
            h = F.relu(self.mid(h))
            return self.last(h.mean((2, 3)))

    return Case(M(), (image(4),), ce(4, 3))


@fault("scale_break", "scale_break exploding", r".*mul.*", lambda g: g.norm("stem.weight") > 1e2)
def unet_latent_times_1e6() -> Case:
    return Case(UNet(mid_scale=1e6, skip=False), (image(2, 16), torch.rand(2)), lambda o: o.mean())


@fault("scale_break", "scale_break exploding", r"features\.6(.weight)?", lambda g: g.norm("features.0.weight") > 1e4)
def one_conv_times_1e6() -> Case:
    m = Plain2d(8, he=True)
    with torch.no_grad():
        m.features[6].weight *= 1e6
    return Case(m, (image(4),), lambda o: o.mean())


@fault("scale_break", "scale_break vanishing", r"proj.*|/.*", lambda g: g.ratio("a.weight", "c.weight") < 1e-4)
def linear_init_times_1e_minus_7() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.proj, self.c = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 3)
            with torch.no_grad():
                self.proj.weight *= 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.proj(torch.tanh(self.a(x)))))

    return Case(M(), (torch.randn(8, 12),), ce(8, 3))


@fault("scale_break", "scale_break exploding", r"/(true)?div", lambda g: g.norm("tower.weight") > 1e3)
def contrastive_temperature() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(12, 16)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            u, v = F.normalize(self.tower(a), dim=-1), F.normalize(self.tower(b), dim=-1)
            return (u @ v.t()) / 1e-6

    return Case(M(), (torch.randn(8, 12), torch.randn(8, 12)), lambda o: F.cross_entropy(o, torch.arange(8)))


# ---- dead
@fault("dead", "dead zero", r"features\.\d+", lambda g: g.norm("features.0.weight") == 0)
def conv_bias_minus_fifty() -> Case:
    m = Plain2d(5, he=True)
    nn.init.constant_(m.features[4].bias, -50)
    return Case(m, (image(4),), ce(4, 6))


@fault(
    "dead",
    "dead",
    r"features\.3",
    lambda g: bool((g.grads["features.2.weight"].flatten(1).norm(dim=1) == 0).float().mean() > 0.7),
)
def most_channels_dead() -> Case:
    m = Plain2d(5, he=True)
    with torch.no_grad():
        m.features[2].bias[:9] = -40
    return Case(m, (image(8),), ce(8, 6))


@fault("dead", "dead zero", "2 1", lambda g: g.norm("0.weight") == 0)
def norm_shift_minus_thirty() -> Case:
    m = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(m[1].bias, -30)
    return Case(m, (torch.randn(32, 10),), ce(32, 3))


@fault("dead", "dead zero", r"act#1", lambda g: g.norm("a.weight") == 0 and g.norm("c.weight") > 0)
def second_call_of_shared_relu() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.act = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24), nn.ReLU()
            self.head = nn.Linear(48, 3)
            nn.init.constant_(self.b.bias, -25)

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.a(x))
            h = self.act(self.b(h))
            k = self.act(self.c(x.repeat(1, 3)))
            return self.head(torch.cat([h, k], 1))

    return Case(M(), (torch.randn(32, 8),), ce(32, 3))


@fault("dead", "dead zero", r"down.* .*relu.*", lambda g: g.norm("mid.weight") == 0)
def unet_bottom_dead() -> Case:
    m = UNet()
    nn.init.constant_(m.mid.bias, -60)
    return Case(m, (image(2, 16), torch.rand(2)), sq)


@fault("dead", "dead zero", r"blocks\.2.*", lambda g: g.norm("blocks.2.up.weight") == 0)
def gpt_ffn_relu_dead() -> Case:
    m = GPT(4, act=F.relu)
    nn.init.constant_(m.blocks[2].up.bias, -100)
    return Case(m, (tokens(),), lm())


@fault("dead", "dead zero", r"/relu#1 /relu", lambda g: g.norm("a.weight") == 0)
def all_negative_weights() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
            nn.init.uniform_(self.b.weight, -1, 0)
            nn.init.constant_(self.b.bias, -0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    return Case(M(), (torch.randn(64, 8),), ce(64, 3))


@fault("dead", "dead zero saturated", r".*", lambda g: g.norm("0.weight") == 0)
def relu6_overshoots() -> Case:
    m = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    nn.init.constant_(m[0].bias, 60)
    return Case(m, (image(4),), ce(4, 3))


# ---- zero
@fault("zero", "zero", ".*round", lambda g: g.norm("0.weight") == 0)
def quantised_latent() -> Case:
    class Q(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.round(x * 8) / 8

    return Case(nn.Sequential(nn.Linear(10, 6), nn.Tanh(), Q(), nn.Linear(6, 10)), (torch.randn(8, 10),), sq)


@fault("zero", "zero", "/floor", lambda g: g.norm("warp.weight") == 0)
def floor_of_coordinates() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.warp, self.field = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            cell = torch.floor(self.warp(x) * 16)
            return self.field(torch.sin(cell))

    return Case(M(), (torch.rand(50, 3),), sq)
