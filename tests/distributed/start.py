"""Starts the ranks of a test, as ``torchrun`` would: a process each, gloo, and a store that outlives every rank."""

from __future__ import annotations

import importlib
import os
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LONGEST = timedelta(seconds=120)
_LEAVE = 10.0  # seconds


class Gone(Exception):
    """A rank is to die here, without a word to the others."""


def ranks(folder: Path, size: int, module: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank found: functions ``names`` of ``module``, each called with the rank, in this order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_one, (str(folder), store.port, size, module.__name__, tuple(names)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, folder: str, port: int, size: int, module: str, names: tuple[str, ...]) -> None:
    """One rank, from its process group to its file."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LONGEST)
    functions = importlib.import_module(module)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = getattr(functions, name)(rank)
        except Gone:
            torch.save(found, Path(folder) / f"{rank}.pt")
            os._exit(0)
        except Exception:  # the other ranks would wait for this one, and its error be lost  # noqa: BLE001
            found[name] = traceback.format_exc()
            break
    torch.save(found, Path(folder) / f"{rank}.pt")
    # Plain DistributedDataParallel over gloo, torn down, now and then aborts: the results are on disk, nothing is
    # torn down.  A rank leaves when all have written, or after some seconds where one of them is gone.
    store.add("written", 1)
    end = time.monotonic() + _LEAVE
    while store.add("written", 0) < size and time.monotonic() < end:
        time.sleep(0.02)
    os._exit(0)
