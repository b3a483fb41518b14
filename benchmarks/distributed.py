"""What does it cost to read the flow of 1,000 ranks?  Ranks are faked: each has a record, none is a process.

    python -m benchmarks.distributed                       # 1,000 ranks, 2,000 values, norm and full
    python -m benchmarks.distributed --ranks 64 --write    # into results/distributed/ranks.json

The network is not in it: what a rank receives is given in bytes.  What is timed is the work of one rank, in seconds of
its CPU: packing its own flow, and unpacking and putting together those of all.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.record.distributed import packed, unpacked
from fxgrad.record.rows import L2
from fxgrad.record.union import together
from fxgrad.schema import GradientFlow, Level

RESULTS = Path(__file__).parent / "results" / "distributed" / "ranks.json"
_VALUES = 4  # of a block


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x)) * 0.1


def _flow(values: int, level: Level) -> GradientFlow:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(values // _VALUES)))
    with fxgrad.watch(model, statistics=level) as watch:
        model(torch.randn(2, 4)).square().mean().backward()
        return watch.flow()


def measure(ranks: int, values: int, level: Level) -> dict[str, Any]:
    """The bytes and seconds of one read, on one rank."""
    flow = _flow(values, level)
    begin = time.process_time()
    own = packed([flow], 0)
    packing = time.process_time() - begin
    (part,) = unpacked(own.payload, 0)
    payloads = []
    for rank in range(ranks):
        payload = own.payload.clone()
        rows = payload[payload.numel() - part.rows.nbytes :].view(torch.float64).view(part.rows.shape)
        rows[:, L2] *= 1.0 + rank / ranks
        payloads.append(payload)
    begin = time.process_time()
    parts = [one for rank, payload in enumerate(payloads) for one in unpacked(payload, rank)]
    unpacking = time.process_time() - begin
    begin = time.process_time()
    whole = together(parts, own.courses, ranks)
    putting = time.process_time() - begin
    assert whole.ranks is not None  # noqa: S101
    return {
        "ranks": ranks, "values": len(flow.sites), "parameters": len(flow.parameters), "level": level,
        "bytes_sent": own.payload.numel(), "bytes_received": own.payload.numel() * ranks,
        "seconds_packing": round(packing, 4), "seconds_unpacking": round(unpacking, 4),
        "seconds_putting_together": round(putting, 4), "worst": whole.ranks.worst,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--values", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(asked.ranks, asked.values, level) for level in ("norm", "full")]
    text = json.dumps({"torch": torch.__version__, "threads": 1, "rows": rows}, indent=1) + "\n"
    print(text, end="")
    if asked.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
