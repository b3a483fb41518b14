"""``fxgrad.watch(limits=, on_finding=)``: absolute alarms, whom they blame, and who is told."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.diagnosis.limits import WORDS, Limit, beyond
from fxgrad.errors import OptionError
from fxgrad.schema import Consumer, Diagnosis, Edge, EventInfo, Finding, Statistics
from tests import flows


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


class Scaled(nn.Module):
    """A multiplication by a large number between two layers, beside a branch without it."""

    def __init__(self, factor: float = 1e9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head, self.factor = nn.Linear(4, 4), nn.Linear(4, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(torch.tanh(h) + (h * self.factor).sin())


class Branch(nn.Module):
    """A value that is returned, and sent through a large factor on the way to another result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)
        return hidden, (hidden * 1e9).sum()


# ---- whom an alarm blames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_a_loss_that_is_multiplied_is_blamed_and_no_part_of_the_model(capture: Any, statistics: Any) -> None:
    model = mlp()
    found: list[Finding] = []
    limits = {"l2_norm": 1e3}
    with fxgrad.watch(model, limits=limits, on_finding=found.append, capture=capture, statistics=statistics) as watch:
        loss_of(model).backward()
        assert found == []
        model.zero_grad()
        (loss_of(model, 1) * 5e10).backward()
    (alarm,) = found
    assert watch.alarms == (alarm,)
    assert (alarm.rule, alarm.severity, alarm.place) == ("loss_seed", "error", "outside the model")
    assert alarm.node is alarm.site is alarm.parameter is None
    assert not any(site.id in alarm.message.split() for site in watch.flow().sites)
    assert alarm.backward == 1
    head = watch.flow().site("4").l2_norm
    assert alarm.evidence == {"l2_norm": pytest.approx(head), "limit": 1e3, "sites": 5.0, "parameters": 6.0}
    assert alarm.affected == tuple(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("sites", ["node", "edge"])
def test_the_node_that_sends_the_first_too_large_gradient_is_blamed(sites: Any) -> None:
    model = Scaled()
    with fxgrad.watch(model, limits={"l2_norm": 1e3}, on_finding=lambda _: None, sites=sites) as watch:
        model(torch.ones(2, 4)).sum().backward()
    (alarm,) = watch.alarms
    assert alarm.rule == "exploding"
    if sites == "edge":
        assert (alarm.site, alarm.node.key) == ("/mul", "/mul")
        assert "test_limits.py" in alarm.source
        assert alarm.path == ("/mul", "a")
    else:  # it cannot be told from its neighbour
        assert "another of its 2 uses" in alarm.message
    assert alarm.evidence["received"] < 1e3 < alarm.evidence["l2_norm"]
    assert set(alarm.affected) == {"a.weight", "a.bias"}


@pytest.mark.parametrize("sites", ["node", "edge"])
def test_a_value_that_is_returned_and_used(sites: Any) -> None:
    model = Branch()
    with fxgrad.watch(model, limits={"l2_norm": 1e3}, on_finding=lambda _: None, sites=sites) as watch:
        model(torch.ones(1, 4))[1].backward()
        (model(torch.ones(1, 4))[0] * 1e9).sum().backward()
    inner, outer = watch.alarms
    assert (inner.rule, inner.site) == ("exploding", "/mul")
    assert outer.rule == "loss_seed"


def test_only_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    with fxgrad.watch(model, limits={"l2_norm": 1e3}, on_finding=lambda _: None) as watch:
        model(torch.full((2, 4), 1e6)).sum().backward()
    (alarm,) = watch.alarms
    assert (alarm.rule, alarm.parameter, alarm.node, alarm.place) == ("exploding", "0.weight", None, "0.weight")
    assert alarm.evidence["sites"] == 0.0
    assert alarm.affected == ("0.weight",)


def test_one_finding_for_each_limit_and_event_also_over_several_calls() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.weight)
    with fxgrad.watch(model, limits={"l2_norm": 1.0, "rms": 1.0, "max_abs": 1e9}, statistics="full",
                      on_finding=lambda _: None) as watch:  # fmt: skip
        (model(model(torch.ones(1, 4))) * 100).sum().backward()
    assert [alarm.rule for alarm in watch.alarms] == ["loss_seed", "loss_seed"]
    assert [next(iter(alarm.evidence)) for alarm in watch.alarms] == ["l2_norm", "rms"]


