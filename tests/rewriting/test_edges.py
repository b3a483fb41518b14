"""Rules at edges: on what one consumer of a value sends back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError
from fxgrad.rules import edges, nodes
from tests.rewriting.nets import grads, make
from tests.rewriting.test_nodes import Checkpointed

CAPTURES = ("auto", "eager")


class Skip(nn.Module):
    """A branch and a skip, of three dimensions, with an in-place sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out = F.gelu(self.branch(h))
        out += h
        return self.head(out)


def by_hand(model: Any, x: Tensor, *, branch: float = 1.0, skip: float = 1.0) -> dict[str, Tensor]:
    """The same model, with an identity of a scaled gradient on each way."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * ctx.factor, None

    model.zero_grad()
    h = model.stem(x)
    out = F.gelu(model.branch(Scaled.apply(h, branch))) + Scaled.apply(h, skip)
    model.head(out).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("shape", [(5, 2), (4, 5, 2)])
def test_one_way_of_a_skip(capture: Any, shape: tuple[int, ...]) -> None:
    model, x = make(Skip), torch.randn(shape)
    for where, factors in (
        (edges("stem", "branch"), {"branch": 3.0}),
        (edges("stem", "/add_"), {"skip": 3.0}),
        (edges("stem", argument="args[1]"), {"skip": 3.0}),
        (edges("stem"), {"branch": 3.0, "skip": 3.0}),
    ):
        want = by_hand(model, x, **factors)
        with fxgrad.rewrite(model, rules.scale(3.0, where), capture=capture) as rewrite:
            for _ in range(3):
                found = grads(model, x)
                for name, gradient in want.items():
                    assert torch.allclose(found[name], gradient, atol=1e-7), (name, where)
        assert {record.ran for record in rewrite.report().records} == {3}
    found = grads(model, x)
    assert all(torch.equal(found[name], gradient) for name, gradient in by_hand(model, x).items())


def test_with_a_watch_and_rules_at_the_value() -> None:
    model, x = make(Skip), torch.randn(5, 2)
    plain = fxgrad.gradient_flow(model, x, loss=torch.sum)
    made = [
        rules.zero_out(edges("stem", "/add_")),
        rules.zero_out(edges("stem", "branch")),
        rules.fill_zero(where=nodes("stem")),
    ]
    with fxgrad.rewrite(model, made), fxgrad.watch(model, statistics="full") as watch:
        found = grads(model, x)
    assert torch.equal(found["stem.bias"], torch.full((3,), 5.0))  # both parts are zero, then filled with 1
    site = watch.flow().site("stem")
    assert site.statistics.all_zero
    assert site.rewritten.after.max_abs == 1.0
    assert watch.flow().site("/gelu").l2_norm == plain.site("/gelu").l2_norm


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x.exp()
        return (h - h) + F.softmin(h, 0) + h * torch.sigmoid(h)


def test_a_value_that_is_used_twice() -> None:
    model, x = Twice(), torch.randn(4, requires_grad=True)
    with fxgrad.rewrite(model, rules.scale(2.0, edges("/exp", "/sub"))) as rewrite:
        model(x).sum().backward()
    assert [record.place for record in rewrite.report().records] == ["/exp -> /sub args[0]", "/exp -> /sub args[1]"]
    with (
        fxgrad.rewrite(model, rules.scale(2.0, edges("/exp", "/sub", "args[0]"))),
        pytest.raises(RuleError, match=r"args\[0\] alone: the consumer uses this value 2 times"),
    ):
        model(x)


def test_inside_of_a_call_of_several_operations() -> None:
    model, x = Twice(), torch.randn(4, requires_grad=True)
    model(x).sum().backward()
    plain = x.grad.clone()
    x.grad = None
    with fxgrad.rewrite(model, rules.zero_out(edges("/exp", "/softmin"))):
        model(x).sum().backward()
    h = x.detach().exp().requires_grad_()
    F.softmin(h, 0).sum().backward()
    assert torch.allclose(x.grad, plain - h.grad * h.detach(), atol=1e-6)


class Silu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.leaf = nn.Identity(), nn.Softsign()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(self.same(x.exp()))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (edges("/exp", "same"), "sends its part back from 0 places, not from 1"),
        (edges("same", "leaf"), "sends its part back from 2 places"),
        (edges("/epx"), "no such edge; near names are '/exp'"),
        (edges("/exp", "nowhere"), "selects edges.*no such edge"),
    ],
)
def test_what_is_refused(where: Any, words: str) -> None:
    model = Silu()
    with fxgrad.rewrite(model, rules.scale(2.0, where)), pytest.raises(RuleError, match=words):
        model(torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint_an_edge_is_rewritten_once_or_told(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant=reentrant), torch.randn(4, 2)
    plain = grads(model, x)
    rule = [rules.scale(3.0, edges("block.0", "block.1")), rules.scale(5.0, edges("block.1", "c"))]
    with fxgrad.rewrite(model, rule) as rewrite, fxgrad.watch(model) as watch:
        for _ in range(2):
            found = grads(model, x)
        flow = watch.flow()
    inside = 1.0 if reentrant else 3.0  # a reentrant checkpoint has no graph there before the backward pass
    for name, factor in (("c.bias", 1.0), ("block.0.bias", 5 * inside), ("a.bias", 5 * inside)):
        assert torch.allclose(found[name], factor * plain[name]), name
    told = next(edge.rewritten for edge in flow.edges if edge.producer == "block.0")
    assert [one.place for one in rewrite.report().not_rewritten] == ["block.0 -> block.1 args[0]"] * reentrant
    assert told.reason == ("no gradient is passed back there that a hook can see" if reentrant else None)


def test_a_leaf_and_the_output_are_told() -> None:
    model = Silu()
    rule = [rules.scale(2.0, edges("input:x")), rules.scale(2.0, edges("leaf", "output"))]
    with fxgrad.rewrite(model, rule) as rewrite:
        model(torch.randn(3, requires_grad=True)).sum().backward()
    places = [one.place for one in rewrite.report().not_rewritten]
    assert places == ["input:x -> /exp args[0]", "leaf -> output args[0]"]


def test_the_contract_holds_at_edges() -> None:
    model = Silu()
    with (
        fxgrad.rewrite(model, rules.custom(lambda g: g.sum(), edges("/exp", "same"), name="mine")),
        pytest.raises(RuleError),
    ):
        model(torch.randn(3, requires_grad=True)).sum().backward()
    other, x = make(Skip), torch.randn(5, 2)
    with (
        fxgrad.rewrite(other, rules.custom(lambda g: g.sum(), edges("stem", "branch"), name="mine")),
        pytest.raises(RuleError, match=r"rule 'mine' at 'stem -> branch args\[0\]' must return"),
    ):
        grads(other, x)
