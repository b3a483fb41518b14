"""What came to the rules and what went on: at sites, edges and parameters, in the flow and its pictures."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.rules import edges, groups, layers, nodes, parameters
from fxgrad.store import from_json
from tests.rewriting.nets import Three, fill_by_hand, grads, make, train


class Skip(nn.Module):
    """A value with two uses, and one that a consumer takes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        y = h + torch.tanh(h)
        return torch.where(y > 0, y, y * 2).sum() + (y * y).sum()


def edge_at(flow: fxgrad.GradientFlow, producer: str, consumer: str) -> Any:
    return next(e.rewritten for e in flow.edges if (e.producer, e.consumer.key) == (producer, consumer))


def parameter(flow: fxgrad.GradientFlow, name: str) -> Any:
    return next(one for one in flow.parameters if one.name == name)


def norm(gradient: Tensor) -> Any:
    return pytest.approx(float(gradient.detach().norm()), rel=1e-5)


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", ["node", "edge"])
@pytest.mark.parametrize("level", ["norm", "full"])
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_an_edge_has_both_and_one_part_is_looked_at_by_hand(sites: Any, level: Any, capture: Any) -> None:
    model, x = make(Skip), torch.randn(3, 4)
    parts: list[Tensor] = []
    made = [rules.custom(parts.append, edges("fc", "/tanh"), name="look"), rules.scale(3.0, edges("fc", "/tanh"))]  # type: ignore[arg-type]
    options: Any = {"sites": sites, "statistics": level, "capture": capture}
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model, **options) as watch:
        for _ in range(3):
            model(x).backward()
            flow = watch.flow()
            told = edge_at(flow, "fc", "/tanh")
            assert (told.before.l2_norm, told.after.l2_norm) == (norm(parts[-1]), norm(3 * parts[-1]))
            assert (told.before.level, told.after.level, told.reason) == (level, level, None)
            assert told.norms_before == told.norms_before[:1] * 2 == (norm(parts[-1]),) * 2
            assert told.norms_after == (norm(parts[-1]), norm(3 * parts[-1]))
            assert from_json(flow.to_json()) == flow
            if sites == "edge":
                own = next(e for e in flow.edges if e.rewritten is told)
                assert own.l2_norm == pytest.approx(told.after.l2_norm)


def test_rules_of_two_rewrites_at_one_edge_are_measured_around_both() -> None:
    model, x = make(Skip), torch.randn(3, 4)
    parts: list[Tensor] = []
    look, where = rules.custom(parts.append, edges("fc", "/tanh")), edges("fc", "/tanh")  # type: ignore[arg-type]
    with (
        fxgrad.rewrite(model, [look, rules.scale(2.0, where)]),
        fxgrad.rewrite(model, rules.scale(5.0, where), audit="full"),
        fxgrad.watch(model) as watch,
    ):
        model(x).backward()
        told = edge_at(watch.flow(), "fc", "/tanh")
    assert told.rules == ("append", "scale(2)", "scale(5)")
    assert (told.before.l2_norm, told.after.l2_norm) == (norm(parts[0]), norm(10 * parts[0]))
    assert told.norms_before == (None, None, norm(2 * parts[0]))


def test_an_edge_rule_whose_step_has_not_come_passes_on_what_it_got() -> None:
    model = make(Skip)
    with fxgrad.rewrite(model, rules.zero_out(edges("fc"), rules.steps(9))), fxgrad.watch(model) as watch:
        model(torch.randn(3, 4)).backward()
        told = edge_at(watch.flow(), "fc", "/tanh")
    assert told.ran == (0,)
    assert told.before == told.after
    assert told.before.l2_norm > 0


def test_parts_that_cannot_be_told_apart_say_so() -> None:
    model = make(Skip)
    with fxgrad.rewrite(model, rules.scale(2.0, edges("/add", "/mul#1"))), fxgrad.watch(model) as watch:
        model(torch.randn(3, 4)).backward()
        told = edge_at(watch.flow(), "/add", "/mul#1")
    assert (told.ran, told.before, told.after) == ((1,), None, None)
    assert told.reason == "its consumer takes the value several times, and which part is which is not known"