@pytest.mark.parametrize(("word", "rule"), [
    ("nan_count", "nonfinite"), ("inf_count", "nonfinite"), ("l2_norm", "exploding"), ("max_abs", "exploding"),
])  # fmt: skip
def test_entries_that_are_not_finite_exceed_sizes_and_their_counts(word: str, rule: str) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            return (h.sqrt() if word != "nan_count" else h.sqrt().square()).sum()

    model, x = Root(), torch.zeros(3, requires_grad=True)
    with fxgrad.watch(model, statistics="full", limits={word: 0 if word.endswith("count") else 1e30},
                      on_finding=lambda _: None) as watch:  # fmt: skip
        model(x).backward()
    (alarm,) = watch.alarms
    assert (alarm.rule, alarm.site) == (rule, "/sqrt")
    assert alarm.evidence[word] == (3.0 if word.endswith("count") else math.inf)


def test_other_counts_have_their_rules() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(model[0].bias, -100.0)
    with fxgrad.watch(model, statistics="full", limits={"zero_count": 0}, on_finding=lambda _: None) as watch:
        model(torch.ones(2, 4)).sum().backward()
    (alarm,) = watch.alarms
    assert (alarm.rule, alarm.site) == ("zero", "1")


def test_a_loss_scale_is_divided_out() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with fxgrad.watch(model, scaler=scaler, limits={"l2_norm": 1e3}, on_finding=lambda _: None) as watch:
        scaler.scale(loss_of(model)).backward()
        assert max(site.l2_norm for site in watch.flow().sites if site.measured) > 1e3
        assert watch.alarms == ()
        scaler.scale(loss_of(model) * 1e6).backward()
    (alarm,) = watch.alarms
    assert alarm.evidence["loss_scale"] == 2.0**16
    assert alarm.evidence["l2_norm"] == pytest.approx(watch.flow().site("4").l2_norm / 2**16)


def test_by_hand_through_a_node_whose_gradient_is_not_known() -> None:
    flow = flows.chain(4, factor=10.0)  # 1e4 at the first node ... 10 at the last
    limit = Limit("l2_norm", 500.0)
    assert beyond(flow, limit).site == "/op2"
    blind = dataclasses.replace(flow, sites=tuple(
        dataclasses.replace(site, statistics=None) if site.key == "/op2" else site for site in flow.sites
    ))  # fmt: skip
    assert beyond(blind, limit).path == ("/op2", "/op1")
    all_blind = dataclasses.replace(flow, sites=tuple(
        dataclasses.replace(site, statistics=None) if site.key in ("/op2", "/op3") else site for site in flow.sites
    ))  # fmt: skip
    assert beyond(all_blind, limit).rule == "loss_seed"
    assert beyond(flow, Limit("l2_norm", 1e9)) is None


def test_by_hand_what_a_rule_passed_on_is_what_the_next_node_received() -> None:
    flow = flows.chain(3, factor=10.0)
    rewritten = fxgrad.schema.Rewritten(("clip",), (1,), flows.full(1.0))
    changed = dataclasses.replace(flow, sites=tuple(
        dataclasses.replace(site, rewritten=rewritten) if site.key == "/op2" else site for site in flow.sites
    ))  # fmt: skip
    assert beyond(flow, Limit("l2_norm", 5.0)).rule == "loss_seed"
    one = dataclasses.replace(changed, sites=tuple(
        site for site in changed.sites if site.key != "output"
    ))  # fmt: skip
    assert beyond(one, Limit("l2_norm", 50.0)).path == ("/op2", "/op1")


