"""On how many stock models ``register_full_backward_hook`` on every module runs at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def crashes() -> dict[str, Any]:
    """Try every torchvision classifier in train mode, on the meta device, where shapes are real and numbers are not."""
    import torchvision

    names = sorted(torchvision.models.list_models(module=torchvision.models))
    failed: dict[str, str] = {}
    for name in names:
        try:
            _try(name)
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0][:80]
    return {"models": len(names), "crash": len(failed), "messages": dict(Counter(failed.values()))}


@contextmanager
def _on_meta() -> Iterator[None]:
    """Tensors are made on the meta device, but for the widths of RegNet's blocks, which are computed with tensors."""
    from torchvision.models.regnet import BlockParams

    original = BlockParams.from_init_params

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return original(*args, **kwargs)

    BlockParams.from_init_params = on_cpu
    try:
        with torch.device("meta"):
            yield
    finally:
        BlockParams.from_init_params = original


def _try(name: str) -> None:
    import torchvision

    with _on_meta():
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(name, **options).train()
        size = 299 if name == "inception_v3" else 224
        x = torch.randn(2, 3, size, size)
    for module in model.modules():
        if module is not model:
            module.register_full_backward_hook(_look)
    output: Any = model(x)
    found = [output] if isinstance(output, torch.Tensor) else [t for t in output if isinstance(t, torch.Tensor)]
    torch.stack([t.sum() for t in found]).sum().backward()


def _look(_module: nn.Module, _grad_input: Any, grad_output: Any) -> None:
    if isinstance(grad_output[0], torch.Tensor):
        grad_output[0].norm()
