"""The report of each event says which recorder measured that event, and why that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import CaptureReport

pytestmark = pytest.mark.usefixtures("recorder")


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.other = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h.exp().mul(2) if self.other else h.tanh()


def reports(ways: list[bool], **options: Any) -> list[CaptureReport]:
    model = Either()
    with fxgrad.watch(model, **options) as watch:
        for way in ways:
            model.other = way
            model(torch.ones(2, 4)).sum().backward()
        return [flow.capture for flow in watch.history]


def test_learning_and_following() -> None:
    first, second, third = reports([False] * 3)
    assert (first.recorder, second.recorder, third.recorder) == ("python", "native", "native")
    assert "learns its course" in first.reason
    assert second.reason == third.reason == "every operator was that of a known course"


def test_what_was_asked_for() -> None:
    assert {(r.recorder, r.reason) for r in reports([False] * 3, native=False)} == {("python", "native=False")}
    assert {(r.recorder, r.reason) for r in reports([False] * 3, capture="eager")} == {("python", "asked for")}


def test_a_call_that_left_the_known_courses_for_one_that_is_learnt_later() -> None:
    found = reports([False, False, True, True, True, True, True, False])
    assert [report.recorder for report in found] == ["python", "native", "native", *["python"] * 3, "native", "native"]
    assert "learnt by a later call" in found[2].reason
    assert all("took a new course" in report.reason for report in found[3:6])
    assert found[6].reason == found[7].reason == "every operator was that of a known course"


def test_a_call_that_left_the_known_courses_for_one_that_never_comes_again() -> None:
    found = reports([False, False, True])
    assert found[2].recorder == "native"
    assert found[2].reason != found[1].reason
    assert "learnt" not in found[2].reason


def test_a_one_shot_call_inside_of_a_watch() -> None:
    model = Either()
    with fxgrad.watch(model) as watch:
        model(torch.ones(2, 4)).sum().backward()
        flow = fxgrad.gradient_flow(model, torch.ones(2, 4))
        assert "one-shot" in flow.capture.reason
        model(torch.ones(2, 4)).sum().backward()
        assert watch.flow().capture.reason == "every operator was that of a known course"