def test_by_hand_edges_choose_among_uses() -> None:
    flow = flows.residual()
    parts = {("block.fc", "args[0]"): 9.0, ("block/add", "args[1]"): 1.0}
    edges = tuple(
        dataclasses.replace(edge, statistics=flows.full(parts[edge.consumer.key, edge.consumer.argument]))
        if edge.producer == "input:x" else edge
        for edge in flow.edges
    )  # fmt: skip
    with_edges = dataclasses.replace(flow, edges=edges, event=EventInfo(0, 0, "mse", "full", "edge"))
    assert beyond(with_edges, Limit("l2_norm", 4.5)).node.key == "block.fc"
    assert Edge("a", "", Consumer("b", "args[0]")).statistics is None


def test_values_that_are_compared() -> None:
    limit = Limit("l2_norm", 10.0, 2.0)
    assert limit.value(Statistics("norm", 4, 8.0)) == 4.0
    assert not limit.exceeded(Statistics("norm", 4, 20.0))
    assert limit.exceeded(Statistics("norm", 4, 20.1))
    assert limit.exceeded(Statistics("norm", 4, math.nan))
    assert not limit.exceeded(None)
    assert not Limit("nan_count", 0.0).exceeded(Statistics("norm", 4, 8.0))
    assert math.isnan(limit.value(flows.full(1.0, nan=1, inf=1)))


# ---- who is told, and when -----------------------------------------------------------------------------------------


def test_without_a_listener_each_alarm_is_a_warning() -> None:
    model = mlp()
    with fxgrad.watch(model, limits={"l2_norm": 1e3}) as watch:
        for number in range(2):
            with pytest.warns(fxgrad.FindingWarning, match=f"backward {number}: l2_norm of the gradient") as caught:
                (loss_of(model) * 5e10).backward()
            assert len(caught) == 1
    assert len(watch.alarms) == 2


