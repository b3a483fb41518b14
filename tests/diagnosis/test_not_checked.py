"""What printed findings tell of checks that could not run: only what the user could have given, in one line."""

from __future__ import annotations

import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import DEFAULT_CHECKS, Check, diagnose


def last_lines(diagnosis) -> list[str]:
    return [line for line in str(diagnosis).splitlines() if line.startswith("not checked")]


def watched(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    with fxgrad.watch(model, **options) as watch:
        for _ in range(3):
            model(torch.randn(16, 8)).square().mean().backward()
    return watch.history


def test_a_watch_could_have_been_given_more() -> None:
    (line,) = last_lines(diagnose(watched()))
    assert "dead" in line.partition(" (give forward=True)")[0]
    assert "(give sites='edge')" in line and "(give statistics='full')" in line
    needs = next(part for part in line.split("; ") if "(give optimizer=)" in part)
    assert "update_size" in needs and "optimizer_epsilon" in needs


def test_a_single_pass_takes_no_optimizer_and_is_no_series() -> None:
    flow = fxgrad.gradient_flow(nn.Linear(8, 2), torch.randn(4, 8))
    assert {one.rule for one in flow.not_checked} >= {"update_size", "spike"}
    assert last_lines(flow.diagnosis) == []


def test_with_all_but_an_optimizer_nothing_else_is_told() -> None:
    flows = watched(statistics="full", sites="edge", forward=True)
    (line,) = last_lines(diagnose(flows))
    assert "optimizer_epsilon" in line and line.count("(give") == 1 and line.endswith("(give optimizer=)")


def test_a_check_that_raised_is_told_of() -> None:
    def broken(evidence):
        raise ValueError(evidence.view.flow.capture.model)

    flow = fxgrad.gradient_flow(nn.Linear(8, 2), torch.randn(4, 8))
    lines = last_lines(diagnose(flow, checks=(*DEFAULT_CHECKS, Check("mine", broken))))
    assert lines == ["not checked: mine: the check raised ValueError: Linear"]


def test_a_norm_of_zero_in_every_pass_is_no_silence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(16, 8)
    with fxgrad.watch(model) as watch:
        for _ in range(6):
            model(x * 0).square().mean().backward()
    assert model[0].weight.grad.count_nonzero() == 0  # what torch says of it
    found = watch.diagnose()
    (finding,) = [one for one in found.findings if one.rule == "zero"]
    assert finding.severity == "warning" and "0.weight" in finding.affected and "1e-23" in finding.message
    assert "zero" in next(line for line in last_lines(found)).partition(" (give statistics='full')")[0]


def test_norms_other_than_zero_are_not_told() -> None:
    assert not [one for one in diagnose(watched()).findings if one.rule == "zero"]
