"""How edges are chosen: by either end, as nodes are, by argument and by a predicate."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.errors import OptionError, RuleError
from fxgrad.rules import edges, nodes, outputs
from tests.rewriting.nets import make

STEM = {"stem -> left.fc args[0]", "stem -> /tanh args[0]", "stem -> /add args[1]"}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 3), nn.Softsign()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))


class Ways(nn.Module):
    """One value goes to a module, a function and a sum; one consumer works in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.head = nn.Linear(2, 3), Branch(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        wide = torch.tanh(h).double()
        return self.head(self.left(h) + h + wide.float())


@pytest.mark.parametrize(
    ("where", "places"),
    [
        (edges("stem"), STEM),
        (edges(re.compile("st.m")), STEM),
        (edges(nodes("stem")), STEM),
        (edges(outputs("stem")), STEM),
        (edges(nodes(module_type=nn.Linear), nodes(op="add")), {"stem -> /add args[1]"}),
        (edges("stem", "left.*"), {"stem -> left.fc args[0]"}),
        (edges("stem", re.compile(r"left\..*")), {"stem -> left.fc args[0]"}),
        (edges("stem", nodes(op=["tanh", "add"])), {"stem -> /tanh args[0]", "stem -> /add args[1]"}),
        (edges("stem", nodes(op="call_module")), {"stem -> left.fc args[0]"}),
        (edges("stem", nodes(target=torch.tanh)), {"stem -> /tanh args[0]"}),
        (edges(consumer=nodes(module_type="Branch")), {"left.fc -> left/relu args[0]"}),
        (edges("stem", nodes(module_type=nn.Linear)), {"stem -> left.fc args[0]"}),
        (edges(consumer=nodes(dtype=torch.float64)), {"/tanh -> /double args[0]"}),
        (edges(nodes(dtype=torch.float64)), {"/double -> /float args[0]"}),
        (edges("stem", nodes(predicate=lambda site: site.call_index == 0 and "tanh" in site.key)),
         {"stem -> /tanh args[0]"}),
        (edges(nodes(predicate=lambda site: site.shape == (5, 3)), outputs("left")), {"left.fc -> left/relu args[0]"}),
        (edges("stem", argument="args[1]"), {"stem -> /add args[1]"}),
        (edges("stem", argument="args[*"), STEM),
        (edges(argument=re.compile(r"args\[1\]")), {"stem -> /add args[1]", "/float -> /add#1 args[1]"}),
        (edges(predicate=lambda edge: (edge.producer, edge.consumer.key) == ("stem", "/add")),
         {"stem -> /add args[1]"}),
    ],
)  # fmt: skip
def test_selections(where: Any, places: set[str]) -> None:
    model, x = make(Ways), torch.randn(5, 2)
    with fxgrad.rewrite(model, rules.scale(2.0, where)) as rewrite:
        model(x).sum().backward()
    assert {(record.place, record.ran) for record in rewrite.report().records} == {(place, 1) for place in places}


def test_nothing_given_is_every_edge_but_those_that_carry_no_gradient() -> None:
    model = make(Ways)
    with fxgrad.rewrite(model, rules.custom(lambda g: g, edges())) as rewrite:
        model(torch.randn(5, 2)).sum().backward()
    flow = fxgrad.gradient_flow(model, torch.randn(5, 2))
    left = {one.place for one in rewrite.report().not_rewritten}
    assert left == {"input:x -> stem args[0]", "head -> output args[0]"}
    assert len(rewrite.report().records) == len(flow.edges)
    assert all(record.ran == (record.place not in left) for record in rewrite.report().records)


def test_the_graphs_output_is_found_by_its_name_only() -> None:
    model = make(Ways)
    for end in ("output", nodes("output"), nodes(op="output")):
        with fxgrad.rewrite(model, rules.scale(2.0, edges(consumer=end))) as rewrite:  # type: ignore[arg-type]
            model(torch.randn(5, 2)).sum().backward()
        assert [one.place for one in rewrite.report().not_rewritten] == ["head -> output args[0]"]
    with (
        fxgrad.rewrite(model, rules.scale(2.0, edges("head", nodes(predicate=lambda site: bool(site.shape[0]))))),
        pytest.raises(RuleError, match="no such edge"),
    ):
        model(torch.randn(5, 2))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (edges("stm"), r"selects edges\('stm'\), .* near names are 'stem'"),
        (edges("stem", "/tan"), r"selects edges\('stem', '/tan'\), .* near names are '/tanh'"),
        (edges("stem", nodes(op="mul")), r"edges\('stem', nodes\(op='mul'\)\).* go to '/tanh', 'left\.fc', '/add'"),
        (edges(consumer="nowhere"), r"selects edges\(consumer='nowhere'\)"),
        (edges(nodes(dtype=torch.float16)), r"edges\(nodes\(dtype='float16'\)\).* there are \d+ edges"),
        (edges("stem", argument="args[7]"), r"edges\('stem', argument='args\[7\]'\)"),
        (edges(predicate=lambda _: False), r"edges\(predicate=\.\.\.\)"),
    ],
)
def test_a_selection_that_finds_nothing_says_what_there_is(where: Any, words: str) -> None:
    model = make(Ways)
    with fxgrad.rewrite(model, rules.scale(2.0, where)), pytest.raises(RuleError, match=words):
        model(torch.randn(5, 2))


