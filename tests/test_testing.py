from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad import testing
from fxgrad.errors import ModelError, OptionError, UnhealthyError
from fxgrad.schema import RULES, Diagnosis, Finding
from fxgrad.testing import assert_healthy
from tests import diagnoses

ROOT = Path(fxgrad.__file__).parents[1]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def found(monkeypatch):
    """Replaces the rules: what they find is what the test puts into this list."""
    findings: list[Finding] = []
    monkeypatch.setattr(testing, "diagnose", lambda *_: diagnoses.diagnosis(*findings))
    return findings


def test_a_healthy_model_passes_and_is_given_back_as_it_was() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert isinstance(assert_healthy(model, torch.randn(8, 4), lambda output: output.square().mean()), Diagnosis)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_report_lists_what_is_left_with_its_line(found) -> None:
    found += [diagnoses.frozen(), diagnoses.dead(), diagnoses.outside()]
    with pytest.raises(UnhealthyError) as error:
        assert_healthy(net(), torch.randn(8, 4))
    text = str(error.value)
    assert isinstance(error.value, AssertionError) and isinstance(error.value, fxgrad.FxgradError)
    assert text.startswith("the gradient of Sequential is not healthy (loss: a random direction of norm 1")
    assert "\n1. ERROR dead at /op1 (/home/user/net.py:4)\n   16 of 16 units never fired" in text
    assert "\n2. WARNING loss_seed" in text
    assert "frozen" not in text


def test_information_passes(found) -> None:
    found.append(diagnoses.frozen())
    assert assert_healthy(net(), torch.randn(8, 4)).findings == (diagnoses.frozen(),)


def test_ignored_rules_pass_and_no_others(found) -> None:
    found += [diagnoses.dead(), diagnoses.outside()]
    assert assert_healthy(net(), torch.randn(8, 4), ignore=("dead", "loss_seed")).findings
    with pytest.raises(UnhealthyError, match=r"1\. WARNING loss_seed"):
        assert_healthy(net(), torch.randn(8, 4), ignore="dead")


def test_a_rule_of_the_users_own_can_be_ignored(found) -> None:
    found.append(Finding("mine", "error", "too large", ""))
    assert assert_healthy(net(), torch.randn(8, 4), ignore=["mine"])


def test_arguments_and_thresholds_are_passed_on(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(testing, "diagnose", lambda *given: seen.append(given) or Diagnosis(()))
    limits = fxgrad.Thresholds()
    loss = nn.MSELoss()
    model = nn.Bilinear(2, 3, 4)
    assert_healthy(
        model, (torch.randn(5, 2),), lambda output: loss(output, torch.zeros(5, 4)),
        kwargs={"input2": torch.randn(5, 3)}, thresholds=limits,
    )  # fmt: skip
    ((flow, given),) = seen
    assert given is limits
    assert "lambda" in flow.event.loss and flow.capture.model == "Bilinear"


def test_fxgrad_alone_has_to_be_imported() -> None:
    code = "import fxgrad; print(fxgrad.testing.assert_healthy.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "assert_healthy", done.stderr


def test_misuse_is_no_failed_assertion() -> None:
    with pytest.raises(OptionError, match="ignore='ded': there is no such check; near names are dead"):
        assert_healthy(net(), torch.randn(8, 4), ignore=("ded",))
    with pytest.raises(OptionError, match=", ".join(RULES)):
        assert_healthy(net(), torch.randn(8, 4), ignore=("%%%",))
    for odd in (None, 3):
        with pytest.raises(OptionError, match=f"ignore={odd}: there is no such check"):
            assert_healthy(net(), torch.randn(8, 4), ignore=odd)
    with pytest.raises(OptionError, match=r"takes fxgrad\.Thresholds"):  # or else every rule would be silent
        assert_healthy(net(), torch.randn(8, 4), thresholds={"vanishing": 4.0})
    with pytest.raises(ModelError):
        assert_healthy(net(), torch.randn(8, 5))


REPORTED = """
import torch
from torch import nn
from fxgrad import testing
from tests import diagnoses

def test_gradients(monkeypatch):
    monkeypatch.setattr(testing, "diagnose", lambda *_: diagnoses.every())
    testing.assert_healthy(nn.Linear(4, 2), torch.randn(8, 4))
"""


def test_what_pytest_prints(tmp_path) -> None:
    (tmp_path / "test_mine.py").write_text(REPORTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert ">       testing.assert_healthy(nn.Linear(4, 2), torch.randn(8, 4))" in done.stdout
    assert "E       1. ERROR dead at /op1" in done.stdout
    assert "fxgrad/testing.py" not in done.stdout  # the way there is ours and not the user's
