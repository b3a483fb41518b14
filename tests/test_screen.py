"""The answer fits on one screen, in words and in the picture, for models that people have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app

ROOT = Path(__file__).parents[1]
SCREEN = (1400, 900)
WORKS = "ignore:.*:FutureWarning"


class MLP(nn.Module):
    def __init__(self, depth=40):
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.sigmoid(layer(x))
        return self.head(x)


def image_model(name, size=224):
    timm = pytest.importorskip("timm")
    return timm.create_model(name), (torch.randn(2, 3, size, size),), {}


def resnet50():
    models = pytest.importorskip("torchvision.models")
    return models.resnet50(), (torch.randn(2, 3, 64, 64),), {}


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=48, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0)
    words = torch.randint(0, 50, (1, 8))
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": words, "labels": words.clone()}


MODELS: dict[str, Any] = {
    "mlp": lambda: (MLP(), (torch.randn(4, 8),), {}),
    "sequential": lambda: (
        nn.Sequential(*(one for _ in range(40) for one in (nn.Linear(8, 8), nn.Sigmoid()))), (torch.randn(4, 8),), {}
    ),
    "resnet50": resnet50,
    "vit_b": lambda: image_model("vit_base_patch16_224"),
    "swin": lambda: image_model("swin_tiny_patch4_window7_224"),
    "convnext": lambda: image_model("convnext_tiny"),
    "gpt2": gpt2,
    "hrnet": lambda: image_model("hrnet_w18_small", 64),
    "levit": lambda: image_model("levit_128s"),
    "dla": lambda: image_model("dla34", 64),
    "davit": lambda: image_model("davit_tiny"),
    "efficientnet": lambda: image_model("efficientnet_b0", 64),
    "densenet": lambda: image_model("densenet121", 64),
}  # fmt: skip


def size(svg: str) -> tuple[float, float]:
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.mark.filterwarnings(WORKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_fits_on_one_screen(name) -> None:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    flow = fxgrad.gradient_flow(model, args, kwargs, statistics="norm")
    width, height = size(flow.to_svg())
    assert width <= SCREEN[0]
    assert height <= SCREEN[1]
    assert len(str(flow).splitlines()) <= 45


def test_the_profile_of_a_dying_perceptron_is_a_cell_for_each_of_its_blocks() -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(MLP(), torch.randn(4, 8))
    svg = flow.to_svg()
    assert svg.count('<g class="cell">') == 40
    assert svg.count("<circle") == 2  # the number of the finding, beside it and on the culprit
    assert "vanishing" in str(flow).splitlines()[0]


@pytest.mark.parametrize("columns", [40, 80])
def test_the_command_prints_a_vision_transformer_on_one_screen(columns, tmp_path, monkeypatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    words = ["run", "timm:create_model", "model_name=vit_tiny_patch16_224", "--input", "1x3x224x224"]
    lines = CliRunner().invoke(app, words).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert 5 < len(lines) <= 45
    assert lines[0].startswith("VisionTransformer: ")


GALLERY = sorted((ROOT / "docs" / "images").glob("gallery-*.svg"))


def test_the_gallery_has_ten_pictures_and_the_page_shows_each() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert page.count("\n## ") == 10
    for file in GALLERY:
        assert f'src="images/{file.name}"' in page
    assert len(GALLERY) == 11  # the last shows before and after


@pytest.mark.parametrize("file", GALLERY, ids=lambda file: file.stem)
def test_a_picture_of_the_gallery_fits_on_a_screen(file) -> None:
    width, height = size(file.read_text(encoding="utf-8"))
    assert height <= 1.6 * width
    assert width <= SCREEN[0] and height <= SCREEN[1]


def test_a_model_as_deep_as_asked_for_may_be_taller() -> None:
    models = pytest.importorskip("torchvision.models")
    flow = fxgrad.gradient_flow(models.resnet18(), torch.randn(2, 3, 64, 64))
    assert size(flow.to_svg(depth=9, fold=False))[0] > size(flow.to_svg())[0]


def test_the_costs_that_the_readme_tells_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = re.findall(r"\| (\d+\.\d{3})(?: \(a perceptron\))? \|$", readme, re.MULTILINE)
    assert len(told) == 7
    assert all(f"| {number} |" in measured for number in told)
