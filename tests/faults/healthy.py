"""Healthy programs: what looks like a fault and is none.  Structures at initialisation."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Gpt, Graph, Net, Vit, he, mlp, mse, tokens, xent
from tests.faults.program import Built, Register

HEALTHY = Register("healthy")


@HEALTHY()
def two_branches():
    net = Net(
        lambda self, x: self.head(self.b1(torch.tanh(self.stem(x))) + 1.0 * self.b2(torch.tanh(self.stem(x)))),
        stem=nn.Linear(6, 6), b1=nn.Linear(6, 6), b2=nn.Linear(6, 6), head=nn.Linear(6, 2),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 6),), mse(8, 2))


@HEALTHY()
def mlp_he_thirty_deep():
    return Built(he(mlp(30, nn.ReLU)), (torch.randn(64, 32),), xent(64))


@HEALTHY()
def mlp_shallow_torch_default():
    return Built(mlp(3, nn.ReLU), (torch.randn(32, 32),), xent())


class Residual(nn.Module):
    """Residual blocks; each branch may be zero at first, by its last weight, its norm or a scale of its own."""

    def __init__(self, depth: int, width: int = 32, zero: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.first = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.second = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        if zero == "second":
            for layer in self.second:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
        for scale in self.scales:
            scale.data.fill_({"scale": 0.0, "tiny": 1e-6}.get(zero, 1.0))

    def forward(self, x):
        x = self.stem(x)
        for norm, first, second, scale in zip(self.norms, self.first, self.second, self.scales, strict=True):
            x = x + scale * second(F.gelu(first(norm(x))))
        return self.head(x)


@HEALTHY()
def residual_fifty_deep():
    return Built(Residual(50), (torch.randn(16, 16),), xent(16, 4))


@HEALTHY()
def residual_with_zero_last_layers():
    return Built(Residual(6, zero="second"), (torch.randn(16, 16),), xent(16, 4))


@HEALTHY()
def rezero():
    return Built(Residual(8, zero="scale"), (torch.randn(16, 16),), xent(16, 4))


@HEALTHY()
def layer_scale_of_a_millionth():
    return Built(Residual(8, zero="tiny"), (torch.randn(16, 16),), xent(16, 4))


@HEALTHY()
def zero_gamma_residual_cnn():
    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            nn.init.zeros_(self.bn2.weight)

        def forward(self, x):
            return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Bottleneck(),
        Bottleneck(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return Built(net, (torch.randn(8, 3, 8, 8),), xent(8, 4))


@HEALTHY()
def zero_head():
    model = mlp(3, nn.ReLU)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return Built(model, (torch.randn(64, 32),), xent(64))


@HEALTHY()
def vit_with_zero_head():
    model = Vit()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return Built(model, (torch.randn(4, 3, 8, 8),), xent(4))


class Lora(nn.Module):
    """A frozen linear and a low-rank update whose second factor starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2.0


@HEALTHY()
def lora():
    model = Gpt(2).requires_grad_(False)
    for block in model.blocks:
        block.attn.q, block.attn.v = Lora(block.attn.q), Lora(block.attn.v)
    ids, loss = tokens()
    return Built(model, (ids,), loss)


@HEALTHY()
def frozen_backbone():
    backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()).requires_grad_(False)
    net = Net(lambda self, x: self.head(self.backbone(x)), backbone=backbone, head=nn.Linear(16, 3))
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@HEALTHY()
def frozen_in_the_middle():
    model = mlp(3, nn.GELU)
    model[2].requires_grad_(False)
    return Built(model, (torch.randn(32, 32),), xent())


@HEALTHY()
def frozen_backbone_under_no_grad():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).requires_grad_(False)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            with torch.no_grad():
                h = self.backbone(x)
            return self.head(h.mean((2, 3)))

    return Built(Features(), (torch.randn(8, 3, 8, 8),), xent(8, 3))


@HEALTHY()
def dropout_of_all_kinds():
    net = nn.Sequential(
        nn.Conv1d(2, 16, 3), nn.Dropout1d(0.5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.8), nn.Linear(160, 32),
        nn.AlphaDropout(0.2), nn.SELU(), nn.Linear(32, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(64, 2, 12),), xent(64, 3))


@HEALTHY()
def embedding_mostly_unused():
    net = Net(
        lambda self, i: self.head(self.embed(i).mean(1)),
        embed=nn.Embedding(5000, 16, padding_idx=0), head=nn.Linear(16, 3),
    )  # fmt: skip
    ids = torch.randint(1, 60, (16, 10))
    ids[:, 7:] = 0
    return Built(net, (ids,), xent(16, 3))


@HEALTHY()
def embedding_with_sparse_gradient():
    net = Net(
        lambda self, i: self.head(torch.tanh(self.embed(i).sum(1))),
        embed=nn.Embedding(400, 8, sparse=True), head=nn.Linear(8, 3),
    )  # fmt: skip
    return Built(net, (torch.randint(0, 400, (16, 5)),), xent(16, 3))


@HEALTHY()
def embedding_bag():
    net = Net(lambda self, i, o: self.head(F.relu(self.bag(i, o))), bag=nn.EmbeddingBag(300, 16), head=nn.Linear(16, 3))
    return Built(net, (torch.randint(0, 300, (40,)), torch.arange(0, 40, 5)), xent(8, 3))


