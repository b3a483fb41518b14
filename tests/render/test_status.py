"""The line of a training step: on a terminal, in a pipe, and which gradient is the worst."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

import fxgrad
from fxgrad.render.status import StatusLine, worst
from fxgrad.schema import GradientFlow, LogEntry


def entry_of(flow: GradientFlow, **notes: float) -> LogEntry:
    return LogEntry(150, flow, flow.diagnosis, flow.findings, notes)


def vanishing() -> GradientFlow:
    torch.manual_seed(0)
    chain = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 1))
    return fxgrad.gradient_flow(chain, torch.ones(4, 8))


def printed(entry: LogEntry, **options: int) -> str:
    buffer = StringIO()
    StatusLine(Console(file=buffer, color_system=None, **options)).write(entry)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_it_is_one_line_with_step_notes_worst_gradient_and_findings() -> None:
    line = printed(entry_of(vanishing(), loss=0.3125), width=40)
    assert line.startswith("step 150  loss 0.312  worst gradient ")
    assert " at 0  1 error: vanishing at " in line
    assert line.endswith("\n")
    assert line.count("\n") == 1


def test_a_healthy_step_says_so() -> None:
    flow = fxgrad.gradient_flow(nn.Linear(4, 4), torch.randn(8, 4))
    assert printed(entry_of(flow)).endswith("nothing wrong found\n")


def test_on_a_terminal_it_fits_the_width_and_takes_the_place_of_a_progress_bar() -> None:
    line = printed(entry_of(vanishing(), loss=0.3125), width=40, force_terminal=True)
    assert line.startswith("\r\x1b[2Kstep 150")
    assert len(line.removeprefix("\r\x1b[2K").rstrip("\n")) <= 40


def test_the_worst_is_the_one_nearest_to_the_loss_that_is_not_finite() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b((self.a(x) * 0).sqrt())

    site = worst(fxgrad.gradient_flow(Net(), torch.randn(8, 4)))
    assert site is not None
    assert site.id == "/mul"
    assert "worst gradient 32 Inf at /mul" in printed(entry_of(fxgrad.gradient_flow(Net(), torch.randn(8, 4))))


@pytest.mark.parametrize("name", ["lo\x1b[31mss"])
def test_a_name_cannot_steer_the_terminal(name: str) -> None:
    assert "\x1b" not in printed(entry_of(vanishing(), **{name: 1.0}))
