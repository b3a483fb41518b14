"""Functions, methods and operators between modules, which module hooks never see."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import case, normal


class Base(nn.Module):
    """One linear map to start with, so that every model has a parameter."""

    def __init__(self, wide: int = 6) -> None:
        super().__init__()
        self.fc = nn.Linear(6, wide)


def operators_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("fc", model.fc(at("input:x", x)))
    a = at("/sub", h - 1.0)
    b = at("/sub#1", 2.0 - h)
    c = at("/neg", -h)
    d = at("/div", a / 2.0)
    e = at("/div#1", 1.0 / at("/add", at("/pow", b**2) + 1.0))
    f = at("/matmul", c @ at("/T", c.T))
    return at("/add#1", at("/mul", d * e) + at("/mul#1", 0.5 * at("/mean", f.mean())))


@case("operators", normal(4, 6), twin=operators_twin)
class Operators(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        a = h - 1.0
        b = 2.0 - h
        c = -h
        d = a / 2.0
        e = 1.0 / (b**2 + 1.0)
        f = c @ c.T
        return d * e + 0.5 * f.mean()


@case("slices", normal(4, 6))
class Slices(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        left, right, step = h[:, :3], h[:, 3:], h[..., ::2]
        stacked = torch.stack([left, right, step], dim=1)
        return torch.cat([stacked[:, 0], h[:, -1:]], dim=-1) * h[0, 0]


def chunk_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    parts = model.fc(at("input:x", x))
    first, second = at("fc", parts).chunk(2, dim=-1)
    value, gate = at("/chunk[0]", first), at("/chunk[1]", second)
    return at("/mul", value * at("/sigmoid", gate.sigmoid()))


@case("chunk", normal(4, 6), twin=chunk_twin)
class Chunk(Base):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc(x).chunk(2, dim=-1)
        return value * gate.sigmoid()


def split_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    first, second, third = at("fc", model.fc(at("input:x", x))).split([1, 2, 3], dim=1)
    first, second, third = at("/split[0]", first), at("/split[1]", second), at("/split[2]", third)
    rows = [at(f"/unbind[{n}]", row) for n, row in enumerate(third.unbind(1))]
    return at("/add#1", at("/add", at("/mul", first * second) + at("/unsqueeze", rows[0].unsqueeze(1))) + 1)


@case("split_unbind", normal(4, 6), twin=split_twin)
class SplitUnbind(Base):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.split(self.fc(x), [1, 2, 3], dim=1)
        one, _, _ = third.unbind(1)
        return first * second + one.unsqueeze(1) + 1


@case("where_clamp", normal(4, 6))
class WhereClamp(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = torch.where(h > 0, h, 0.1 * h)
        return h.clamp(-0.5, 0.8).masked_fill(x > 1, 0.0)


@case("einsum", normal(2, 4, 6))
class Einsum(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        scores = torch.einsum("bid,bjd->bij", h, h)
        return torch.einsum("bij,bjd->bid", F.softmax(scores, dim=-1), h)


@case("attention_by_hand", normal(2, 4, 6))
class AttentionByHand(Base):
    def __init__(self) -> None:
        super().__init__(18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fc(x).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 6**0.5, dim=-1)
        fused = F.scaled_dot_product_attention(q, k, v)
        return torch.bmm(weights, v) + fused


def shapes_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("fc", model.fc(at("input:x", x)))
    h = at("/view", h.view(4, 2, 3))
    h = at("/permute", h.permute(1, 0, 2))
    h = at("/transpose", h.transpose(0, 1))
    h = at("/contiguous", h.contiguous()) if not h.is_contiguous() else at.same("/contiguous", h)
    h = at("/squeeze", at("/unsqueeze", h.unsqueeze(0)).squeeze(0))
    h = at("/flatten", h.flatten(1))
    h = at("/reshape", h.reshape(2, 12))
    return at("/expand", h.expand(3, 2, 12))


@case("shapes", normal(4, 6), twin=shapes_twin)
class Shapes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).view(4, 2, 3).permute(1, 0, 2).transpose(0, 1).contiguous()
        h = h.unsqueeze(0).squeeze(0)
        h = torch.flatten(h, 1).reshape(2, 12)
        return h.expand(3, 2, 12)


def fan_out_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("fc", model.fc(at("input:x", x)))
    twice = at("/add", h + h)
    return at("/mul", twice * at("/sin", torch.sin(h)))


@case("fan_out", normal(4, 6), twin=fan_out_twin)
class FanOut(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        twice = h + h
        return twice * torch.sin(h)


@case("parameters_direct", normal(4, 6))
class ParametersDirect(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.scale = nn.Parameter(torch.ones(()))
        self.tokens = nn.ParameterList([nn.Parameter(torch.randn(1, 6)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.fc(x), self.tokens[0], self.tokens[1] * 2])
        return F.linear(h, self.weight) * self.scale


@case("buffers", normal(4, 6))
class Buffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x - self.mean) * self.mask) * self.mask


def spectral_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    spectrum = at("/fft_rfft", torch.fft.rfft(at("input:x", x), dim=-1))
    mixed = at("/mul", spectrum * model.filter)
    return at("fc", model.fc(at("/fft_irfft", torch.fft.irfft(mixed, n=6, dim=-1))))


@case("spectral", normal(3, 6, grad=True), twin=spectral_twin)
class Spectral(Base):
    def __init__(self) -> None:
        super().__init__(2)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=-1)
        return self.fc(torch.fft.irfft(spectrum * self.filter, n=6, dim=-1))


@case("complex_parts", normal(4, 6))
class ComplexParts(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        z = torch.complex(h, torch.ones_like(h))
        return (z * z.conj()).real + z.imag + z.abs() + torch.view_as_real(z).sum(-1)


def scalars_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("fc", model.fc(at("input:x", x)))
    norm = at("/add", at("/norm", h.norm()) + 1.0)
    return at("/mean", at("/div", h / norm).mean())


@case("scalars", normal(4, 6), loss=lambda output: output, twin=scalars_twin)
class Scalars(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return (h / (h.norm() + 1.0)).mean()


@case("reductions", normal(4, 6))
class Reductions(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x)
        largest, _ = h.max(dim=1)
        return largest, h.amax(0), h.std(dim=1), h.var(), torch.logsumexp(h, 1), h.prod(1), torch.median(h)


@case("activations", normal(4, 6))
class Activations(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = F.silu(h) + F.gelu(h, approximate="tanh") + F.softplus(h) + F.elu(h) + F.hardswish(h)
        return torch.exp(-h.abs()) + torch.log1p(h.square()) + torch.sqrt(h.pow(2) + 1e-3)


@case("indexing", lambda: (torch.randn(4, 6), torch.tensor([[0, 2], [1, 1], [5, 3], [4, 0]])))
class Indexing(Base):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.fc(x)
        picked = h.gather(1, index) + h.index_select(0, index[:, 0] % 4)[:, :2]
        return picked + torch.roll(h, 1, dims=1)[:, :2] + h.flip(1).cumsum(1)[:, :2]


@case("sort_topk", normal(4, 6))
class SortTopk(Base):
    def forward(self, x: Tensor) -> Tensor:
        values, order = torch.topk(self.fc(x), 3, dim=1)
        return torch.sort(values, dim=1)[0] * order


@case("cosine", normal(4, 6))
class Cosine(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.fc(x), dim=1)
        return F.cosine_similarity(h, x, dim=1) + (h * x).sum(1)


@case("loss_inside", lambda: (torch.randn(4, 6), torch.tensor([0, 1, 2, 5])), loss=lambda output: output["loss"])
class LossInside(Base):
    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.fc(x)
        return {"loss": F.cross_entropy(logits, target, label_smoothing=0.1), "logits": logits}


def detach_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("/tanh", torch.tanh(at("fc", model.fc(at("input:x", x)))))
    stopped = at("/detach", h.detach())
    return at("/add", at("head", model.head(stopped)) + at("/mul", h * 0.5))


@case("detach", normal(4, 6), twin=detach_twin)
class Detach(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        return self.head(h.detach()) + h * 0.5


def no_grad_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    with torch.no_grad():
        target = at("/tanh", torch.tanh(at("teacher", model.teacher(x))))
    return at("/sub", at("/tanh#1", torch.tanh(at("fc", model.fc(x)))) - target)


@case("no_grad", normal(4, 6), fx="differs", symbolic=None, twin=no_grad_twin)
class NoGrad(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.tanh(self.teacher(x))
        return torch.tanh(self.fc(x)) - target


def frozen_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("/relu", F.relu(at("frozen", model.frozen(at("input:x", x)))))
    return at("fc", model.fc(h))


@case("frozen", normal(4, 6), twin=frozen_twin)
class Frozen(Base):
    def __init__(self) -> None:
        super().__init__(2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.frozen(x)))
