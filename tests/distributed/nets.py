"""Models, data, and the ways in which a model is spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxgrad

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Residual blocks with a parameter of its own, dropout (random streams) and batch norm (buffers)."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)) * self.scale)


def make(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def batch(rank: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 3, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int, rows: int = 4) -> Tensor:
    x, y = batch(rank, step, rows)
    return F.mse_loss(model(x), y)


def sharded(net: Any, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def spread(kind: str, net: Net) -> nn.Module:
    """The model as it trains, by the word for how."""
    if kind == "fsdp":
        return sharded(net)
    if kind == "mixed fsdp":
        net.norm = nn.Identity()
        for number, block in enumerate(net.blocks):
            net.blocks[number] = checkpoint_wrapper(block)
        return sharded(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if kind == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
        return sharded(net, mesh=mesh)
    if kind == "tensor parallel":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return net
    options: dict[str, dict[str, Any]] = {
        "ddp": {},
        "static graph": {"static_graph": True, "gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "comm hook": {},
    }
    model = DistributedDataParallel(net, **options[kind])
    if kind == "comm hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def watched(kind: str, where: str, **options: Any) -> tuple[nn.Module, Any]:
    """The model as it trains and its watch; ``where``: ``"before"`` it is wrapped, ``"inside"`` or ``"outside"``."""
    net = make()
    watch = fxgrad.watch(net, **options) if where == "before" else None
    model = spread(kind, net)
    if watch is None:
        watch = fxgrad.watch(net if where == "inside" else model, **options)
    return model, watch
