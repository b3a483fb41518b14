"""Numbers with names: one for each measured value, in the hierarchy of the modules."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.integrations.scalars import scalars
from fxgrad.schema import LogEntry
from tests.integrations.runs import Net, chain


def entry_of(model: nn.Module, x: Tensor, **notes: float) -> LogEntry:
    flow = fxgrad.gradient_flow(model, x)
    return LogEntry(7, flow, flow.diagnosis, flow.findings, notes)


def test_names_follow_the_modules_and_numbers_the_flow() -> None:
    entry = entry_of(Net(), torch.randn(4, 4), loss=0.5)
    found = scalars(entry)
    assert found["gradient/body/0"] == entry.flow.site("body.0").l2_norm
    assert found["gradient/head"] == entry.flow.site("head").l2_norm
    assert found["note/loss"] == 0.5
    assert found["findings/error"] == found["findings/warning"] == 0
    measured = [site for site in entry.flow.sites if site.measured]
    assert len(found) == len(measured) + 3


def test_of_parameters_and_by_another_norm() -> None:
    entry = entry_of(Net(), torch.randn(4, 4))
    found = scalars(entry, "parameters", "max_abs")
    weight = next(record for record in entry.flow.parameters if record.name == "body.0.weight")
    assert found["gradient/body/0/weight"] == weight.max_abs


def test_findings_are_counted() -> None:
    assert scalars(entry_of(chain(), torch.ones(2, 4)))["findings/error"] == 1


class Awkward(nn.Module):
    """Calls, outputs and names that tools do not take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.lstm = nn.ReLU(), nn.LSTM(4, 4)
        self.add_module("a b:c", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.lstm(self.relu(self.relu(x) - 1))
        return self.get_submodule("a b:c")(out).sum() + h.sum()  # type: ignore[no-any-return]


def test_names_are_of_letters_that_every_tool_takes_and_none_is_lost() -> None:
    entry = entry_of(Awkward(), torch.randn(3, 2, 4, requires_grad=True))
    found = scalars(entry)
    assert all(re.fullmatch(r"[-/\w.]+", name) for name in found), found
    assert {"gradient/relu", "gradient/relu-call1", "gradient/lstm-out0", "gradient/a-b-c"} <= set(found)
    assert len(found) == sum(site.measured for site in entry.flow.sites) + 2


def test_what_is_not_finite_is_there() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 0).sqrt().sum()

    found = scalars(entry_of(Root(4, 4), torch.randn(2, 4)))
    assert math.isnan(found["gradient/mul"])
    assert math.isfinite(found["gradient/sqrt"])


@pytest.mark.parametrize("of", ["values", "parameters"])
def test_what_was_not_measured_is_left_out(of: str) -> None:
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    assert "gradient/body/0" not in scalars(entry_of(model, torch.randn(4, 4)), of)  # type: ignore[arg-type]
