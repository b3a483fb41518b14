"""The models of the benchmarks, each with an input and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

#: Step of the optimizer: small, so that hundreds of steps on one batch change nothing that matters for the time.
LEARNING_RATE = 1e-4


@dataclass
class Built:
    """A model in train mode, the arguments of one call, and what makes a scalar of its output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]

    def twin(self) -> Built:
        """The same model in other memory: what one copy carries must not be paid by the other."""
        return Built(copy.deepcopy(self.model), self.args, self.kwargs, self.loss)


@dataclass(frozen=True)
class Case:
    """A model of the benchmarks.

    Attributes:
        name: what ``--models`` takes.
        words: model and input, for the table.
        build: makes it on the CPU in float32.
        dtype: that model and input are converted to.
        large: a plain step takes so long that one pair of copies is enough.
    """

    name: str
    words: str
    build: Callable[[], Built]
    dtype: torch.dtype = torch.float32
    large: bool = False

    def make(self, device: str) -> Built:
        """The model on ``device``, the same at every call."""
        built = _made(self).twin()

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, self.dtype if value.is_floating_point() else None)

        model = built.model.train().to(device, self.dtype)
        args = tuple(moved(value) for value in built.args)
        return Built(model, args, {name: moved(value) for name, value in built.kwargs.items()}, built.loss)


def _square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _torchvision(name: str, *shape: int) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        return Built(torchvision.models.get_model(name), (torch.randn(shape),), {}, _square)

    return build


def _vit(batch: int) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        return Built(timm.create_model("vit_tiny_patch16_224"), (torch.randn(batch, 3, 224, 224),), {}, _square)

    return build


def _gpt2(batch: int, length: int) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        # The cache of keys and values is for generation; a training loop switches it off.
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
        tokens = torch.randint(0, 50257, (batch, length))
        return Built(model, (), {"input_ids": tokens, "labels": tokens.clone()}, _own_loss)

    return build


def _mlp() -> Built:
    parts: list[nn.Module] = []
    for _ in range(33):
        parts += [nn.Linear(64, 64), nn.ReLU()]
    return Built(nn.Sequential(*parts), (torch.randn(32, 64),), {}, _square)


_SMALL = (
    Case("resnet18", "ResNet-18, 8x3x64x64", _torchvision("resnet18", 8, 3, 64, 64)),
    Case("vit_tiny_4", "ViT-Tiny, 4x3x224x224", _vit(4)),
    Case("vit_tiny_1", "ViT-Tiny, 1x3x224x224", _vit(1)),
    Case("mlp33", "33-layer MLP, 32x64", _mlp),
)


@lru_cache(maxsize=1)  # making GPT-2 takes longer than copying it, and a row needs it several times
def _made(case: Case) -> Built:
    torch.manual_seed(0)
    return case.build()


_CPU = (
    *_SMALL,
    Case("resnet50", "ResNet-50, 2x3x224x224", _torchvision("resnet50", 2, 3, 224, 224), large=True),
    Case("gpt2", "GPT-2 small, 2x256 tokens", _gpt2(2, 256), large=True),
)
_CUDA = (
    Case("resnet50", "ResNet-50, 64x3x224x224, bf16", _torchvision("resnet50", 64, 3, 224, 224), torch.bfloat16,
         large=True),
    Case("gpt2", "GPT-2 small, 8x512 tokens, bf16", _gpt2(8, 512), torch.bfloat16, large=True),
    *_SMALL,
)  # fmt: skip

CASES: dict[str, dict[str, Case]] = {
    "cpu": {case.name: case for case in _CPU},
    "cuda": {case.name: case for case in _CUDA},
}