@pytest.mark.parametrize(
    ("make_where", "words"),
    [
        (lambda: edges(3), "a path is text"),
        (lambda: edges("stem", 3), "a path is text"),
        (lambda: edges("stem", argument=1), "a path is text"),
        (lambda: edges(nodes("stem", optional=True)), r"optional=True belongs to edges\(\.\.\., optional=True\)"),
    ],
)
def test_bad_options(make_where: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_where()


def test_optional_edges_may_be_missing() -> None:
    model = make(Ways)
    with fxgrad.rewrite(model, rules.scale(2.0, edges(nodes(op="mul"), optional=True))) as rewrite:
        model(torch.randn(5, 2)).sum().backward()
    assert rewrite.report().records == ()


class Odd(nn.Module):
    """One consumer sends its part back from two places, the other from one."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Softsign()

    def forward(self, x: Tensor) -> Tensor:
        h = x.exp()
        return self.leaf(h) + h.sin()


def test_of_several_edges_those_that_are_no_single_place_are_told() -> None:
    model, x = Odd(), torch.randn(3, requires_grad=True)
    with fxgrad.rewrite(model, rules.zero_out(edges("/exp"))) as rewrite, fxgrad.watch(model) as watch:
        model(x).sum().backward()
        flow = watch.flow()
    why = "the consumer sends its part back from 2 places, not from 1"
    assert [(one.place, one.reason) for one in rewrite.report().not_rewritten] == [("/exp -> leaf args[0]", why)]
    told = {edge.consumer.key: edge.rewritten for edge in flow.edges if edge.producer == "/exp"}
    assert (told["leaf"].before, told["leaf"].after, told["leaf"].reason) == (None, None, why)
    assert (told["/sin"].after.l2_norm, told["/sin"].reason) == (0.0, None)
    h = x.detach().exp().requires_grad_()
    F.softsign(h).sum().backward()
    assert torch.allclose(x.grad, h.grad * h.detach())


def test_a_predicate_that_raises_is_named() -> None:
    def wrong(_: Any) -> bool:
        raise KeyError("x")  # noqa: EM101

    for where in (edges(predicate=wrong), edges(nodes(predicate=wrong)), nodes(predicate=wrong)):
        model = make(Ways)
        words = r"the selection of rule 'scale\(2\)' raised KeyError at '(input:x|stem)[^']*': 'x'"
        with fxgrad.rewrite(model, rules.scale(2.0, where)), pytest.raises(RuleError, match=words):  # type: ignore[arg-type]
            model(torch.randn(5, 2))
