"""What is cut off, unused or frozen in nets as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.places import fault
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, MoE, Net, ResNet, ce, image, lm, sq, tokens


# ---- cuts
def none(name: str):
    return lambda g: g.grads[name] is None


@fault("detached", r".*(detach|requires_grad).*", none("a.weight"))
def detach_then_requires_grad() -> Built:
    return Built(Net(lambda h: torch.tanh(h).detach().requires_grad_()), (torch.randn(16, 8),), ce(16, 3))


@fault("detached zero", r".*(byte|to|type).*", none("a.weight"))
def bytes_in_the_middle() -> Built:
    return Built(Net(lambda h: (torch.sigmoid(h) * 255).byte().float() / 255), (torch.randn(16, 8),), ce(16, 3))


@fault("detached unused", r"w|/.*", none("w"))
def weight_by_data() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w, self.b = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 16) * 0.2), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(F.linear(self.a(x), self.w.data)))

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("detached", r"image.*", none("image.0.weight"))
def one_tower_under_no_grad() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            self.text = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, i: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                u = F.normalize(self.image(i), dim=-1)
            return u @ F.normalize(self.text(t), dim=-1).t() / 0.1

    return Built(M(), (torch.randn(8, 8), torch.randn(8, 6)), lambda o: F.cross_entropy(o, torch.arange(8)))


@fault("detached", r".*detach.*", none("blocks.0.up.weight"))
def gpt_detached_in_the_middle() -> Built:
    class M(GPT):
        def forward(self, i: Tensor) -> Tensor:
            x = self.emb(i) + self.pos[: i.shape[1]]
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 1:
                    x = x.detach()
            return self.head(self.norm(x))

    return Built(M(4), (tokens(),), lm())


@fault("detached", r".*", none("a.weight"))
def copied_into_data_of_buffer() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("memory", torch.zeros(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            self.memory.data.copy_(h)
            return self.b(self.memory)

    return Built(M(), (torch.randn(16, 8),), ce(16, 3))


@fault("detached", "/argmin", none("enc.weight"))
def codebook_without_ste() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.book = nn.Linear(8, 4), nn.Linear(4, 8), nn.Parameter(torch.randn(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            idx = torch.cdist(self.enc(x), self.book).argmin(-1)
            return self.dec(self.book[idx])

    return Built(M(), (torch.randn(8, 8),), sq)


@fault("detached", ".*detach", none("enc.weight_ih_l0"))
def truncated_state() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.GRU(6, 8, batch_first=True), nn.GRU(6, 8, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            _, h = self.enc(a)
            return self.out(self.dec(b, h.detach())[0])

    return Built(M(), (torch.randn(2, 5, 6), torch.randn(2, 4, 6)), sq)


@fault("detached", "backbone.* /.*no_grad.*", none("backbone.0.weight"))
def features_under_no_grad() -> Built:
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

    return Built(M(), (image(2),), ce(2, 3))


@fault("detached", ".*", none("a.weight"))
def through_dot_data() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.b(h.data)

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", ".*", none("scale.weight"))
def through_item() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.b = nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            s = torch.sigmoid(self.scale(x)).mean().item()
            return self.b(x * s)

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", ".*", none("a.weight"))
def through_numpy() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).detach().numpy()
            return self.b(torch.from_numpy(h.clip(0)))

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", ".*argmax", none("enc.weight"))
def greedy_tokens_between() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.emb, self.dec = nn.Linear(8, 12), nn.Embedding(12, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.dec(self.emb(self.enc(x).argmax(-1)))

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached zero", "/(gt|to|float|ge|lt|le).*", none("a.weight"))
def spiking_threshold() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) > 0.5).float())

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", "stem.*", none("stem.lin.weight"))
def decorated_forward() -> Built:
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

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("detached", ".*(topk|getitem|sort|long|argsort|gather|index).*", none("scorer.weight"))
def hard_top_k_selection() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scorer, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            keep = self.scorer(x)[..., 0].topk(2, -1).indices
            return self.head(torch.gather(x, 1, keep[..., None].expand(-1, -1, 8)).mean(1))

    return Built(M(), (torch.randn(4, 6, 8),), ce(4, 3))


# ---- unused, frozen
@fault("unused", r"aux.*", none("aux.weight"))
def auxiliary_head_forgotten() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.aux = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("unused detached", r"norm.*", none("norm.weight"))
def norm_result_dropped() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.norm(h)
            return self.b(torch.relu(h))

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("unused", r"experts\.3.*", none("experts.3.0.weight"))
def last_expert_off_by_one() -> Built:
    return Built(MoE(loop=3), (torch.randn(16, 12),), sq)


@fault("frozen", r".*", lambda g: "body.0.weight" not in g.grads)
def frozen_body() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
            self.body.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return Built(M(), (torch.randn(8, 8),), ce(8, 3))


@fault("frozen", r".*", lambda g: len(g.grads) == 2)
def frozen_resnet_train_head() -> Built:
    m = ResNet()
    for n, p in m.named_parameters():
        p.requires_grad_(n.startswith("head"))
    return Built(m, (image(4),), ce(4, 5))
