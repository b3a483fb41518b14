"""Values changed in place: by methods, by operators, by modules, through aliases and through views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import case, normal


class Pair(nn.Module):
    """Two linear maps and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)


def mul_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("/mul_", at("a", model.a(at("input:x", x))) * 3.0)
    return at("head", model.head(at("/sin", torch.sin(h))))


@case("mul_inplace", normal(5, 4), twin=mul_twin)
class MulInplace(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.mul_(3.0)
        return self.head(torch.sin(h))


def alias_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    h = at("/add_", at("a", model.a(x)) + at("b", model.b(x)))
    mixed = at("/add", at("/tanh", torch.tanh(h)) + at("/sigmoid", torch.sigmoid(h)))
    return at("head", model.head(mixed))


@case("alias_iadd", normal(5, 4), fx="differs", symbolic=None, twin=alias_twin)
class AliasIadd(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        keep = h
        h += self.b(x)
        return self.head(torch.tanh(h) + torch.sigmoid(keep))


def methods_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    h = at("a", model.a(x))
    h = at("/add_", h + at("b", model.b(x)) * 0.5)
    h = at("/clamp_", h.clamp(-1.0, 1.0))
    h = at("/sub_", h - 0.25)
    h = at("/div_", h / 2.0)
    h = at("/neg_", -h)
    return at("head", model.head(at("/relu_", F.relu(h))))


@case("inplace_methods", normal(5, 4), twin=methods_twin)
class InplaceMethods(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.add_(self.b(x), alpha=0.5)
        h.clamp_(-1.0, 1.0).sub_(0.25)
        h /= 2.0
        torch.neg_(h)
        return self.head(h.relu_())


def functional_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    h = at("/relu", F.relu(at("a", model.a(x))))
    k = at("/leaky_relu", F.leaky_relu(at("b", model.b(x)), 0.2))
    mixed = at("/mul_", at("/add", h + k) * 0.5)
    return at("head", model.head(at("/elu", F.elu(mixed))))


@case("inplace_functional", normal(5, 4), twin=functional_twin)
class InplaceFunctional(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x), inplace=True)
        k = self.b(x)
        F.leaky_relu(k, 0.2, inplace=True)
        mixed = h + k
        mixed *= 0.5
        return self.head(F.elu(mixed))


def chain_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("1", model[1](at("0", model[0](at("input:input", x)))))
    h = at("3", model[3](at("2", F.relu(h))))
    return at("5", model[5](at("4", F.relu6(h))))


@case("inplace_sequential", normal(5, 4), twin=chain_twin)
def inplace_sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.ReLU6(inplace=True),
        nn.Linear(6, 2),
    )


def early_reader_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    before = at("a", model.a(at("input:x", x)))
    read = at("/sum", before.sum(1, keepdim=True))
    after = at("/add_", before + 1.0)
    return at("head", model.head(at("/mul", at("/cos", torch.cos(after)) * read)))


@case("read_before_change", normal(5, 4), twin=early_reader_twin)
class ReadBeforeChange(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        read = h.sum(1, keepdim=True)
        h += 1.0
        return self.head(h.cos() * read)


def view_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("a", model.a(at("input:x", x)))
    view = at("/view", h.view(-1))
    changed = at("/relu_", F.relu(view))
    return at("head", model.head(changed.view(5, 4)))


@case("view_inplace", normal(5, 4), twin=view_twin, unmeasurable=frozenset({"/view", "/relu_"}))
class ViewInplace(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        flat = h.view(-1)
        flat.relu_()
        return self.head(h)


@case("setitem", normal(5, 4), fx="raises", symbolic=None)
class SetItem(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.zeros_like(h)
        out[:, :2] = h[:, 2:]
        out[:, 2:] = torch.tanh(h[:, :2])
        return self.head(out)


@case("setitem_mask", normal(5, 4), fx="raises", symbolic=None)
class SetItemMask(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        h[h < 0] = 0.0
        h[0] += self.b(x)[0]
        return self.head(h)


@case("accumulator", normal(5, 4))
class Accumulator(Pair):
    def forward(self, x: Tensor) -> Tensor:
        total = self.a(x) * 0
        for factor in (1.0, 2.0, 3.0):
            total += torch.tanh(self.a(x) * factor)
        return self.head(total)


@case("input_changed", normal(5, 4), fx="differs", symbolic=None)
class InputChanged(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        x.mul_(0.5)
        return self.head(torch.relu_(self.a(x)))


@case("zero_fill", normal(5, 4))
class ZeroFill(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        lost = self.b(x)
        lost.zero_()
        return self.head(h + lost + h.detach().clone().fill_(2.0))


@case("backward_error", normal(5, 4), fx="differs", symbolic=None, raises="RuntimeError")
class BackwardError(Pair):
    """``exp`` needs its output for its gradient, so autograd refuses; a trace that adds out of place hides that."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(self.a(x))
        h += 1.0
        return self.head(h)


@case("leaf_error", normal(5, 4, grad=True), fx="differs", symbolic=None, raises="RuntimeError")
class LeafError(Pair):
    """A leaf that requires a gradient must not be changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.head(self.a(x))


@case("multi_view_error", normal(5, 4), symbolic=None, raises="RuntimeError")
class MultiViewError(Pair):
    """One of several views that a call returned must not be changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, dim=1)
        left.mul_(2.0)
        return self.head(torch.cat([left, right], 1))


def gains_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    h = at("/mul", x * 0.5)
    return at("head", model.head(at("/add_", h + at("a", model.a(x)))))


@case("inplace_gains_gradient", normal(5, 4), twin=gains_twin)
class InplaceGainsGradient(Pair):
    """A value that needs no gradient until it is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 0.5
        h.add_(self.a(x))
        return self.head(h)
