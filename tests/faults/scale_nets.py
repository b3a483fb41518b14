"""One call that changes the scale, and branches that get too little."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import Net, Plain2d, Reverse, UNet, ce, dull, image, sq


@fault("scale_break vanishing", "bn.*", dull(1e-4))
def running_var_broken_in_eval() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.bn(self.a(x))).mean((2, 3)))

    m = M().eval()
    m.bn.running_var.fill_(1e14)
    return Built(m, (image(4),), ce(4, 3))


@fault("scale_break vanishing", r".*Reverse.*|.*apply.*", dull(1e-5))
def reversal_with_rate_1e_minus_8() -> Built:
    return Built(Net(lambda h: torch.tanh(Reverse.apply(h, 1e-8))), (torch.randn(16, 8),), ce(16, 3))


# ---- scale break
@fault("scale_break vanishing", r"/(true)?div", lambda g: g.ratio("first.weight", "last.weight") < 1e-4)
def divides_pixels_again_inside() -> Built:
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

    return Built(M(), (image(4),), ce(4, 3))


@fault("scale_break exploding", r".*mul.*", lambda g: g.norm("stem.weight") > 1e2)
def unet_latent_times_1e6() -> Built:
    return Built(UNet(mid_scale=1e6, skip=False), (image(2, 16), torch.rand(2)), lambda o: o.mean())


@fault("scale_break exploding", r"features\.6(.weight)?", lambda g: g.norm("features.0.weight") > 1e4)
def one_conv_times_1e6() -> Built:
    m = Plain2d(8, he=True)
    with torch.no_grad():
        m.features[6].weight *= 1e6
    return Built(m, (image(4),), lambda o: o.mean())


@fault("scale_break vanishing", r"proj.*|/.*", lambda g: g.ratio("a.weight", "c.weight") < 1e-4)
def linear_init_times_1e_minus_7() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.proj, self.c = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 3)
            with torch.no_grad():
                self.proj.weight *= 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.proj(torch.tanh(self.a(x)))))

    return Built(M(), (torch.randn(8, 12),), ce(8, 3))


@fault("scale_break exploding", r"/(true)?div", lambda g: g.norm("tower.weight") > 1e3)
def contrastive_temperature() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(12, 16)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            u, v = F.normalize(self.tower(a), dim=-1), F.normalize(self.tower(b), dim=-1)
            return (u @ v.t()) / 1e-6

    return Built(M(), (torch.randn(8, 12), torch.randn(8, 12)), lambda o: F.cross_entropy(o, torch.arange(8)))


# ---- starved
@fault("starved scale_break", ".*mul.* aux.*", lambda g: g.ratio("aux.weight", "main.weight") < 1e-6)
def second_task_weight_1e_minus_9() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.aux = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            return self.main(h) + 1e-9 * self.aux(h)

    return Built(M(), (torch.randn(16, 8),), sq)


@fault("starved scale_break", ".*(mul|div).*", lambda g: g.ratio("audio.weight", "text.weight") < 1e-5)
def fusion_of_unequal_scales() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.audio, self.text, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(32, 3)

        def forward(self, a: Tensor, t: Tensor) -> Tensor:
            return self.head(torch.cat([F.relu(self.audio(a)) * 1e-7, F.relu(self.text(t))], -1))

    return Built(M(), (torch.randn(16, 8), torch.randn(16, 8)), ce(16, 3))


@fault("starved scale_break", ".*mul.*", lambda g: g.ratio("branch.weight", "head.weight") < 1e-6)
def residual_branch_1e_minus_9() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            return self.head(h + torch.relu(self.branch(h)) * 1e-9)

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))
