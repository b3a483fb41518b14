"""What the picture and the table mark is what the findings say: nothing of their own on a model that has none."""

from __future__ import annotations

import re

import pytest
import torch
import torchvision
from rich.console import Console
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fxgrad

pytestmark = pytest.mark.filterwarnings("ignore")


def vit():
    model = torchvision.models.VisionTransformer(32, 8, 6, 4, 32, 64, num_classes=10)
    nn.init.normal_(model.heads[0].weight, std=0.05)  # torchvision begins with a head of zeros
    return model, (torch.randn(2, 3, 32, 32),)


def convnext():
    blocks = [
        torchvision.models.convnext.CNBlockConfig(16, 32, 3),
        torchvision.models.convnext.CNBlockConfig(32, None, 3),
    ]
    return torchvision.models.ConvNeXt(blocks, num_classes=10), (torch.randn(2, 3, 32, 32),)


def swin():
    model = torchvision.models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=10)
    return model, (torch.randn(2, 3, 32, 32),)


def gpt2():
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config), (torch.randint(50, (2, 16)),)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


def lstm():
    return Lstm(), (torch.randint(20, (4, 12)),)


def loss(output):
    logits = (output.logits if hasattr(output, "logits") else output).flatten(0, -2)
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


@pytest.mark.parametrize("make", [vit, convnext, swin, gpt2, lstm])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_model_gets_no_mark(make, seed) -> None:
    torch.manual_seed(seed)
    model, args = make()
    flow = fxgrad.gradient_flow(model, args, loss=loss)
    assert flow.diagnosis.healthy, str(flow.diagnosis)
    text = flow.to_dot()
    assert not re.search("DROP|legend_drop|culprit", text)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(flow.table())
    assert "<- " not in capture.get()
