"""What rules did, in the flow: entries that changed, at sites, edges and parameters; and how pictures mark it."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.rules import edges, groups, layers, nodes, parameters
from fxgrad.store import from_json
from tests.rewriting.nets import Shared, Three, batch, grads, make, train


class Skip(nn.Module):
    """A value with two uses, and a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h + torch.tanh(h)


def middle(g: Tensor) -> Tensor:
    """Changes one entry in each row."""
    return torch.where(torch.arange(g.shape[-1]) == 1, 7.0, g)


def record(flow: fxgrad.GradientFlow, name: str) -> Any:
    return next(one for one in flow.parameters if one.name == name)


# ---- sites and edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_site_says_what_each_rule_changed_in_this_event(capture: Any) -> None:
    model, x = make(Three), torch.randn(4, 1)
    made = [
        rules.custom(middle, nodes("fc2"), name="middle"),
        rules.custom(lambda g: g.clone(), nodes("fc2"), name="copy"),
        rules.scale(2.0, nodes("fc2"), rules.steps(9)),
    ]
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model, capture=capture) as watch:
        for _ in range(3):
            grads(model, x)
    for flow in watch.history:
        rewritten = flow.site("fc2").rewritten
        assert rewritten.rules == ("middle", "copy", "scale(2)")
        assert (rewritten.ran, rewritten.fired, rewritten.changed) == ((1, 1, 0), (1, 0, 0), (4, 0, 0))
    assert from_json(watch.flow().to_json()) == watch.flow()


def test_each_backward_pass_through_a_call_counts() -> None:
    model, x = make(Three), torch.randn(4, 1)
    rule = rules.custom(middle, nodes("fc2"))
    with fxgrad.rewrite(model, rule, audit="full"), fxgrad.watch(model) as watch:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        rewritten = watch.flow().site("fc2").rewritten
    assert (rewritten.ran, rewritten.fired, rewritten.changed) == ((2,), (2,), (8,))


def test_without_a_full_audit_nothing_is_counted() -> None:
    model, x = make(Three), torch.randn(4, 1)
    counted = rules.custom(middle, nodes("fc2"), name="counted")
    with (
        fxgrad.rewrite(model, rules.scale(2.0, nodes("fc*"))),
        fxgrad.rewrite(model, counted, audit="full"),
        fxgrad.watch(model) as watch,
    ):
        grads(model, x)
    assert (watch.flow().site("fc1").rewritten.fired, watch.flow().site("fc1").rewritten.changed) == ((), ())
    assert watch.flow().site("fc2").rewritten.changed == (None, 4)


@pytest.mark.parametrize("sites", ["node", "edge"])
def test_an_edge_says_which_rules_ran_there(sites: Any) -> None:
    model = make(Skip)
    made = [rules.zero_out(edges("fc", "/tanh")), rules.scale(2.0, edges("fc"))]
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model, sites=sites) as watch:
        model(torch.ones(2, 4)).sum().backward()
        flow = watch.flow()
    told = {edge.consumer.key: edge.rewritten for edge in flow.edges if edge.producer == "fc"}
    tanh, add = told["/tanh"], told["/add"]
    assert (tanh.rules, tanh.ran, tanh.fired, tanh.changed) == (("zero_out", "scale(2)"), (1, 1), (1, 0), (8, 0))
    assert (add.rules, add.ran, add.fired, add.changed) == (("scale(2)",), (1,), (1,), (8,))
    part = float((1 - torch.tanh(model.fc(torch.ones(2, 4))).square()).norm().detach())
    assert tanh.before.l2_norm == pytest.approx(part)
    assert tanh.norms_before == (pytest.approx(part), 0.0)
    assert (tanh.after.l2_norm, tanh.norms_after, tanh.reason) == (0.0, (0.0, 0.0), None)
    assert (add.before.l2_norm, add.after.l2_norm) == (pytest.approx(8**0.5), pytest.approx(2 * 8**0.5))
    assert all(edge.rewritten is None for edge in flow.edges if edge.producer != "fc")
    assert from_json(flow.to_json()) == flow
    if sites == "edge":  # what the rule made of a part is what was measured of it
        assert {e.consumer.key: e.l2_norm for e in flow.edges if e.producer == "fc"}["/tanh"] == 0.0


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["step", "backward", "arrival"])
def test_a_parameter_says_what_rules_did_from_this_call_to_the_next(per: Any) -> None:
    model = make(Three)
    rule = rules.custom(middle, parameters("fc2.weight", per=per), name="middle")
    with fxgrad.rewrite(model, rule, audit="full"), fxgrad.watch(model) as watch:
        train(model, 3)
        train(model, 1, micro=2)
    history = watch.history
    told = [record(flow, "fc2.weight").rewritten for flow in history]
    assert all(one.rules == ("middle",) for one in told)
    each = [1, 1, 1, 0, 1] if per == "step" else [1] * 5  # the step behind two micro-batches comes after the second
    assert [one.ran for one in told] == [(count,) for count in each]
    assert [one.changed for one in told] == [(3 * count,) for count in each]
    for one, count in zip(told, each, strict=True):
        assert (one.reason is None) == bool(count)
        if count:
            assert one.after.l2_norm > 7
            assert one.before.l2_norm == pytest.approx(one.norms_before[0])
            assert one.after.l2_norm == pytest.approx(one.norms_after[0])
        else:
            assert (one.before, one.after, one.norms_after) == (None, None, (None,))
            assert one.reason.startswith("no gradient came to the rules between this forward call and the next")
    assert record(history[0], "fc1.weight").rewritten is None
    assert from_json(history[0].to_json()) == history[0]