def test_where_nothing_is_sent_back_the_reason_is_there() -> None:
    model = make(Skip)
    with fxgrad.rewrite(model, rules.scale(2.0, edges("input:x"))), fxgrad.watch(model) as watch:
        model(torch.randn(3, 4)).backward()
        told = edge_at(watch.flow(), "input:x", "fc")
    assert (told.ran, told.before, told.after) == ((0,), None, None)
    assert told.reason == "no gradient is passed back there that a hook can see"


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["norm", "full", "histogram"])
def test_a_step_is_measured_around_its_rules(level: Any) -> None:
    model, other = make(Three), make(Three)
    seen: list[tuple[Any, Any]] = []

    def by_hand(m: nn.Module) -> None:
        before = {n: norm(p.grad) for n, p in m.named_parameters()}
        fill_by_hand(m)
        seen.append((before, {n: norm(p.grad) for n, p in m.named_parameters()}))

    train(other, 4, hand=by_hand, micro=2)
    with fxgrad.rewrite(model, rules.fill_zero()), fxgrad.watch(model, statistics=level) as watch:
        train(model, 4, micro=2)
    for (before, after), flow in zip(seen, watch.history[1::2], strict=True):  # behind the second micro-batch
        for record in flow.parameters:
            told = record.rewritten
            assert (told.before.l2_norm, told.after.l2_norm) == (before[record.name], after[record.name])
            assert told.after.level == ("norm" if level == "norm" else "full")
    assert from_json(flow.to_json()) == flow