@pytest.mark.parametrize("way", ["plain", "reentrant", "accumulated", "rules at the end"])
def test_what_a_listener_raises_comes_behind_everything_else(way: str) -> None:
    def step(model: nn.Module, *, watched: bool) -> list[Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        if way == "accumulated":
            loss_of(model).backward()
        run = checkpoint(model, x, use_reentrant=True) if way == "reentrant" else model(x)
        loss = run.square().mean() * 1e6
        rule = fxgrad.rules.scale(0.5, fxgrad.rules.layers(per="backward"))
        rewrite = fxgrad.rewrite(model, rule) if way == "rules at the end" else None
        if rewrite is not None:
            loss = model(x).square().mean() * 1e6
        if watched:
            with pytest.raises(KeyError, match="stop"):
                loss.backward()
        else:
            loss.backward()
        if rewrite is not None:
            assert {record.ran for record in rewrite.report().records} == {1}
            rewrite.remove()
        return [parameter.grad for parameter in model.parameters()]

    def stop(finding: Finding) -> None:
        message = f"stop at {finding.rule}"
        raise KeyError(message)

    want = step(mlp(), watched=False)
    model = mlp()
    with fxgrad.watch(model, limits={"rms": 1e3}, on_finding=stop) as watch:
        got = step(model, watched=True)
        assert all(map(torch.equal, got, want))
        assert len(watch.alarms) == 1
        loss_of(model).backward()  # and everything goes on
        assert watch.flow().event.backward == (2 if way == "accumulated" else 1)


def test_all_alarms_are_told_of_before_the_first_error_is_raised() -> None:
    model = mlp()
    told: list[str] = []

    def listen(finding: Finding) -> None:
        told.append(next(iter(finding.evidence)))
        raise ValueError(told[-1])

    with fxgrad.watch(model, limits={"l2_norm": 1.0, "rms": 1.0}, on_finding=listen):
        with pytest.raises(ValueError, match="l2_norm"):
            (loss_of(model) * 1e6).backward()
        assert told == ["l2_norm", "rms"]


def test_training_is_the_same_and_alarms_are_bounded() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for step in range(140):
            optimizer.zero_grad()
            (loss_of(model, step) * 1e6).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    want, model = train(mlp()), mlp()
    with fxgrad.watch(model, limits={"l2_norm": 1.0}, on_finding=lambda _: None) as watch:
        got = train(model)
    assert all(map(torch.equal, got, want))
    assert len(watch.alarms) == 128
    assert watch.alarms[-1].backward == 139


def test_a_backward_without_alarm_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    copies: list[Any] = []
    original = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "cpu" in args:
            copies.append(self.shape)
        return original(self, *args, **kwargs)

    with fxgrad.watch(model, limits={"l2_norm": 1e6}):
        loss = loss_of(model)
        monkeypatch.setattr(Tensor, "to", to)
        loss.backward()
    assert len(copies) == 1


def test_an_error_of_ours_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    monkeypatch.setattr("fxgrad.engine.alarms.read_gradients", lambda *_: 1 / 0)
    with fxgrad.watch(model, limits={"l2_norm": 1e6}), pytest.warns(fxgrad.FindingWarning, match="ZeroDivisionError"):
        loss_of(model).backward()


def test_the_diagnosis_of_the_history_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    told: list[Finding] = []
    known = Finding("loss_seed", "error", "the same as an alarm", "")
    new = Finding("dead", "warning", "units never fire", "", site="1")
    given: list[Any] = []

    def diagnose(history: Any, thresholds: Any) -> Diagnosis:
        given.append((history, thresholds))
        return Diagnosis((known, new))

    monkeypatch.setattr("fxgrad.diagnosis.diagnose", diagnose)
    with fxgrad.watch(model, limits={"l2_norm": 1e3}, on_finding=told.append) as watch:
        with pytest.raises(fxgrad.FxgradError, match="run backward"):
            watch.diagnose()
        (loss_of(model) * 5e10).backward()
        thresholds: Any = object()
        assert watch.diagnose(thresholds).findings == (known, new)
        assert watch.diagnose().findings == (known, new)
    assert [finding.rule for finding in told] == ["loss_seed", "dead"]
    assert given[0] == (watch.history, thresholds)


def test_what_a_listener_raises_in_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = tuple(Finding(rule, "info", "", "") for rule in ("frozen", "unused"))
    monkeypatch.setattr("fxgrad.diagnosis.diagnose", lambda *_: Diagnosis(findings))
    told: list[str] = []

    def listen(finding: Finding) -> None:
        told.append(finding.rule)
        raise ValueError(finding.rule)

    model = mlp()
    with fxgrad.watch(model, on_finding=listen) as watch:
        loss_of(model).backward()
        with pytest.raises(ValueError, match="frozen"):
            watch.diagnose()
    assert told == ["frozen", "unused"]


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "message"), [
    ({"max_abs": 1.0}, "'max_abs' is not measured at statistics='norm'; watch with statistics='full'"),
    ({"nan_count": 0}, "statistics='full'"),
    ({"norm": 1.0}, "no statistic that can be limited; these can: l2_norm, rms"),
    ({"sum": 1.0}, "no statistic that can be limited"),
    ({"l2_norm": "large"}, "must be a number of at least 0, but is 'large'"),
    ({"l2_norm": -1}, "must be a number"),
    ({"l2_norm": math.nan}, "must be a number"),
    ({"l2_norm": True}, "must be a number"),
    (1e3, "takes a dict"),
])  # fmt: skip
def test_bad_limits(limits: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fxgrad.watch(mlp(), limits=limits)


def test_a_listener_can_be_called() -> None:
    with pytest.raises(OptionError, match="takes a function"):
        fxgrad.watch(mlp(), on_finding="print")  # type: ignore[arg-type]


def test_every_word_is_a_statistic() -> None:
    statistics = flows.full(1.0)
    assert all(Limit(word, 0.0).value(statistics) is not None for word in WORDS)


def test_limits_are_judged_without_torch() -> None:
    code = "import sys, fxgrad.diagnosis.limits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
