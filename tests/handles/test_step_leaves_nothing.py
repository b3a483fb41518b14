"""A watched step leaves nothing behind that waits for Python's collector of circles."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import fxgrad


@pytest.mark.parametrize("options", [{}, {"native": False}, {"statistics": "full", "sites": "edge", "forward": True}])
def test_a_step_makes_no_circles(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    with fxgrad.watch(model, **options) as watch:
        for _ in range(10):
            model(torch.randn(4, 6)).sum().backward()
        watch.flow()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(10):
                model(torch.randn(4, 6)).sum().backward()
            gc.collect()
            found = {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("fxgrad")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert found == set()