def test_layers_and_groups_count_all_their_parameters() -> None:
    model = make(Three)
    made = [rules.fill_zero(), rules.scale(2.0, groups(""))]
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, made):
        train(model, 2)
    told = record(watch.flow(), "fc3.bias").rewritten
    assert (told.rules, told.ran, told.changed) == (("fill_zero(1, 0.5)", "scale(2)"), (1, 1), ())
    assert told.after.l2_norm == pytest.approx(2 * told.before.l2_norm)
    assert told.norms_before == ()  # those of each rule are counted with audit="full" only


def test_a_tied_parameter_has_a_line_for_each_of_its_layers() -> None:
    model = make(Shared)
    with fxgrad.rewrite(model, rules.scale(2.0, layers()), audit="full"), fxgrad.watch(model) as watch:
        train(model, 1)
    told = record(watch.flow(), "a.weight").rewritten
    assert (told.rules, told.ran) == (("scale(2)", "scale(2)"), (1, 1))
    assert record(watch.flow(), "a.bias").rewritten.rules == ("scale(2)",)


def test_steps_behind_calls_that_are_not_observed_belong_to_no_flow() -> None:
    model = make(Three)
    rule = rules.scale(2.0, parameters("fc2.weight"))
    with fxgrad.rewrite(model, rule), fxgrad.watch(model, every=3) as watch:
        train(model, 6)
    assert [record(flow, "fc2.weight").rewritten.ran for flow in watch.history] == [(1,), (1,)]


def test_a_flow_is_read_after_the_rewrite_is_gone() -> None:
    model = make(Three)
    with fxgrad.watch(model) as watch:
        with fxgrad.rewrite(model, rules.scale(2.0, parameters("fc3.*")), audit="full"):
            train(model, 1)
        train(model, 1)
    first, second = watch.history
    assert record(first, "fc3.bias").rewritten.changed == (1,)
    assert record(second, "fc3.bias").rewritten is None


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_and_tables_mark_edges_and_parameters() -> None:
    model = make(Skip)
    made = [rules.zero_out(edges("fc", "/tanh")), rules.scale(2.0, parameters("fc.weight", per="backward"))]
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model) as watch:
        model(torch.ones(2, 4)).sum().backward()
        flow = watch.flow()
    flow = dataclasses.replace(flow, nodes=tuple(
        dataclasses.replace(node, parameters=("fc.weight", "fc.bias")) if node.key == "fc" else node
        for node in flow.nodes
    ))  # fmt: skip
    dot = flow.to_dot()
    assert "fc -> /tanh args[0], rewritten by zero_out (8 entries changed)" in dot.replace("-&gt;", "->")
    assert "style=dashed" in dot
    assert "rewritten: fc.weight" in dot
    assert "fc.weight: rewritten by scale(2) (16 entries changed)" in dot
    assert "rewritten by a rule" in dot
    assert flow.to_networkx().edges["fc", "/tanh"]["rewritten_by"] == "zero_out"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(flow.table())
    assert "rewritten besides sites: 1 edge, 1 parameter" in " ".join(console.export_text().split())
    plain = fxgrad.gradient_flow(make(Three), batch(make(Three))[0])
    assert "rewritten" not in plain.to_dot()
