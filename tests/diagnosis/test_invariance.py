"""The same findings, whatever the loss is multiplied by, however it is reduced, in whichever precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import diagnose
from fxgrad.schema import GradientFlow


class Between(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def sigmoids() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 4))


def large_weights() -> nn.Module:
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 4))
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=4.0)
    return model


def dead() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[0].bias, -50.0)
    return model


def saturated() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    nn.init.normal_(model[0].weight, std=20.0)
    return model


def healthy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[tuple[str, str]]]] = {
    "healthy": (healthy, set()),
    "vanishing": (sigmoids, {("vanishing", "")}),
    "exploding": (large_weights, {("exploding", "")}),
    "dead": (dead, {("dead", "1")}),
    "saturated": (saturated, {("saturated", "1")}),
    "scale_break": (lambda: Between(lambda h: torch.tanh(h * 1e-5)), {("scale_break", "/mul")}),
    "zero": (lambda: Between(torch.round), {("zero", "/round")}),
    "detached": (lambda: Between(lambda h: h.detach()), {("detached", "/detach")}),
    "nonfinite": (lambda: Between(lambda h: (h - h.detach()).square().sqrt()), {("nonfinite", "/sqrt")}),
}


def told(flow: GradientFlow | tuple[GradientFlow, ...]) -> set[tuple[str, str]]:
    """Rule and place of each finding.  ``loss_seed`` is there to tell what all others leave out."""
    findings = [f for f in diagnose(flow).findings if f.rule != "loss_seed"]
    return {(f.rule, f.place) for f in findings}


def measure(build: Callable[[], nn.Module], loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> GradientFlow:
    torch.manual_seed(0)
    model, x = build().to(dtype), torch.randn(32, 8).to(dtype)
    return fxgrad.gradient_flow(model, x, loss=loss)


VARIANTS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "small": (lambda h: h.square().mean() * 1e-6, torch.float32),
    "scaled": (lambda h: h.square().mean() * 65536, torch.float32),
    "sum": (lambda h: h.square().sum(), torch.float32),
    "float64": (lambda h: h.square().mean(), torch.float64),
    "small in float64": (lambda h: h.square().sum() * 1e-30, torch.float64),
}


@pytest.mark.parametrize("name", MODELS)
def test_findings_do_not_depend_on_the_scale_of_the_loss(name: str) -> None:
    build, wanted = MODELS[name]
    base = told(measure(build, lambda h: h.square().mean(), torch.float32))
    assert {rule for rule, _ in base} == {rule for rule, _ in wanted}
    assert all((rule, place) in base for rule, place in wanted if place)
    for variant, (loss, dtype) in VARIANTS.items():
        assert told(measure(build, loss, dtype)) == base, variant


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_findings_do_not_depend_on_micro_batches(name: str, parts: int) -> None:
    build, _ = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(64, 8)
    with fxgrad.watch(model, statistics="full", sites="edge", forward=True) as watch:
        for part in x.chunk(parts):
            (model(part).square().mean() / parts).backward()
        flows = watch.history
    assert len(flows) == parts
    whole = told(fxgrad.gradient_flow(model, x, loss=lambda h: h.square().mean()))
    assert {rule for rule, _ in told(flows)} == {rule for rule, _ in whole}
