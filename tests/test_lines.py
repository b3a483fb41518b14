"""What one sees of an object in a debugger, a log or a notebook."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad import schema
from fxgrad.schema import History
from fxgrad.schema.lines import in_a_line
from tests import diagnoses, flows

LONG = "block." * 60


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def records(flow):
    yield from (flow, flow.capture, flow.event, *flow.nodes, *flow.sites, *flow.edges, *flow.parameters)
    yield from (*flow.blind_spots, *flow.calls, *flow.modules(), *flow.buffers)
    for site in flow.sites:
        yield from (one for one in (site.statistics, site.value, site.activity, site.rewritten) if one is not None)
    yield from (*flow.diagnosis.findings, *flow.diagnosis.not_checked, flow.diagnosis)


@pytest.mark.parametrize("flow", [flows.residual(), flows.special(), flows.named(LONG), flows.nested(3, 4)])
def test_the_short_form_of_everything_fits_a_line(flow) -> None:
    for one in (*records(flow), *records(fxgrad.gradient_flow(model(), torch.ones(3, 4)))):
        assert len(repr(one)) <= 120, repr(one)
        assert "\n" not in repr(one)
        assert repr(one).startswith(type(one).__name__)


def test_findings_and_diagnoses() -> None:
    for one in (*diagnoses.every().findings, *diagnoses.named(LONG).findings):
        assert len(repr(one)) <= 120
    assert repr(diagnoses.every()).startswith("Diagnosis(1 error, 1 warning, 1 info; ")


def test_a_short_form_leaves_out_what_is_none() -> None:
    assert (
        repr(flows.site(flows.node("/op"), None)) == "Site(id='/op', op='call_function', shape=(2, 4), dtype='float32')"
    )


def test_the_reading_form_of_a_site() -> None:
    site = flows.site(flows.node("/op"), flows.full(2.0, zero=3))
    assert str(site).splitlines() == [
        "/op: 2x4 float32, by op, net.py:3",
        "gradient: l2_norm 2, rms 0.707, max_abs 1, 3 of 8 zero",
    ]
    assert str(flows.site(flows.node("/op"), None)).endswith("gradient: not measured")


def test_a_watch_and_its_history(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    net = model()
    with fxgrad.watch(net) as watch:
        assert repr(watch.history) == "History(no flow yet)"
        for _ in range(3):
            net(torch.ones(5, 4)).sum().backward()
        assert repr(watch) == "Watch(Sequential, active, 3 training forwards seen)"
        assert repr(watch.history) == "History(3 flows of Sequential, backward 0 to 2)"
        lines = str(watch).splitlines()
        assert lines[0] == repr(watch)
        assert [line.partition(":")[0] for line in lines[2:]] == ["backward 0", "backward 1", "backward 2"]
        assert max(map(len, lines)) <= 70
    assert repr(watch).startswith("Watch(Sequential, removed")


def test_a_history_is_a_tuple() -> None:
    history = History([flows.chain(2), flows.chain(3)])
    assert isinstance(history, tuple)
    assert history[-1] == flows.chain(3)
    assert len(history) == 2


def test_a_rewrite_and_its_report() -> None:
    with fxgrad.rewrite(model(), fxgrad.rules.scale(0.5, fxgrad.rules.outputs("0"))) as rewrite:
        assert repr(rewrite) == "Rewrite(Sequential, active, step 0)"
        assert str(rewrite).startswith(f"{rewrite!r}\nstep 0")
        assert repr(rewrite.report()).startswith("RewriteReport(step 0: ")


def test_rules_and_thresholds() -> None:
    rules = fxgrad.rules
    where = (
        rules.nodes(LONG), rules.outputs(LONG), rules.edges(LONG, LONG), rules.parameters(LONG),
        rules.layers(path=LONG), rules.groups(LONG),
    )  # fmt: skip
    for one in (*where, rules.scale(0.5, where[0]), rules.steps(3)):
        assert len(repr(one)) <= 120
        assert "<function" not in repr(one)
    rule = rules.scale(0.5, rules.nodes("fc"))
    assert repr(rule) == "Rule(name='scale(0.5)', where=Nodes(path='fc'), when=When(start=0))"
    assert repr(fxgrad.Thresholds()) == "Thresholds(the defaults)"
    assert repr(fxgrad.Thresholds(dead=0.4)) == "Thresholds(dead=0.4)"


def test_a_short_form_of_what_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(AttributeError, match="Some has no other"):

        @in_a_line("one", "other")
        class Some:
            one = 1


def test_completion_offers_public_names_only() -> None:
    assert dir(fxgrad) == sorted([*fxgrad.__all__, "__version__"])
    net = model()
    with fxgrad.watch(net) as watch:
        assert all(hasattr(watch, name) and not name.startswith("_") for name in dir(watch))
        assert {"flow", "history", "diagnose", "remove"} <= set(dir(watch))
        assert not {"call", "returned", "engine", "one_shot", "observes"} & set(dir(watch))


def test_options_are_typed_so_that_editors_complete_them() -> None:
    for name in ("to_svg", "to_dot", "table"):
        signature = inspect.signature(getattr(fxgrad.GradientFlow, name))
        assert "Any" not in str(signature)
    assert set(schema.PictureWords.__annotations__) == {
        "norm", "depth", "fold", "findings", "scale", "theme", "direction"
    }  # fmt: skip