def _loss_times(factor):
    base = xent(32)
    return Built(
        he(mlp(4, nn.ReLU)), (torch.randn(32, 32),), lambda out: base(out) * factor,
        lambda model: torch.optim.SGD(model.parameters(), 1e-2 / factor),
    )  # fmt: skip


HEALTHY.add("loss_times_65536", lambda: _loss_times(65536.0))
HEALTHY.add("loss_times_a_millionth", lambda: _loss_times(1e-6))


@HEALTHY()
def summed_loss():
    target = torch.randint(0, 10, (64,))
    return Built(he(mlp(3, nn.ReLU)), (torch.randn(64, 32),), lambda out: F.cross_entropy(out, target, reduction="sum"))


def _gpt(depth=4, **options):
    ids, loss = tokens()
    return Built(Gpt(depth, **options), (ids,), loss)


HEALTHY.add("gpt_pre_norm", _gpt)
HEALTHY.add("gpt_post_norm", lambda: _gpt(4, post=True))
HEALTHY.add("gpt_twelve_blocks", lambda: _gpt(12))
HEALTHY.add("vit", lambda: Built(Vit(), (torch.randn(4, 3, 8, 8),), xent(4)))
HEALTHY.add("vit_post_norm", lambda: Built(Vit(6, post=True), (torch.randn(4, 3, 8, 8),), xent(4)))


@HEALTHY()
def gpt_small_init_and_tied_weights():
    ids, loss = tokens()
    model = Gpt(4)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    model.head.weight = model.embed.weight
    return Built(model, (ids,), loss)


@HEALTHY()
def multihead_attention_with_padding():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 8)
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x, pad):
            h = self.embed(x)
            mixed, _ = self.attn(h, h, h, key_padding_mask=pad, need_weights=False)
            return self.head(mixed.masked_fill(pad[..., None], 0.0).sum(1))

    pad = torch.zeros(4, 6, dtype=torch.bool)
    pad[1, 3:], pad[2, 1:] = True, True
    return Built(Padded(), (torch.randn(4, 6, 4), pad), xent(4, 3))


@HEALTHY()
def fully_padded_row_with_a_safe_softmax():
    """The row that is all padding gets a finite mask value, and its output is put to zero."""

    class Safe(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.head = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x, pad):
            scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(8)
            scores = scores.masked_fill(pad[:, None], -1e9)
            mixed = scores.softmax(-1) @ self.v(x)
            return self.head(mixed.masked_fill(pad[..., None], 0.0)).sum(1)

    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[1], pad[2, 3:] = True, True
    return Built(Safe(), (torch.randn(3, 5, 8), pad), mse(3, 8))


@HEALTHY()
def nan_row_contained():
    """A softmax over nothing gives NaN, and a where selects zeros instead, on both ways."""

    class Contained(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.value, self.head = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, pad):
            scores = self.score(x).squeeze(-1).masked_fill(pad, -math.inf)
            empty = pad.all(dim=1, keepdim=True)
            weights = scores.masked_fill(empty, 0.0).softmax(dim=1).masked_fill(empty, 0.0)
            return self.head((weights[..., None] * self.value(x)).sum(1))

    pad = torch.zeros(4, 5, dtype=torch.bool)
    pad[2], pad[0, 3:] = True, True
    return Built(Contained(), (torch.randn(4, 5, 6), pad), xent(4, 3))


@HEALTHY()
def sdpa_with_a_fully_masked_row():
    class Sdpa(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x, keep):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=keep).mean(1))

    keep = torch.ones(4, 5, 5, dtype=torch.bool)
    keep[1, 2] = False
    return Built(Sdpa(), (torch.randn(4, 5, 8), keep), xent(4, 3))


@HEALTHY()
def log_space_chain_with_unreachable_states():
    """Tables with -inf in which each column has a way in."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.emit = nn.Linear(4, 3)
            closed = -math.inf
            self.register_buffer("hop", torch.tensor([[0.0, 0.0, closed], [closed, 0.0, 0.0], [0.0, closed, 0.0]]))

        def forward(self, x):
            emit = torch.log_softmax(self.emit(x), dim=-1)
            score = emit[:, 0]
            for t in range(1, 4):
                score = torch.logsumexp(score.unsqueeze(2) + self.hop, dim=1) + emit[:, t]
            return score

    return Built(Chain(), (torch.randn(4, 4, 4),), lambda score: -torch.logsumexp(score, 1).mean())


@HEALTHY()
def policy_with_forbidden_actions():
    net = Net(
        lambda self, x, legal: torch.log_softmax(self.pi(F.relu(self.body(x))).masked_fill(~legal, -math.inf), dim=-1),
        body=nn.Linear(6, 32), pi=nn.Linear(32, 5),
    )  # fmt: skip
    legal = torch.ones(16, 5, dtype=torch.bool)
    legal[:, 3] = False
    taken, gain = torch.randint(0, 3, (16, 1)), torch.randn(16, 1)
    return Built(net, (torch.randn(16, 6), legal), lambda logp: -(logp.gather(1, taken) * gain).mean())


@HEALTHY()
def message_passing():
    return Built(Graph(), (torch.randn(12, 16),), xent(12, 4))


@HEALTHY()
def block_without_attention_bias():
    block = Block(16)
    for part in (block.attn.q, block.attn.k, block.attn.v):
        part.bias = None
    net = Net(lambda self, x: self.head(self.block(x).mean(1)), block=block, head=nn.Linear(16, 3))
    return Built(net, (torch.randn(4, 6, 16),), xent(4, 3))
