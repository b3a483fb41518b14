"""What C++ tells of a model's tensors is what Python tells."""

from __future__ import annotations

from typing import Any

import torch

from fxgrad.torch_support.private_passes import versions_of


def test_versions(native: Any) -> None:
    x, y = torch.ones(2), torch.ones(2)
    x.add_(1)
    x.view(1, 2).mul_(2)
    with torch.inference_mode():
        frozen = torch.ones(2)
    listed = [(0, ("x",), x), (1, ("y",), y), (2, ("frozen",), frozen)]
    assert list(versions_of(listed, native)) == versions_of(listed) == [2, 0, 0]
