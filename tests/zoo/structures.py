"""Inputs and outputs of every shape, recurrent and attention modules, shared and unused parts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import case, normal


class Trunk(nn.Module):
    """A linear body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)


@case("tuple_output", normal(4, 3))
class TupleOutput(Trunk):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.body(x))
        return self.head(h), h


def dict_twin(model: Any, at: Any, x: Tensor) -> dict[str, Any]:
    h = at("/tanh", torch.tanh(at("body", model.body(at("input:x", x)))))
    return {"logits": at("head", model.head(h)), "aux": at("/mul", h * 2.0), "step": 7}


@case(
    "dict_output",
    normal(4, 3, grad=True),
    twin=dict_twin,
    loss=lambda output: output["logits"].square().mean(),
)
class DictOutput(Trunk):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.body(x))
        return {"logits": self.head(h), "aux": h * 2.0, "step": 7}


@case("nested_output", normal(4, 3))
class NestedOutput(Trunk):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x)
        return {"hidden": [h, (h.mean(), None)], "head": {"logits": self.head(h)}, "name": "nested"}


@dataclass
class Prediction:
    """Output of a model that returns a dataclass."""

    logits: Tensor
    hidden: Tensor | None = None


class Scored(NamedTuple):
    """Output of a model that returns a named tuple."""

    logits: Tensor
    score: Tensor


@case("dataclass_output", normal(4, 3), symbolic=None)
class DataclassOutput(Trunk):
    def forward(self, x: Tensor) -> Prediction:
        h = self.body(x).relu()
        return Prediction(self.head(h), h)


@case("namedtuple_output", normal(4, 3), symbolic=None)
class NamedTupleOutput(Trunk):
    def forward(self, x: Tensor) -> Scored:
        logits = self.head(self.body(x))
        return Scored(logits, logits.softmax(-1).amax(-1))


@case("ordered_output", normal(4, 3), fx="differs", symbolic=None)
class OrderedOutput(Trunk):
    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        found: OrderedDict[str, Tensor] = OrderedDict()
        found["out"] = self.head(self.body(x))
        return found


def keywords_inputs() -> dict[str, Any]:
    return {"mask": torch.tensor([[1.0], [0.0], [1.0], [1.0]]), "scale": torch.tensor(2.0, requires_grad=True)}


def keywords_twin(model: Any, at: Any, x: Tensor, y: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    x, y = at("input:x", x), at("input:y", y)
    mask, scale = at("input:mask", mask), at("input:scale", scale)
    h = at("/add", at("body", model.body(x)) + at("body#1", model.body(y)))
    return at("head", model.head(at("/mul#1", at("/mul", h * mask) * scale)))


@case(
    "keywords",
    lambda: (torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)),
    keywords=keywords_inputs,
    twin=keywords_twin,
)
class Keywords(Trunk):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return self.head((self.body(x) + self.body(y)) * mask * scale)


@case("optional_input", normal(4, 3), fx="differs", symbolic=None)
class OptionalInput(Trunk):
    """An argument with a default that ``forward`` branches on: a trace bakes one branch in."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.body(x)
        if mask is not None:
            h = h * mask
        return self.head(h)


@case("list_input", lambda: ([torch.randn(2, 3), torch.randn(2, 3)],), symbolic=None)
class ListInput(Trunk):
    def forward(self, images: list[Tensor]) -> Tensor:
        return self.head(torch.cat([self.body(images[0]), self.body(images[1])]))


@case("variadic", lambda: (torch.randn(2, 3), torch.randn(2, 3)), symbolic=None, fx="raises")
class Variadic(Trunk):
    def forward(self, *views: Tensor) -> Tensor:
        return self.head(torch.stack([self.body(view) for view in views]).mean(0))


def lstm_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    sequence, (hidden, cell) = model.lstm(at("input:x", x))
    at("lstm[0]", sequence)
    hidden = at("lstm[1][0]", hidden)
    at("lstm[1][1]", cell)
    return at("head", model.head(at("/getitem", hidden[-1])))


@case("lstm", normal(4, 5, 3), twin=lstm_twin)
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[-1])


def gru_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    sequence, hidden = model.gru(at("input:x", x))
    sequence = at("gru[0]", sequence)
    at("gru[1]", hidden)
    return at("/mean", at("head", model.head(sequence)).mean(1))


@case("gru", normal(4, 5, 3), twin=gru_twin)
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.gru(x)
        return self.head(sequence).mean(dim=1)


@case("lstm_cell", normal(4, 3, 3), symbolic=None)
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        for step in range(1, 3):
            state = self.cell(x[:, step], state)
        return self.head(state[0])


@case("multihead_attention", normal(2, 4, 8), symbolic=None)
class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.norm(x + mixed)


@case("encoder_layer", normal(2, 4, 8), fx="raises", symbolic=None)
def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


@case("encoder", normal(2, 4, 8), symbolic=None, fx="raises")
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def embedding_twin(model: Any, at: Any, tokens: Tensor) -> Tensor:
    h = at("embed", model.embed(tokens))
    return at("head", model.head(at("/mean", h.mean(dim=1))))


@case("embedding", lambda: (torch.randint(0, 7, (3, 4)),), twin=embedding_twin)
class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(dim=1))


@case("sparse_embedding", lambda: (torch.randint(0, 7, (3, 4)),))
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(7, 5, sparse=True), nn.EmbeddingBag(7, 5, mode="sum", sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).mean(1) * self.bag(tokens)


@case("tied_weights", lambda: (torch.randint(0, 7, (3, 4)),))
class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


@case("siamese", lambda: (torch.randn(4, 3), torch.randn(4, 3)))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(left), self.encoder(right))


@case("unused_head", normal(4, 3))
class UnusedHead(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        self.spare(h)
        return self.head(h)


@case("two_names", normal(4, 6))
class TwoNames(nn.Module):
    """One module registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.acts = nn.ModuleList([nn.ReLU(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.acts[1](self.acts[0](self.first(x))))


@case("nested_modules", normal(4, 6))
def nested_modules() -> nn.Module:
    def block(depth: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(fc=nn.Linear(6, 6), act=nn.GELU())
        if depth:
            layers["inner"] = block(depth - 1)
        return nn.Sequential(layers)

    return block(3)


@case("double_precision", lambda: (torch.randn(4, 6, dtype=torch.float64),))
def double_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@case("bfloat16", lambda: (torch.randn(4, 6, dtype=torch.bfloat16),))
def bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)).bfloat16()
