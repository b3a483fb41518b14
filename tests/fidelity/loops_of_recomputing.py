"""Loops whose forward runs in parts again: gradient checkpointing of both kinds, alone and under autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fxgrad.schema import GradientFlow
from tests.fidelity.loops import batch, loop
from tests.fidelity.loops_of_precision import Simple


class Block(nn.Module):
    """Notes the memory of its values, so that it can be asked which of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 24), nn.Linear(24, 6), nn.Dropout(0.2)
        self.made: list[tuple[StorageWeakRef, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.up(x))
        narrow = self.drop(self.down(wide * wide.sigmoid()))
        self.made += [(StorageWeakRef(v.untyped_storage()), v.untyped_storage().nbytes()) for v in (wide, narrow)]
        return x + narrow

    def alive(self) -> int:
        """Bytes of what its forward calls made that are still there."""
        found = sum(size for ref, size in self.made if not ref.expired())
        self.made = []
        return found


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]

    def alive(self) -> int:
        """Bytes of what the blocks made that are still there."""
        return sum(block.alive() for block in self.blocks)  # type: ignore[operator,misc]


class Kept(Simple):
    """No checkpoint: all values wait for the backward pass."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.model = Blocks(self.reentrant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def loss(self, i: int) -> Tensor:
        return self.model(batch(i).requires_grad_(self.reentrant is True)).square().mean()

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(i)
        alive = self.model.alive()
        loss.backward()
        self.model.alive()
        self.optimizer.step()
        return loss, alive  # compared with the plain run: watching keeps no memory

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        for flow in flows["model"]:
            assert all(record.statistics is not None for record in flow.parameters)


@loop
class WithoutCheckpoint(Kept):
    pass


@loop
class Checkpointed(Kept):
    reentrant = False

    def check(self, flows: Mapping[str, Sequence[GradientFlow]]) -> None:
        super().check(flows)
        assert all(site.measured for flow in flows["model"] for site in flow.sites if site.op == "call_module")


@loop
class CheckpointedReentrant(Kept):
    reentrant = True


@loop
class CheckpointedUnderAutocast(Checkpointed):
    def loss(self, i: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(i).float()


@loop
class CheckpointedSequential(Simple):
    """torch's own loop over a sequence, in two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Segments()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.stack, 2, x, use_reentrant=False)  # type: ignore[no-any-return]
