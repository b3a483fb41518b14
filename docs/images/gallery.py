"""Makes the pictures of ``docs/gallery.md``: ``python docs/images/gallery.py [NAME ...]``.

Needs torchvision, timm and transformers (``pip install fxgrad[test]``); nothing is downloaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad

FOLDER = Path(__file__).parent
_PATH = re.compile(r"(?:[\w.~-]*/)+([\w.-]+\.py:\d+)")


class MLP(nn.Module):
    """Equal linear maps with one activation behind each."""

    def __init__(self, act: Callable[[Tensor], Tensor], depth: int = 40, *, skip: bool = False) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.head = nn.Linear(32, 10)
        self.act, self.skip = act, skip

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        for layer in self.hidden:
            made = self.act(layer(x))
            x = x + made if self.skip else made
        scores: Tensor = self.head(x)
        return scores


class CNN(nn.Module):
    """Its second convolution has a bias that keeps the ReLU behind it shut."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)
        nn.init.constant_(self.features[3].bias, -20.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.features(x).mean((2, 3)))
        return scores


class RNN(nn.Module):
    """A recurrent map that is too large, unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.inp, self.head = nn.Linear(64, 64), nn.Linear(16, 64), nn.Linear(64, 5)
        nn.init.normal_(self.cell.weight, std=0.6)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores behind the last step."""
        h = x.new_zeros(x.shape[0], 64)
        for t in range(x.shape[1]):
            h = F.relu(self.inp(x[:, t]) + self.cell(h))
        scores: Tensor = self.head(h)
        return scores


class Distances(nn.Module):
    """Pairwise distances: the root of zero on the diagonal has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, weighed by the mean distance."""
        h = torch.relu(self.embed(x))
        distance = (h.unsqueeze(0) - h.unsqueeze(1)).square().sum(-1).sqrt()
        scores: Tensor = self.head(torch.relu(self.scale(h))) * distance.mean()
        return scores


class Skips(nn.Module):
    """Blocks with a skip around each: the gradient goes through the skips, and next to none through the branches."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Sigmoid()) for _ in range(blocks)
        )
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


def _double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, across and up again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.downs = nn.ModuleList(_double(a, b) for a, b in zip([3, *sizes], sizes[:3], strict=False))
        self.middle = _double(sizes[2], sizes[3])
        pairs = [(sizes[n + 1], sizes[n]) for n in (2, 1, 0)]
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joins = nn.ModuleList(_double(2 * b, b) for _, b in pairs)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A mask."""
        kept = []
        for down in self.downs:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        mask: Tensor = self.out(x)
        return mask


def _resnet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from torchvision.models import resnet50

    return resnet50().eval(), (torch.randn(16, 3, 96, 96),), {}


def _vit() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import timm

    return timm.create_model("vit_base_patch16_224"), (torch.randn(1, 3, 224, 224),), {}


def _gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    words = torch.randint(0, 500, (2, 32))
    model = GPT2LMHeadModel(GPT2Config(n_embd=192, vocab_size=500, bos_token_id=0, eos_token_id=0))
    return model, (), {"input_ids": words, "labels": words.clone()}


#: What makes each picture: the model, its arguments, its keyword arguments.
PICTURES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "resnet50": _resnet,
    "sigmoid-mlp": lambda: (MLP(torch.sigmoid), (torch.randn(64, 32),), {}),
    "dead-relu": lambda: (CNN(), (torch.randn(8, 3, 32, 32),), {}),
    "exploding-rnn": lambda: (RNN(), (torch.randn(8, 24, 16),), {}),
    "nan-from-sqrt": lambda: (Distances(), (torch.randn(6, 8),), {}),
    "skip-against-branch": lambda: (Skips(), (torch.randn(16, 32),), {}),
    "vit": _vit,
    "unet": lambda: (UNet(), (torch.randn(2, 3, 64, 64),), {}),
    "gpt2": _gpt2,
    "before": lambda: (MLP(torch.sigmoid, 12), (torch.randn(64, 32),), {}),
    "after": lambda: (MLP(F.gelu, 12, skip=True), (torch.randn(64, 32),), {}),
}


def main(names: list[str]) -> None:
    """Draw the pictures with these names, or all; source lines are named without their folders."""
    for name in names or PICTURES:
        torch.manual_seed(0)
        model, args, kwargs = PICTURES[name]()
        flow = fxgrad.gradient_flow(model, args, kwargs)
        text = _PATH.sub(r"\1", flow.to_svg())
        (FOLDER / f"gallery-{name}.svg").write_text(text, encoding="utf-8")
        sys.stdout.write(f"{name}: {', '.join(one.rule for one in flow.findings) or 'no findings'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
