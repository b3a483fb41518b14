"""Seeded faults in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.nets import (
    GPT,
    Highway,
    MoE,
    image,
    lm,
    tokens,
)
from tests.faults_heldout.program import Case, fault
from tests.faults_heldout.seeded1 import ce, sq


@fault("zero", "zero", "/sign", lambda g: g.norm("a.weight") == 0)
def binary_activations() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).sign())

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("zero", "zero", r"\d .*weight", lambda g: g.norm("0.weight") == 0 and g.norm("2.weight") == 0)
def all_weights_zero() -> Case:
    m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    for p in m.parameters():
        nn.init.zeros_(p)
    return Case(m, (torch.randn(8, 8),), ce(8, 3))


@fault("zero", "zero", "/mul", lambda g: g.norm("a.weight") == 0)
def mask_inverted() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = (torch.arange(5)[None] >= lengths[:, None]).float()[..., None]
            return self.b((F.gelu(self.a(x)) * mask).sum(1))

    return Case(M(), (torch.randn(4, 5, 8), torch.full((4,), 5)), ce(4, 3))


@fault("zero", "zero saturated", "/clamp .*clamp.*", lambda g: g.norm("dec.weight") == 0)
def image_clamped_outside() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dec = nn.Linear(8, 48)

        def forward(self, z: Tensor) -> Tensor:
            return torch.clamp(self.dec(z) * 10 + 128, 0, 1)

    return Case(M(), (torch.randn(8, 8),), lambda o: F.mse_loss(o, torch.zeros_like(o)))


@fault("zero", "zero", "2", lambda g: g.norm("0.weight") == 0)
def dropout_of_everything() -> Case:
    return Case(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(1.0), nn.Linear(16, 3)), (torch.randn(8, 8),), ce(8, 3)
    )


@fault("zero", "zero", "/trunc /long /to /ceil", lambda g: g.norm("a.weight") == 0)
def fake_quant_ceil() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) * 127).ceil().mean(-1) / 127)

    return Case(M(), (torch.randn(4, 4, 12),), ce(4, 3))


# ---- saturated
@fault("saturated", "saturated", r".*sigmoid.* .*gate.*", lambda g: g.ratio("gates.0.weight", "head.weight") < 1e-2)
def highway_gates_shut() -> Case:
    m = Highway()
    with torch.no_grad():
        for gate in m.gates:
            gate.bias.fill_(-60)
    return Case(m, (torch.randn(16, 12),), ce(16, 4))


@fault("saturated", "saturated", r".*softmax.*", lambda g: g.norm("blocks.0.qkv.weight") >= 0)
def attention_without_scaling() -> Case:
    m = GPT(2)
    with torch.no_grad():
        for b in m.blocks:
            b.qkv.weight *= 60
    return Case(m, (tokens(),), lm())


@fault("saturated", "saturated vanishing", r".*tanh.* 1", lambda g: g.ratio("0.weight", "2.weight") < 20)
def raw_observations_into_tanh() -> Case:
    m = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    return Case(m, (torch.randn(32, 6) * 4000,), sq)


@fault("saturated", "saturated", r".*softmax.*", lambda g: g.norm("router.weight") < 1e-3)
def router_of_one_expert() -> Case:
    m = MoE()
    nn.init.constant_(m.router.bias, 0)
    with torch.no_grad():
        m.router.bias[0] = 300
    return Case(m, (torch.randn(16, 12),), sq)


@fault("saturated", "saturated zero dead", "1", lambda g: g.norm("0.weight") == 0)
def hardtanh_outside() -> Case:
    m = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(), nn.Linear(16, 3))
    nn.init.constant_(m[0].bias, 20)
    return Case(m, (torch.randn(16, 8),), ce(16, 3))


@fault("saturated", "saturated vanishing zero", ".*sigmoid.*", lambda g: g.norm("tower.weight") < 1e-6)
def verification_sigmoid() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.cal = nn.Linear(8, 16), nn.Linear(1, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            d = (self.tower(a) - self.tower(b)).pow(2).sum(-1, keepdim=True)
            return self.cal(torch.sigmoid(30 * d + 60))

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 8)), sq)


# ---- starved
@fault("starved", "starved scale_break", ".*mul.* aux.*", lambda g: g.ratio("aux.weight", "main.weight") < 1e-6)
def second_task_weight_1e_minus_9() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.aux = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            return self.main(h) + 1e-9 * self.aux(h)

    return Case(M(), (torch.randn(16, 8),), sq)


@fault("starved", "starved scale_break", ".*(mul|div).*", lambda g: g.ratio("audio.weight", "text.weight") < 1e-5)
def fusion_of_unequal_scales() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.audio, self.text, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(32, 3)

        def forward(self, a: Tensor, t: Tensor) -> Tensor:
            return self.head(torch.cat([F.relu(self.audio(a)) * 1e-7, F.relu(self.text(t))], -1))

    return Case(M(), (torch.randn(16, 8), torch.randn(16, 8)), ce(16, 3))


@fault("starved", "starved scale_break", ".*mul.*", lambda g: g.ratio("branch.weight", "head.weight") < 1e-6)
def residual_branch_1e_minus_9() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            return self.head(h + torch.relu(self.branch(h)) * 1e-9)

    return Case(M(), (torch.randn(16, 8),), ce(16, 3))


# ---- cuts
def none(name: str):
    return lambda g: g.grads[name] is None


@fault("cut", "detached", "/argmin", none("enc.weight"))
def codebook_without_ste() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.book = nn.Linear(8, 4), nn.Linear(4, 8), nn.Parameter(torch.randn(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            idx = torch.cdist(self.enc(x), self.book).argmin(-1)
            return self.dec(self.book[idx])

    return Case(M(), (torch.randn(8, 8),), sq)


@fault("detached", "detached", ".*detach", none("enc.weight_ih_l0"))
def truncated_state() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.GRU(6, 8, batch_first=True), nn.GRU(6, 8, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            _, h = self.enc(a)
            return self.out(self.dec(b, h.detach())[0])

    return Case(M(), (torch.randn(2, 5, 6), torch.randn(2, 4, 6)), sq)


@fault("no_grad", "detached", "backbone.* /.*no_grad.*", none("backbone.0.weight"))
def features_under_no_grad() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = (
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
                nn.Linear(8, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.backbone(x).mean((2, 3))
            return self.head(h)

    return Case(M(), (image(2),), ce(2, 3))


@fault("detached", "detached", ".*", none("a.weight"))
def through_dot_data() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.b(h.data)

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", "detached", ".*", none("scale.weight"))
def through_item() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.b = nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            s = torch.sigmoid(self.scale(x)).mean().item()
            return self.b(x * s)

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", "detached", ".*", none("a.weight"))
def through_numpy() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).detach().numpy()
            return self.b(torch.from_numpy(h.clip(0)))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("cut", "detached", ".*argmax", none("enc.weight"))
def greedy_tokens_between() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.emb, self.dec = nn.Linear(8, 12), nn.Embedding(12, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.dec(self.emb(self.enc(x).argmax(-1)))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("cut", "detached zero", "/(gt|to|float|ge|lt|le).*", none("a.weight"))
def spiking_threshold() -> Case:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) > 0.5).float())

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("no_grad", "detached", "stem.*", none("stem.lin.weight"))
def decorated_forward() -> Case:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.lin(x))

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = Stem(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x))

    return Case(M(), (torch.randn(8, 8),), ce(8, 3))
