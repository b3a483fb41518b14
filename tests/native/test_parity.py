"""The native recorder says what the Python recorder says: sites, statistics, blind spots, edges, module calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests import models, strategies
from tests.native.parity import differences, repeated
from tests.runs import plain_run
from tests.sweeps.collections import TIMM, timm_case, torchvision_case, torchvision_names, transformers_cases

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]
KINDS: tuple[dict[str, Any], ...] = (
    {"sites": "node", "statistics": "norm"},
    {"sites": "edge", "statistics": "norm"},
    {"sites": "node", "statistics": "full"},
    {"sites": "edge", "statistics": "full"},
    {"sites": "edge", "statistics": "histogram"},
)


def _name(kind: dict[str, Any]) -> str:
    return f"{kind['sites']}-{kind['statistics']}"


# ---- small models --------------------------------------------------------------------------------------------------


def _zoo() -> Iterator[Any]:
    """All models at edge sites, at two levels; the rest is for the sweep."""
    for case in models.HEALTHY:
        for kind in KINDS:
            often = kind["sites"] == "edge" and kind["statistics"] != "full"
            yield pytest.param(case, kind, id=f"{case.id}-{_name(kind)}", marks=() if often else pytest.mark.sweep)


@pytest.mark.parametrize(("case", "kind"), list(_zoo()))
def test_the_zoo(case: models.Case, kind: dict[str, Any]) -> None:
    for _ in range(3):  # what TorchScript makes of a function changes in its first calls
        plain_run(*case.build(), case.loss)
    _, args, kwargs = case.build()
    found, _ = differences(lambda: case.build()[0], repeated(args, kwargs), case.loss, **kind)
    assert found == []


@pytest.mark.parametrize("case", models.cases(models.RAISING))
def test_what_raises(case: models.Case) -> None:
    _, args, kwargs = case.build()
    found, _ = differences(lambda: case.build()[0], repeated(args, kwargs), case.loss)
    assert found == []


# ---- random models -------------------------------------------------------------------------------------------------


def _differs(seed: int) -> list[str]:
    case = strategies.random_model(seed)
    _, args, kwargs = case.build()
    kind = KINDS[seed % len(KINDS)]
    batches = [(tuple(arg.detach()[:rows].clone().requires_grad_(arg.requires_grad) for arg in args), kwargs)
               for rows in ((4, 4, 4) if seed % 3 else (4, 3, 4, 2, 4))]  # fmt: skip
    return differences(lambda: case.build()[0], batches, case.loss, **kind)[0]


@pytest.mark.parametrize("seed", range(40))
def test_random_models(seed: int) -> None:
    assert _differs(seed) == [], strategies.random_model(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_many_random_models(part: int) -> None:
    wrong = {seed: found[:3] for seed in range(100 * part, 100 * (part + 1)) if (found := _differs(seed))}
    assert wrong == {}


class Deep(nn.Module):
    """Blocks that are left out by chance, from numbers that ``plain_run`` seeds."""

    def __init__(self, rate: float, kind: Literal["random", "drop", "reversed"]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(5))
        self.rate, self.kind = rate, kind

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.kind == "reversed" and torch.rand(()) < self.rate:
            blocks.reverse()
        for block in blocks:
            if self.kind == "random" and torch.rand(()) < self.rate:
                continue
            x = x + block(x) * 0.5
        return x.tanh()


def _shapes() -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    for rows in (4, 3, 5, 4, 2, 1, 6, 3, 4):
        yield (torch.randn(rows, 6),), {}


@pytest.mark.parametrize("kind", KINDS, ids=_name)
@pytest.mark.parametrize("way", ["random", "drop", "reversed"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_stochastic_depth_and_varying_shapes(rate: float, way: Any, kind: dict[str, Any]) -> None:
    model = Deep(rate, way)
    found, native = differences(lambda: copy.deepcopy(model), list(_shapes()), models.squares, **kind)
    assert found == []
    assert "native" in native.recorders


# ---- collections ---------------------------------------------------------------------------------------------------


def _same(built: Any, sites: str) -> None:
    model, args, kwargs, loss = built
    found, _ = differences(lambda: copy.deepcopy(model), repeated(args, kwargs), loss, sites=sites)
    assert found == []


@pytest.mark.sweep
@pytest.mark.parametrize("sites", ["node", "edge"])
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, sites: str) -> None:
    pytest.importorskip("timm")
    _same(timm_case(name), sites)


@pytest.mark.sweep
@pytest.mark.parametrize("sites", ["node", "edge"])
@pytest.mark.parametrize("name", [
    "bert", "clip", "distilbert", "gpt2", "llama", "mamba", "mistral", "mixtral", "opt", "roberta", "t5", "vit",
])  # fmt: skip
def test_hugging_face(name: str, sites: str) -> None:
    pytest.importorskip("transformers")
    _same(transformers_cases()[name](), sites)


@pytest.mark.sweep
@pytest.mark.parametrize("sites", ["node", "edge"])
def test_torchvision(sites: str) -> None:
    pytest.importorskip("torchvision")
    for name in torchvision_names():
        _same(torchvision_case(name), sites)
