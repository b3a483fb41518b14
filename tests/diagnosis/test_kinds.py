"""One word for an operation, however the user wrote it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # as everybody writes it
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis.kinds import constant, kind_of
from fxgrad.schema import Constant, Node


class Wrapped(nn.Module):
    """A function as a model of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1.0)


POSITIVE = (
    (F.relu, "relu"),
    (lambda x: F.relu(x, inplace=True), "relu"),
    (torch.relu, "relu"),
    (torch.relu_, "relu"),
    (lambda x: x.relu(), "relu"),
    (lambda x: x.relu_(), "relu"),
    (F.relu_, "relu"),
    (F.relu6, "relu6"),
    (F.leaky_relu, "leaky_relu"),
    (lambda x: torch.clamp(x, 0.1, 0.5), "clamp"),
    (lambda x: x.clip(0.1, 0.5), "clamp"),
    (lambda x: x.clamp_(min=0.1), "clamp"),
    (F.hardtanh, "clamp"),
    (torch.sigmoid, "sigmoid"),
    (F.sigmoid, "sigmoid"),
    (torch.special.expit, "sigmoid"),
    (lambda x: x.tanh(), "tanh"),
    (lambda x: F.softmax(x, -1), "softmax"),
    (lambda x: x.softmax(-1), "softmax"),
    (lambda x: torch.special.softmax(x, -1), "softmax"),
    (lambda x: F.log_softmax(x, -1), "log_softmax"),
    (lambda x: x @ x.T, "matmul"),
    (lambda x: torch.mm(x, x.T), "matmul"),
    (lambda x: torch.einsum("ab,cb->ac", x, x), "matmul"),
    (lambda x: x / 3, "div"),
    (lambda x: torch.true_divide(x, 3), "div"),
    (lambda x: 3 / x, "div"),
    (lambda x: x * 3, "mul"),
    (lambda x: x.mul_(3), "mul"),
    (lambda x: x + 3, "add"),
    (lambda x: x**0.5, "pow"),
    (lambda x: x.square(), "pow"),
    (torch.linalg.vector_norm, "norm"),
    (lambda x: x.norm(), "norm"),
    (lambda x: x.std(), "std"),
    (lambda x: F.dropout(x, 0.5), "dropout"),
    (lambda x: F.linear(x, x), "linear"),
    (lambda x: F.layer_norm(x, (4,)), "layer_norm"),
    (lambda x: x.round(), "round"),
    (lambda x: torch.cat([x, x]), "cat"),
    (lambda x: torch.concat([x, x]), "cat"),
    (lambda x: F.scaled_dot_product_attention(x, x, x), "attention"),
)


@pytest.mark.parametrize(("function", "kind"), POSITIVE)
def test_spellings_in_a_real_graph(function: Callable[[Tensor], Tensor], kind: str) -> None:
    torch.manual_seed(0)
    x = (torch.rand(4, 4) + 0.1).requires_grad_()
    flow = fxgrad.gradient_flow(Wrapped(function), x, capture="eager")
    assert [kind_of(node) for node in flow.nodes[2:-1]][-1] == kind


MODULES = (
    (nn.ReLU(), "relu"),
    (nn.ReLU6(), "relu6"),
    (nn.Hardtanh(), "clamp"),
    (nn.Sigmoid(), "sigmoid"),
    (nn.Tanh(), "tanh"),
    (nn.Softmax(-1), "softmax"),
    (nn.LogSoftmax(-1), "log_softmax"),
    (nn.LeakyReLU(), "leaky_relu"),
    (nn.GELU(), "gelu"),
    (nn.SiLU(), "silu"),
    (nn.ELU(), "elu"),
    (nn.Dropout(), "dropout"),
    (nn.Dropout2d(), "dropout"),
    (nn.Linear(2, 2), "linear"),
    (nn.Conv1d(1, 1, 1), "conv"),
    (nn.Conv2d(1, 1, 1), "conv"),
    (nn.ConvTranspose2d(1, 1, 1), "conv"),
    (nn.BatchNorm1d(2), "batch_norm"),
    (nn.SyncBatchNorm(2), "batch_norm"),
    (nn.LayerNorm(2), "layer_norm"),
    (nn.GroupNorm(1, 2), "group_norm"),
    (nn.RMSNorm(2), "rms_norm"),
    (nn.MaxPool2d(2), "max_pool"),
    (nn.AvgPool1d(2), "avg_pool"),
    (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool"),
    (nn.Embedding(2, 2), "embedding"),
    (nn.EmbeddingBag(2, 2), "embedding"),
    (nn.MultiheadAttention(2, 1), "attention"),
    (nn.Identity(), "identity"),
)


@pytest.mark.parametrize(("module", "kind"), MODULES, ids=lambda one: type(one).__name__)
def test_leaf_modules(module: nn.Module, kind: str) -> None:
    node = Node("body.0", "body_0", "call_module", "body.0", "body.0", type(module).__name__, 0, None)
    assert kind_of(node) == kind


@pytest.mark.parametrize("name", ["LazyLinear", "LazyConv2d", "LazyBatchNorm1d"])
def test_lazy_modules_are_what_they_become(name: str) -> None:
    lazy = Node("a", "a", "call_module", "a", "a", name, 0, None)
    eager = Node("a", "a", "call_module", "a", "a", name.removeprefix("Lazy"), 0, None)
    assert kind_of(lazy) == kind_of(eager) != name.lower()


@pytest.mark.parametrize("op", ["placeholder", "output", "external"])
def test_what_is_no_call_is_called_by_its_opcode(op: str) -> None:
    assert kind_of(Node("relu", "relu", op, "relu", "", "Net", 0, None)) == op


def test_later_calls_are_of_the_same_kind() -> None:
    node = Node("block/relu_#12", "relu_12", "call_method", "relu_", "block", "Net", 12, None)
    assert kind_of(node) == "relu"


def test_constants_by_any_of_their_names() -> None:
    eps = Constant("kwargs['eps']", "1e-05", 1e-5)
    node = Node("/f", "f", "call_function", "f", "", "Net", 0, None, constants=(Constant("args[1]", "3", 3.0), eps))
    assert constant(node, "eps") is eps
    assert constant(node, "args[2]", "args[1]") == Constant("args[1]", "3", 3.0)
    assert constant(node, "min") is None