@pytest.mark.parametrize("order", ["watch first", "rewrite first"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_arrives_is_measured_whichever_hook_came_first(order: str, count: int) -> None:
    model, x = make(Three), torch.randn(4, 1)
    plain = grads(model, x)["fc3.bias"]
    model.zero_grad()
    rewrites = [rules.scale(2.0, parameters("fc3.bias", per="arrival"))] * 2
    watch = fxgrad.watch(model) if order == "watch first" else None
    if watch is not None:
        grads(model, x)
    handles = [fxgrad.rewrite(model, rewrites) for _ in range(count)]
    watch = watch or fxgrad.watch(model)
    grads(model, x)
    told = parameter(watch.flow(), "fc3.bias").rewritten
    assert (told.before.l2_norm, told.after.l2_norm) == (norm(plain), norm(plain * 4**count))
    for handle in (*handles, watch):
        handle.remove()


def test_two_rewrites_before_one_step_are_one_way() -> None:
    model, x = make(Three), torch.randn(4, 1)
    plain = grads(model, x)["fc3.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = rules.scale(2.0, parameters("fc3.weight"))
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, rule), fxgrad.rewrite(model, rule):
        for _ in range(3):
            grads(model, x)
            optimizer.step()
    for flow in watch.history:
        told = parameter(flow, "fc3.weight").rewritten
        assert (told.ran, told.before.l2_norm, told.after.l2_norm) == ((1, 1), norm(plain), norm(4 * plain))


def test_a_second_step_in_one_window_begins_anew() -> None:
    model, x = make(Three), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, rules.scale(2.0, parameters("fc3.weight"))):
        gradient = grads(model, x)["fc3.weight"]
        optimizer.step()
        optimizer.step()  # of what the first one made
        told = parameter(watch.flow(), "fc3.weight").rewritten
    assert (told.ran, told.before.l2_norm, told.after.l2_norm) == ((2,), norm(2 * gradient), norm(4 * gradient))


def test_of_several_moments_the_last_is_measured() -> None:
    model, x = make(Three), torch.randn(4, 1)
    plain = grads(model, x)["fc3.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = [rules.scale(factor, parameters("fc3.weight", per=per))  # type: ignore[arg-type]
            for factor, per in ((2.0, "step"), (3.0, "backward"), (5.0, "arrival"))]  # fmt: skip
    with fxgrad.watch(model) as watch, fxgrad.rewrite(model, made, audit="full"):
        grads(model, x)
        optimizer.step()
        told = parameter(watch.flow(), "fc3.weight").rewritten
    assert told.rules == ("scale(2)", "scale(3)", "scale(5)")
    assert (told.before.l2_norm, told.after.l2_norm) == (norm(15 * plain), norm(30 * plain))
    assert told.norms_before == (norm(15 * plain), norm(5 * plain), norm(plain))
    assert told.norms_after == (norm(30 * plain), norm(15 * plain), norm(5 * plain))


def test_norms_of_a_layer_are_joint_and_those_of_its_parameters_are_not() -> None:
    model, x = make(Three), torch.randn(4, 1)
    found = grads(model, x)
    joint = norm(torch.cat([found["fc3.weight"].flatten(), found["fc3.bias"]]))
    with (
        fxgrad.watch(model) as watch,
        fxgrad.rewrite(model, rules.unit_norm(layers(path="fc3")), audit="full") as rewrite,
    ):
        grads(model, x)
        rewrite.apply()
        flow = watch.flow()
    for name in ("fc3.weight", "fc3.bias"):
        told = parameter(flow, name).rewritten
        assert (told.norms_before, told.norms_after) == ((joint,), (pytest.approx(1.0),))
        assert told.before.l2_norm == norm(found[name])
        assert parameter(flow, "fc1.bias").rewritten is None


def test_sparse_gradients_are_measured() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for level in ("norm", "full"):
        with fxgrad.watch(model, statistics=level) as watch, fxgrad.rewrite(model, rules.scale(2.0, parameters())):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(torch.tensor([1, 1, 3])).sum().backward()
            optimizer.step()
            told = parameter(watch.flow(), "weight").rewritten
        assert (told.before.l2_norm, told.after.l2_norm) == (pytest.approx(10**0.5), pytest.approx(2 * 10**0.5))


def test_watching_what_rules_do_changes_no_training() -> None:
    made = [rules.fill_zero(), rules.scale(0.5, groups("")), rules.scale(2.0, parameters("fc1.*", per="arrival"))]
    plain, watched = make(Three), make(Three)
    with fxgrad.rewrite(plain, made):
        want = train(plain, 5)
    for level, audit in itertools.product(("norm", "full"), ("count", "full")):
        watched = make(Three)
        with fxgrad.rewrite(watched, made, audit=audit), fxgrad.watch(watched, statistics=level):  # type: ignore[arg-type]
            got = train(watched, 5)
        assert all(torch.equal(a, b) for s, t in zip(got, want, strict=True) for a, b in zip(s, t, strict=True))


# ---- sites, words and pictures ---------------------------------------------------------------------------------------


def test_a_site_has_both_and_each_rule_its_own() -> None:
    model, x = make(Three), torch.randn(4, 1)
    made = [rules.scale(10.0, nodes("fc3")), rules.clip_by_norm(0.5, nodes("fc3"))]
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model) as watch:
        grads(model, x)
        site = watch.flow().site("fc3")
    assert site.rewritten.before == site.statistics
    assert site.rewritten.norms_before == (pytest.approx(2.0), pytest.approx(20.0))
    assert site.rewritten.norms_after == (pytest.approx(20.0), pytest.approx(0.5))


def test_a_straight_through_rule_has_the_norms_of_what_is_passed_back() -> None:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sign(x * 1.0) * 3

    model, x = Sign(), torch.randn(3, requires_grad=True)
    with fxgrad.rewrite(model, rules.straight_through(), audit="full"), fxgrad.watch(model) as watch:
        model(x).sum().backward()
        told = watch.flow().site("/sign").rewritten
    assert told.before == told.after  # the call itself receives what it did
    assert (told.norms_before, told.norms_after) == ((0.0,), (pytest.approx(27**0.5),))


