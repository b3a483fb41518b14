"""Stock models at random initialisation with a plain loss are healthy: no warning, no error.

``-m sweep`` runs all of them, which takes long (some models have over 600 million parameters); a sample runs always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import diagnose
from tests.sweeps.collections import TIMM

pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the collections' own code makes torch warn of
SAMPLE = ("resnet18", "mobilenet_v3_small", "squeezenet1_1")
TIMM_SAMPLE = ("vit_tiny_patch16_224", "convnext_atto")


def classifiers() -> list[str]:
    """All torchvision models that classify images."""
    import torchvision

    return sorted(torchvision.models.list_models(module=torchvision.models))


def cross_entropy(batch: int, classes: int) -> Callable[[Any], Tensor]:
    """Cross-entropy with random targets; auxiliary heads count 0.3, as GoogLeNet's paper has it."""
    target = torch.randint(0, classes, (batch,))

    def loss(output: Any) -> Tensor:
        heads = [t for t in output if t is not None] if isinstance(output, tuple) else [output]
        parts = [nn.functional.cross_entropy(head, target) for head in heads]
        return parts[0] + 0.3 * sum(parts[1:], torch.zeros(()))

    return loss


def findings(model: nn.Module, size: int, classes: int) -> list[str]:
    """Warnings and errors of one forward and backward on four random images."""
    images = torch.randn(4, 3, size, size)
    diagnosis = diagnose(fxgrad.gradient_flow(model, (images,), loss=cross_entropy(4, classes)))
    return [f"{f.rule} at {f.place}: {f.message}" for f in diagnosis.findings if f.severity != "info"]


def torchvision_size(name: str) -> int:
    """The smallest size that is usual for this model."""
    if name.startswith("inception"):
        return 299
    return 224 if name.startswith(("maxvit", "alexnet", "vit_")) else 96


def check_torchvision(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    options = {"init_weights": True} if name in {"googlenet", "inception_v3"} else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options).train()
    assert findings(model, torchvision_size(name), 10) == []


def check_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).train()
    assert findings(model, model.default_cfg["input_size"][-1], 10) == []


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_torchvision(name: str) -> None:
    check_torchvision(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(classifiers()) - set(SAMPLE)))
def test_every_torchvision_classifier(name: str) -> None:
    check_torchvision(name)


@pytest.mark.parametrize("name", TIMM_SAMPLE)
def test_a_sample_of_timm(name: str) -> None:
    check_timm(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(TIMM) - set(TIMM_SAMPLE)))
def test_timm_families(name: str) -> None:
    check_timm(name)
