"""The zoo is what it says it is: seeded, deterministic, and with true flags."""

from __future__ import annotations

import pytest
import torch
import torch.fx

from tests import models, runs


def test_there_are_enough_of_each_kind() -> None:
    assert len(models.MODELS) >= 100
    assert len(models.SYMBOLIC) >= 60
    assert len(models.TWINS) >= 30
    assert len(models.EAGER_ONLY) >= 15
    assert len(models.RAISING) >= 4


@pytest.mark.parametrize("case", models.cases(models.MODELS.values()))
def test_step_is_repeatable(case: models.Case) -> None:
    before = torch.get_rng_state()
    model, args, kwargs = case.build()
    assert torch.equal(torch.get_rng_state(), before), "building a model drew from the global generator"
    first = runs.plain_run(model, args, kwargs, case.loss)
    model, args, kwargs = case.build()
    runs.assert_same_run(runs.plain_run(model, args, kwargs, case.loss), first)
    assert (first.error[0] if first.error else None) == case.raises
    if case.raises is None:
        assert any(gradient is not None for gradient in first.gradients.values())


@pytest.mark.filterwarnings("ignore")  # tracing what cannot be traced makes torch warn of much
@pytest.mark.parametrize("case", models.cases(models.MODELS.values()))
def test_bare_tracing_does_what_the_flag_says(case: models.Case, capfd: pytest.CaptureFixture[str]) -> None:
    model, args, kwargs = case.build()
    plain = runs.plain_run(model, args, kwargs, case.loss)
    model, args, kwargs = case.build()
    try:
        traced = torch.fx.symbolic_trace(model)
    except Exception:  # noqa: BLE001  # any refusal is a refusal
        assert case.fx == "raises"
        return
    differences = runs.run_differences(runs.plain_run(model, args, kwargs, case.loss, call=traced), plain)
    assert case.fx == ("differs" if differences else "same")
    capfd.readouterr()  # a traced module prints its source when it raises
