"""What it costs to diagnose a flow of about 1,000 sites: ``python -m benchmarks.diagnosis``.

Times ``fxgrad.diagnose`` alone, in this process, on one healthy flow and on sick ones with many findings.  The goal is
50 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

import fxgrad

REPEATS = 15


class Chain(nn.Module):
    """Linear layers, and what happens between them."""

    def __init__(self, depth: int, step: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 2)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        """Run all steps and the head."""
        for layer in self.layers:
            x = self.step(x, layer)
        return self.head(x)


def dead(depth: int) -> Chain:
    """Residual blocks whose ReLU never fires."""
    model = Chain(depth, lambda x, layer: x + torch.relu(layer(x)) * 0.5)
    for layer in model.layers:
        nn.init.constant_(layer.bias, -50.0)
    return model


FLOWS: dict[str, Callable[[], nn.Module]] = {
    "healthy residual stack": lambda: Chain(333, lambda x, layer: x + torch.tanh(layer(x)) * 0.05),
    "vanishing, sigmoid chain": lambda: Chain(500, lambda x, layer: torch.sigmoid(layer(x))),
    "250 dead activations": lambda: dead(250),
    "333 rounded branches": lambda: Chain(333, lambda x, layer: x + torch.round(layer(x))),
    "333 detached branches": lambda: Chain(333, lambda x, layer: x + layer(x).detach()),
}


def main() -> None:
    """Print a line per flow: sites, findings, milliseconds of the fastest and the median run."""
    torch.set_num_threads(1)
    print("| flow | sites | findings | fastest, ms | median, ms |\n|---|---|---|---|---|")
    for name, make in FLOWS.items():
        torch.manual_seed(0)
        flow = fxgrad.gradient_flow(make(), torch.randn(16, 8), loss=lambda out: out.square().mean())
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            diagnosis = fxgrad.diagnose(flow)
            times.append(1e3 * (time.perf_counter() - begin))
        count = len(diagnosis.findings)
        print(f"| {name} | {len(flow.sites)} | {count} | {min(times):.1f} | {median(times):.1f} |")


if __name__ == "__main__":
    main()
