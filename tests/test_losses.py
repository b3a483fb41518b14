"""Losses by name, in Python as on the command line, and the seed that is printed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.errors import ModelError, OptionError
from fxgrad.losses import NAMES, SHORT, named_loss


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_name_is_the_loss_against_a_seeded_target() -> None:
    model, x = net(), torch.ones(5, 4)
    flow = fxgrad.gradient_flow(model, x, loss="mse", seed=7)
    target = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
    output = model(x)
    (gradient,) = torch.autograd.grad(F.mse_loss(output, target), output)
    assert flow.site("2").l2_norm == pytest.approx(gradient.norm().item())
    assert flow.event.loss == "mse_loss of the first output against standard normal values, seed 7"


@pytest.mark.parametrize("name", [*NAMES, *SHORT])
def test_every_name_works(name) -> None:
    output = torch.rand(4, 3, requires_grad=True).clamp(0.1, 0.9)
    assert torch.isfinite(named_loss(name)(output))


def test_the_short_names_are_those_of_the_long_ones() -> None:
    assert SHORT["mse"] == "mse_loss"
    assert SHORT["bce"] == "binary_cross_entropy"
    assert set(SHORT.values()) <= set(NAMES)


def test_a_name_that_is_none() -> None:
    with pytest.raises(OptionError, match="Did you mean mse"):
        fxgrad.gradient_flow(net(), torch.ones(5, 4), loss="msee")


def test_the_seed_that_is_printed_is_the_one_that_was_given() -> None:
    one, two, again = (fxgrad.gradient_flow(net(), torch.ones(5, 4), seed=seed) for seed in (3, 4, 3))
    assert one.event.loss.endswith("seed 3")
    assert one.site("0").l2_norm == again.site("0").l2_norm != two.site("0").l2_norm
    words = ["run", "torch.nn:Linear", "in_features=4", "out_features=3", "--input", "5x4", "--seed", "11"]
    assert "seed 11\n" in CliRunner().invoke(app, words).stdout


def test_a_model_that_looks_numbers_up_says_how_they_are_written() -> None:
    words = ["run", "torch.nn:Embedding", "num_embeddings=10", "embedding_dim=4", "--input", "8x4"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "8x128:int64:0-N" in result.output
    linear = ["run", "torch.nn:Linear", "in_features=4", "out_features=3", "--input", "5x5"]
    assert "int64" not in CliRunner().invoke(app, linear).output
    with pytest.raises(ModelError):
        fxgrad.gradient_flow(nn.Embedding(10, 4), torch.ones(2, 3))
