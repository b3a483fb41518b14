"""Rules and a watch on one model: the flow has the norms before and after, and pictures mark what was rewritten."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import fxgrad
from fxgrad import rules
from fxgrad.rules import nodes, parameters
from fxgrad.store import from_json
from tests.rewriting.nets import Three, batch, grads, make, same, train

CAPTURES = ("auto", "eager")


def watched(capture: Any = "auto", level: Any = "full", steps: int = 3) -> fxgrad.GradientFlow:
    model = make(Three)
    made = [rules.scale(10.0, nodes("fc3")), rules.clip_by_norm(0.5, nodes("fc3"))]
    with fxgrad.rewrite(model, made), fxgrad.watch(model, capture=capture, statistics=level) as watch:
        train(model, steps)
    return watch.flow()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("level", ["norm", "full"])
def test_norms_before_and_after(capture: Any, level: Any) -> None:
    model = make(Three)
    arrived: list[float] = []

    def look(g: torch.Tensor) -> None:
        arrived.append(float(g.norm()))

    made = [rules.custom(look, nodes("fc3")), rules.scale(10.0, nodes("fc3"))]
    with fxgrad.watch(model, capture=capture, statistics=level) as watch, fxgrad.rewrite(model, made):
        for _ in range(3):
            grads(model, batch(model)[0])
            site = watch.flow().site("fc3")
            assert site.l2_norm == pytest.approx(arrived[-1])
            assert site.rewritten.rules == ("look", "scale(10)")
            assert site.rewritten.ran == (1, 1)
            assert site.rewritten.after.l2_norm == pytest.approx(10 * arrived[-1])
            assert site.rewritten.after.level == level
            assert site.passed_on is site.rewritten.after
            assert watch.flow().site("fc1").rewritten is None
            assert len(watch.flow().sites) == 6
    assert watch.flow().capture.front_end == "eager"


def test_rules_that_do_not_run_yet_are_named() -> None:
    model = make(Three)
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, rules.scale(2.0, nodes("fc2"), rules.steps(9))):
        train(model, 1)
        rewritten = watch.flow().site("fc2").rewritten
        assert rewritten.ran == (0,)
        assert rewritten.after.l2_norm == watch.flow().site("fc2").l2_norm
    model.requires_grad_(True)
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, rules.scale(2.0, nodes("input:x"))):
        train(model, 1)
        nothing = watch.flow().site("input:x").rewritten
        assert (nothing.ran, nothing.before, nothing.after) == ((0,), None, None)
        assert nothing.reason == "no gradient came to the rules in this backward pass"


@pytest.mark.parametrize("order", ["watch first", "rewrite first"])
@pytest.mark.parametrize("leaves", ["watch first", "rewrite first"])
def test_any_order_of_coming_and_going(order: str, leaves: str) -> None:
    plain, model = make(Three), make(Three)
    keys = set(model.__dict__)

    def double(m: nn.Module) -> None:
        for p in m.fc1.parameters():
            p.grad.mul_(2)

    rule = rules.scale(2.0, nodes("fc1"))
    guests: list[Any] = [
        fxgrad.watch(model) if one == "watch first" else fxgrad.rewrite(model, rule)
        for one in sorted(("watch first", "rewrite first"), key=lambda word: word != order)
    ]
    assert same(train(model, 3), train(plain, 3, hand=double))
    guests.sort(key=lambda guest: isinstance(guest, fxgrad.Watch) != (leaves == "watch first"))
    guests[0].remove()
    hand = double if isinstance(guests[1], fxgrad.Rewrite) else None
    assert same(train(model, 3), train(plain, 3, hand=hand))
    guests[1].remove()
    assert same(train(model, 3), train(plain, 3))
    assert set(model.__dict__) == keys


def test_every_second_forward_is_observed_and_all_are_rewritten() -> None:
    model = make(Three)
    with fxgrad.watch(model, every=2) as watch, fxgrad.rewrite(model, rules.scale(2.0, nodes("fc1"))) as rewrite:
        train(model, 4)
        watch.pause()
        train(model, 1)
    assert len(watch.history) == 2
    assert [flow.event.forward for flow in watch.history] == [0, 1]
    assert rewrite.report().records[0].ran == 5


def test_a_one_shot_flow_of_a_rewritten_model() -> None:
    model, x = make(Three), torch.randn(4, 1)
    with fxgrad.rewrite(model, [rules.scale(2.0, nodes("fc2")), rules.fill_zero()]) as rewrite:
        flow = fxgrad.gradient_flow(model, x)
        assert flow.site("fc2").rewritten.after.l2_norm == pytest.approx(2 * flow.site("fc2").l2_norm)
        with fxgrad.watch(model) as watch:
            fxgrad.gradient_flow(model, x)
            assert watch.history == ()
            train(model, 1)
            assert len(watch.history) == 1
    assert rewrite.report().of("scale(2)")[0].ran == 3


@pytest.mark.parametrize("per", ["step", "backward"])
def test_a_one_shot_flow_leaves_gradients_and_their_rules_alone(per: Any) -> None:
    model, (x, y) = make(Three), batch(make(Three))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = grads(model, x)
    model.zero_grad()
    with fxgrad.rewrite(model, rules.scale(2.0, rules.layers(per=per))) as rewrite:
        model(x).sum().backward()
        rewrite.apply()
        fxgrad.gradient_flow(model, y)
        optimizer.step()
        assert all(torch.equal(p.grad, 2 * plain[name]) for name, p in model.named_parameters())
    assert {record.ran for record in rewrite.report().records} == {1}


@pytest.mark.parametrize("copying", ["deepcopy", "pickle"])
def test_copies_are_plain(copying: str) -> None:
    import copy
    import pickle

    model = make(Three)
    with fxgrad.rewrite(model, rules.zero_out(nodes("fc3"))):
        made = copy.deepcopy(model) if copying == "deepcopy" else pickle.loads(pickle.dumps(model))  # noqa: S301
        assert set(made.__dict__) == set(nn.Linear(1, 1).__dict__) - {"in_features", "out_features"}
        found = grads(made, torch.randn(4, 1))
    assert found["fc3.bias"].any()


# ---- the flow in words and pictures ----------------------------------------------------------------------------------


def test_the_store_keeps_it() -> None:
    flow = watched()
    assert from_json(flow.to_json()) == flow
    attributes = flow.to_networkx().nodes["fc3"]
    assert attributes["rewritten_by"] == "scale(10), clip_by_norm(0.5)"
    assert attributes["after.l2_norm"] == flow.site("fc3").rewritten.after.l2_norm


def test_ratios_and_gains_start_from_what_was_passed_on() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x * 2 * 3 * 5)

    model, x = Chain(), torch.ones(4, requires_grad=True)
    with fxgrad.rewrite(model, rules.scale(1e-3, nodes("/mul#1"))):
        flow = fxgrad.gradient_flow(model, x, loss=torch.sum)
    assert flow.site("/mul#1").l2_norm == pytest.approx(10.0)
    assert flow.site("/mul").l2_norm == pytest.approx(0.03)
    from fxgrad.graph import ratios
    from fxgrad.render.gains import Gains

    assert ratios(flow)["/mul"] == pytest.approx(3.0)
    assert Gains(flow).of({"/mul#1"}, [flow.site("/mul#1")]) == pytest.approx(3.0)


def test_pictures_and_tables_mark_it() -> None:
    flow = watched()
    dot = flow.to_dot()
    assert "rewritten -> 0.5\\n" in dot or 'rewritten -> 0.5"' in dot
    assert "rewritten by a rule" in dot
    assert "rewritten by scale(10), clip_by_norm(0.5): rms" in dot
    assert "rewritten by a rule" not in fxgrad.gradient_flow(make(Three), torch.randn(4, 1)).to_dot()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(flow.table())
    assert "fc3 Linear rewritten -> 0.5 by scale(10), clip_by_norm(0.5)" in " ".join(console.export_text().split())


def test_a_collapsed_box_counts_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("0.*"))):
        flow = fxgrad.gradient_flow(model, torch.randn(3, 2))
    assert "2 rewritten inside" in flow.to_dot(depth=0)


# ---- the audit -------------------------------------------------------------------------------------------------------


def test_the_report_counts_on_the_device() -> None:
    model, x = make(Three), torch.randn(4, 1)
    made = [
        rules.custom(lambda g: torch.where(torch.arange(3) == 1, 7.0, g), nodes("fc2"), name="seven"),
        rules.custom(lambda g: g, nodes("fc1"), name="nothing"),
        rules.scale(2.0, parameters("fc3.bias"), rules.given(lambda g: g > 1e9)),
    ]
    with fxgrad.rewrite(model, made, audit="full") as rewrite:
        for _ in range(3):
            grads(model, x)
            rewrite.apply()
        report = rewrite.report()
    (seven,), (nothing,), (scale,) = report.of("seven"), report.of("nothing"), report.of("scale(2)")
    assert (seven.place, seven.ran, seven.fired, seven.changed) == ("fc2", 3, 3, 12)
    assert seven.norm_after == pytest.approx((seven.norm_before**2 + 4 * 49) ** 0.5, rel=0.2)
    assert (nothing.ran, nothing.fired, nothing.changed) == (3, 0, 0)
    assert nothing.norm_before == nothing.norm_after
    assert (scale.place, scale.ran, scale.fired, scale.changed) == ("fc3.bias", 3, 0, 0)
    assert "seven at fc2: ran 3, fired 3, changed 12 entries, l2_norm" in str(report)
    assert rewrite.report() == report  # readable when it is over


def test_the_count_is_the_default_and_nan_to_nan_is_no_change() -> None:
    model, x = nn.Identity(), torch.zeros(3, requires_grad=True)
    gradient = torch.tensor([float("nan"), 0.0, 1.0])
    rule = rules.custom(lambda g: g.clone(), nodes())
    with fxgrad.rewrite(model, rule) as one, fxgrad.rewrite(model, rule, audit="full") as two:
        model(x).backward(gradient)
    assert [(r.ran, r.fired, r.changed, r.norm_before) for r in one.report().records] == [(1, None, None, None)] * 1
    assert {(r.fired, r.changed) for r in two.report().records if r.ran} == {(0, 0)}


def test_a_report_copies_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(Three)
    copies: list[Any] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "cpu" in args:
            copies.append(self.shape)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with fxgrad.rewrite(model, [rules.scale(2.0, nodes()), rules.fill_zero()], audit="full") as rewrite:
        train(model, 2)
        assert copies == []
        rewrite.report()
    assert len(copies) == 1
