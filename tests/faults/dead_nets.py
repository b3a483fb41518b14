"""Dead units in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, Net, Plain2d, UNet, ce, dull, image, lm, sq, tokens


@fault("dead zero saturated", r".*gelu.*", lambda g: g.norm("a.weight") < 1e-12)
def gelu_pushed_far_left() -> Built:
    m = Net(F.gelu)
    nn.init.constant_(m.a.bias, -60)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero saturated", r".*silu.*", lambda g: g.norm("a.weight") < 1e-12)
def silu_pushed_far_left() -> Built:
    m = Net(F.silu)
    nn.init.constant_(m.a.bias, -150)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero", r"/(maximum|clamp).*", dull())
def hand_written_relu_dead() -> Built:
    m = Net(lambda h: torch.maximum(h, torch.zeros(())))
    nn.init.constant_(m.a.bias, -30)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero", r"/clamp.*", dull())
def clamp_min_dead() -> Built:
    m = Net(lambda h: h.clamp(min=0))
    nn.init.constant_(m.a.bias, -30)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero", r"/relu_.*", dull())
def in_place_relu_dead() -> Built:
    m = Net(F.relu_)
    nn.init.constant_(m.a.bias, -30)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero", r"/mul.* /.*", dull())
def relu_as_product_dead() -> Built:
    m = Net(lambda h: h * (h > 0))
    nn.init.constant_(m.a.bias, -30)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero loss_seed", r".*relu.* outside.*", lambda g: g.norm("net.weight") == 0)
def hinge_inside_all_satisfied() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.relu(1e-3 - (self.net(a) - self.net(b)).pow(2).sum(-1)).mean()

    return Built(M(), (torch.randn(8, 8), torch.randn(8, 8) + 20))


@fault("dead", r"1", lambda g: bool((g.grads["0.weight"].norm(dim=1) == 0).float().mean() > 0.6))
def dead_after_a_large_step() -> Built:
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
    return Built(m, (x,), lambda o: F.mse_loss(o, y))


# ---- dead
@fault("dead zero", r"features\.\d+", lambda g: g.norm("features.0.weight") == 0)
def conv_bias_minus_fifty() -> Built:
    m = Plain2d(5, he=True)
    nn.init.constant_(m.features[4].bias, -50)
    return Built(m, (image(4),), ce(4, 6))


@fault(
    "dead",
    r"features\.3",
    lambda g: bool((g.grads["features.2.weight"].flatten(1).norm(dim=1) == 0).float().mean() > 0.7),
)
def most_channels_dead() -> Built:
    m = Plain2d(5, he=True)
    with torch.no_grad():
        m.features[2].bias[:9] = -40
    return Built(m, (image(8),), ce(8, 6))


@fault("dead zero", "2 1", lambda g: g.norm("0.weight") == 0)
def norm_shift_minus_thirty() -> Built:
    m = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(m[1].bias, -30)
    return Built(m, (torch.randn(32, 10),), ce(32, 3))


@fault("dead zero", r"act#1", lambda g: g.norm("a.weight") == 0 and g.norm("c.weight") > 0)
def second_call_of_shared_relu() -> Built:
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

    return Built(M(), (torch.randn(32, 8),), ce(32, 3))


@fault("dead zero", r"down.* .*relu.*", lambda g: g.norm("mid.weight") == 0)
def unet_bottom_dead() -> Built:
    m = UNet()
    nn.init.constant_(m.mid.bias, -60)
    return Built(m, (image(2, 16), torch.rand(2)), sq)


@fault("dead zero", r"blocks\.2.*", lambda g: g.norm("blocks.2.up.weight") == 0)
def gpt_ffn_relu_dead() -> Built:
    m = GPT(4, act=F.relu)
    nn.init.constant_(m.blocks[2].up.bias, -100)
    return Built(m, (tokens(),), lm())


@fault("dead zero", r"/relu#1 /relu", lambda g: g.norm("a.weight") == 0)
def all_negative_weights() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
            nn.init.uniform_(self.b.weight, -1, 0)
            nn.init.constant_(self.b.bias, -0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    return Built(M(), (torch.randn(64, 8),), ce(64, 3))


@fault("dead zero saturated", r".*", lambda g: g.norm("0.weight") == 0)
def relu6_overshoots() -> Built:
    m = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    nn.init.constant_(m[0].bias, 60)
    return Built(m, (image(4),), ce(4, 3))


@fault("dead zero", r"1", lambda g: g.norm("0.weight") == 0, steps=8)
def dead_over_steps() -> Built:
    m = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(m[0].bias, -30)
    return Built(m, (torch.randn(32, 8),), ce(32, 3))