def test_a_statistic_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel")  # noqa: EM101, TRY003

    monkeypatch.setattr("fxgrad.record.gradient_statistics.write_any_norm", fails)
    model = make(Three)
    with fxgrad.rewrite(model, rules.scale(2.0, parameters("fc3.bias"))), fxgrad.watch(model) as watch:
        train(model, 1)
        told = parameter(watch.flow(), "fc3.bias").rewritten
    assert (told.ran, told.before, told.after) == ((1,), None, None)
    assert told.reason == "RuntimeError: no such kernel"


@pytest.mark.filterwarnings("ignore:gradients came, but no")
def test_words_and_pictures() -> None:
    model = make(Skip)
    made = [
        rules.scale(3.0, edges("fc", "/tanh")),
        rules.scale(2.0, parameters("fc.weight", per="backward")),
        rules.scale(2.0, parameters("fc.bias")),
    ]
    with fxgrad.rewrite(model, made, audit="full"), fxgrad.watch(model) as watch:
        model(torch.ones(2, 4)).backward()
        flow = watch.flow()
    told, weight = edge_at(flow, "fc", "/tanh"), parameter(flow, "fc.weight").rewritten
    way = f"{told.before.l2_norm:.3g} -> {told.after.l2_norm:.3g}"
    dot = flow.to_dot(norm="l2_norm").replace("-&gt;", "->")
    assert f"rewritten by scale(3) (8 entries changed): l2_norm {way}; scale(3): fired 1 of 1" in dot
    assert f"rewritten: fc.weight {weight.before.l2_norm:.3g} -> {weight.after.l2_norm:.3g}" in dot
    assert "fc.bias: rewritten by scale(2)#1 (0 entries changed): no gradient came to the rules" in dot
    graph = flow.to_networkx()
    edge, node = graph.edges["fc", "/tanh"], graph.nodes["fc"]
    assert (edge["before.l2_norm"], edge["after.l2_norm"]) == (told.before.l2_norm, told.after.l2_norm)
    assert (edge["rewritten_by"], edge["rewritten_changed"]) == ("scale(3)", 8)
    assert node["parameter.fc.weight.after.l2_norm"] == weight.after.l2_norm
    assert node["parameter.fc.bias.rewritten_reason"].startswith("no gradient came")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(flow.table())
    words = " ".join(console.export_text().split())
    assert f"fc -> /tanh rewritten {way} by scale(3) (8 entries changed)" in words
    assert "fc.bias rewritten no gradient came to the rules" in words


def test_a_long_list_is_cut_in_the_table() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    with fxgrad.rewrite(model, rules.scale(2.0, parameters(per="backward"))), fxgrad.watch(model) as watch:
        model(torch.randn(3, 2)).sum().backward()
        flow = watch.flow()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(flow.table())
    assert "... and 6 more" in console.export_text()


@pytest.mark.parametrize("audit", ["count", "full"])
@pytest.mark.parametrize("sites", ["node", "edge"])
def test_a_step_reads_nothing(audit: Any, sites: Any) -> None:
    """On the meta device there are no numbers to read, so that whatever waits for one raises."""
    model = make(Three).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = [
        rules.scale(2.0, nodes("fc2")),
        rules.clip_by_norm(1.0, edges()),
        rules.fill_zero(),
        rules.unit_norm(groups("", per="backward")),
        rules.replace_zeros(1.0, parameters(per="arrival")),
    ]
    with fxgrad.rewrite(model, made, audit=audit) as rewrite, fxgrad.watch(model, sites=sites):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 1, device="meta")).sum().backward()
            optimizer.step()
        assert rewrite.step == 3
        (window,) = rewrite._state.windows  # those of earlier calls are closed
        assert len(window._measure._readings) == 12
        assert not window._measure._failures  # where an error would have been kept
