"""What each rank of a test does; every function gets the rank and gives what is to be compared."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxgrad
from fxgrad.errors import NoFlowError, RanksError
from tests.distributed.nets import WIDTH, batch, loss_of, make, spread, watched
from tests.distributed.start import Gone

STEPS = 50
KINDS = ("ddp", "static graph", "unused", "comm hook", "fsdp", "mixed fsdp", "tensor parallel")
WHERE = {"ddp": ("before", "inside", "outside"), "fsdp": ("before", "outside")}


def collectives() -> int:
    """How many the process group has run."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


def local(tensor: Any) -> Any:
    return tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor


# ---- nothing changes -------------------------------------------------------------------------------------------------


def accumulating(model: Any, last: bool) -> Any:
    """No reduction in this backward pass, unless it is the last."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def trained(kind: str, rank: int, where: str | None, micro: int = 1, steps: int = STEPS, **options: Any) -> list[Any]:
    """Everything that a run leaves behind, and how many collectives it took."""
    if where == "before":
        model, watch = watched(kind, where, statistics="full", **options)
    else:
        model, watch = spread(kind, make()), None
    same = 0 if kind == "tensor parallel" else rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if where in {"inside", "outside"}:
        seen = model.module if where == "inside" else model
        watch = fxgrad.watch(seen, statistics="full", optimizer=optimizer, **options)
    torch.manual_seed(rank if kind != "tensor parallel" else 0)
    before = collectives()
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            with accumulating(model, number == micro - 1) if micro > 1 else contextlib.nullcontext():
                loss_of(model, same, 10 * step + number).backward()
        optimizer.step()
    found = [collectives() - before, torch.get_rng_state()]
    found += [local(value) for value in model.state_dict().values()]
    found += [local(v) for state in optimizer.state_dict()["state"].values() for v in state.values()]
    if watch is not None:
        flow = watch.flow()
        assert flow.event.backward == micro * steps - 1
        assert not [p.name for p in flow.parameters if p.statistics is None], [p.reason for p in flow.parameters]
        assert not flow.findings, str(flow.diagnosis)
        if where != "before":
            assert flow.optimizer.step == steps - 1
            assert all(p.update.l2_norm > 0 for p in flow.parameters)
        watch.remove()
    return found


def nothing_changes(rank: int) -> dict[str, Any]:
    """Each way of training plain and watched, with both recorders."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind] = trained(kind, rank, None)
        for where in WHERE.get(kind, ("outside",)):
            for native in (True, False):
                found[f"{kind}, {where}, native={native}"] = trained(kind, rank, where, native=native)
    return found


def nothing_changes_in_short(rank: int) -> dict[str, Any]:
    """The usual ways, in the 50 steps that are promised."""
    found: dict[str, Any] = {}
    for kind, where in (("ddp", "inside"), ("static graph", "outside"), ("fsdp", "outside")):
        found[kind] = trained(kind, rank, None)
        for native in (True, False):
            found[f"{kind}, {where}, native={native}"] = trained(kind, rank, where, native=native)
    return found


def nothing_changes_in_accumulation(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        found[kind] = trained(kind, rank, None, micro=3, steps=10)
        for native in (True, False):
            found[f"{kind}, native={native}"] = trained(kind, rank, "outside", micro=3, steps=10, native=native)
    return found


# ---- the flow of all ranks -------------------------------------------------------------------------------------------


def measured(values: Tensor) -> dict[str, float]:
    """What a tensor's statistics are, in plain torch and float64."""
    wide = values.detach().to(torch.float64).flatten()
    return {
        "numel": wide.numel(), "l2_norm": float(wide.norm()), "max_abs": float(wide.abs().max()),
        "sum": float(wide.sum()), "abs_sum": float(wide.abs().sum()), "zero_count": int((wide == 0).sum()),
        "nan_count": int(wide.isnan().sum()), "inf_count": int(wide.isinf().sum()),
        "subnormal_count": int(((wide != 0) & (wide.abs() < torch.finfo(torch.float32).tiny)).sum()),
        "flush_count": int(((wide != 0) & (wide.abs() < 2.0**-25)).sum()),
        "min_abs_nonzero": float(wide[wide != 0].abs().min()), "overflow_count": int((wide.abs() > 65504).sum()),
    }  # fmt: skip


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def by_hand(kind: str, rank: int) -> dict[str, dict[str, float]]:
    """Gradients of what the leaf modules return and of the parameters, gathered from all ranks, without fxgrad."""
    model = spread(kind, make())
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            out.register_hook(lambda gradient: caught.__setitem__(name, gradient.detach().clone()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.BatchNorm1d)):
            module.register_forward_hook(catch(name))
    if kind != "ddp":
        whole = dict(model.named_parameters())
    else:
        whole = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: caught.__setitem__(name, gradient.detach().clone()))
    torch.manual_seed(rank)
    loss_of(model, rank, 0, rows=3 + rank).backward()
    found = {name: measured(torch.cat([one.flatten() for one in gathered(g)])) for name, g in sorted(caught.items())}
    found.update({name: measured(parameter.grad.full_tensor()) for name, parameter in whole.items()})
    return found


def global_statistics(rank: int) -> dict[str, Any]:
    """What gathered gradients say, and what the reduced flow says, for both recorders."""
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp") if dist.get_world_size() == 2 else ("ddp", "fsdp", "hsdp"):
        wanted = by_hand(kind, rank)
        for native in (True, False):
            model, watch = watched(kind, "outside", statistics="full", native=native)
            for _ in range(3):  # from the second call of a kind on, the native recorder may follow
                torch.manual_seed(rank)
                model.zero_grad()
                loss_of(model, rank, 0, rows=3 + rank).backward()
                watch.flow()
            before = collectives()
            flow = watch.flow(reduce=True)
            assert collectives() - before == 1
            records = {**{site.id: site for site in flow.sites}, **{p.name: p for p in flow.parameters}}
            found[f"{kind}, native={native}"] = (wanted, {name: records[name].statistics for name in wanted})
            history = watch.history.reduced()
            assert collectives() - before == 2
            assert [one.event.backward for one in history] == [0, 1, 2]
            found[f"{kind}, native={native}, flow"] = flow
            assert history[-1] == flow
    return found


def tensor_parallel(rank: int) -> dict[str, Any]:
    """The model on one rank, without fxgrad, and what the ranks have of it together."""
    wanted = make(norm=False).eval()
    loss_of(wanted, 0, 0).backward()
    model = spread("tensor parallel", make(norm=False).eval())
    with fxgrad.watch(model, statistics="full", forward=True) as watch:
        loss_of(model, 0, 0).backward()
        flow = watch.flow(reduce=True)
    return {
        "gradients": {name: measured(p.grad) for name, p in wanted.named_parameters()},
        "values": {name: measured(p) for name, p in wanted.named_parameters()},
        "flow": flow,
        "own": watch.flow(),
    }


def unreduced(rank: int) -> Any:
    """A pass without a reduction, one with it, and one that adds to what is there."""
    model, watch = watched("fsdp", "outside", statistics="full")
    flows = []
    for sync in (False, True, True):
        model.set_requires_gradient_sync(sync)
        loss_of(model, rank, 0).backward()
        flows.append(watch.flow())
    return flows


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.more, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, extra: bool) -> Tensor:
        x = self.fc(x)
        if extra:
            x = torch.tanh(self.more(x))
        return self.head(x)


def another_course(rank: int) -> Any:
    """Rank 1 skips a branch; then rank 1 alone takes it; then it has no backward pass at all."""
    found = []
    model = Branched()
    for turn in range(3):
        with fxgrad.watch(model, statistics="full") as watch:
            if turn < 2 or rank != 1:
                model(batch(rank, 0)[0], extra=(rank == 1) == (turn == 1)).square().mean().backward()
            before = collectives()
            found.append(watch.flow(reduce=True))
            assert collectives() - before == 1
    with fxgrad.watch(model) as watch:
        try:
            watch.flow(reduce=True)
        except NoFlowError as error:
            found.append(str(error))
    return found


def fault_on_one_rank(rank: int) -> Any:
    """A NaN in the data of rank 1, and a gradient out of all proportion."""
    found = []
    for fault in (float("nan"), 1e6):
        torch.manual_seed(3)
        model = Branched()
        with fxgrad.watch(model, statistics="full") as watch:
            for step in range(4):
                x = batch(rank, step)[0]
                if rank == 1:
                    x[2, 3] = x[2, 3] * fault
                model(x, extra=fault != fault).square().mean().backward()
            found += [watch.flow(reduce=True), fxgrad.diagnose(watch.history.reduced())]
    return found


def warned(rank: int) -> list[str]:
    """What a limit says that is passed on one rank."""
    model = Branched()
    with fxgrad.watch(model, limits={"l2_norm": 1e6}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(rank, 0)[0] * (1e9 if rank else 1.0), extra=False).square().mean().backward()
    return [str(one.message) for one in caught if one.category is fxgrad.FindingWarning]


def writes(rank: int) -> list[str]:
    """Which files each rank writes."""
    model = Branched()
    folder = Path(gathered(tempfile.mkdtemp())[rank])
    with fxgrad.watch(model) as watch:
        model(batch(rank, 0)[0], extra=True).square().mean().backward()
        watch.flow().to_json(folder / f"own{rank}.json")
        watch.flow(reduce=True).to_json(folder / "reduced.json")
    return sorted(path.name for path in folder.iterdir())


def store_size() -> int:
    return int(dist.group.WORLD.get_group_store().num_keys())


def refused(rank: int) -> Any:
    """Calls that differ, a rank that comes too late, and what can be done behind that."""
    model = Branched()
    found = []
    with fxgrad.watch(model) as watch:
        model(batch(rank, 0)[0], extra=True).square().mean().backward()
        try:
            watch.flow(reduce=True) if rank == 0 else watch.history.reduced()
        except RanksError as error:
            found.append((str(error), error.ranks))
        store = dist.group.WORLD.get_group_store()
        if rank == 1:
            store.wait(["late"])
        try:
            watch.flow(reduce=True, timeout=0.5)
        except RanksError as error:
            found.append((str(error), error.ranks))
        store.set("late", "")
        sizes = []
        for _ in range(5):
            found.append(watch.flow(reduce=True))
            dist.barrier()
            sizes.append(store_size())
            dist.barrier()
        found.append(sizes[1:])
        one = torch.ones(1)
        dist.all_reduce(one)
        found.append(float(one))
    return found


def dies_in_the_middle(rank: int) -> Any:
    """All have come to the read; then the last rank is gone."""
    model = Branched()
    with fxgrad.watch(model) as watch:
        model(batch(rank, 0)[0], extra=True).square().mean().backward()
        if rank == dist.get_world_size() - 1:

            def gone(*args: Any, **kwargs: Any) -> None:
                raise Gone

            dist.all_gather = gone  # this process ends with it
        try:
            watch.flow(reduce=True, timeout=5.0)
        except RanksError as error:
            return str(error)
    return ""


def members_only(rank: int) -> Any:
    """A read by a process group of the first and the last rank."""
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if rank not in members:
        return None
    model = Branched()
    with fxgrad.watch(model, statistics="full") as watch:
        model(batch(rank, 0, rows=1 + rank)[0], extra=True).square().mean().backward()
        flow = watch.flow(reduce=True, group=group)
    return flow.ranks.size, flow.site("head").statistics.numel


def many_steps(rank: int, last: int = 1990) -> Any:
    """How many tensors, objects and file handles there are after some steps, and after 2,000.

    Both times as many of the kept events have been read.
    """
    counted = []
    trainers = [watched(kind, "outside", statistics="full") for kind in ("ddp", "fsdp")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model, _ in trainers]
    for step in range(last + 10):
        for (model, watch), optimizer in zip(trainers, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step % 50 == 0:
                watch.flow(reduce=True)
        if step in {290, last}:
            gc.collect()
            kinds = list(map(type, gc.get_objects()))  # of the objects themselves this list would keep some
            tensors = sum(issubclass(kind, Tensor) for kind in kinds)
            counted.append((tensors, len(kinds), len(list(Path("/proc/self/fd").iterdir()))))
    return counted


def dies(rank: int) -> Any:
    """The last rank is gone for good."""
    model = Branched()
    with fxgrad.watch(model) as watch:
        model(batch(rank, 0)[0], extra=True).square().mean().backward()
        watch.flow(reduce=True)
        if rank == dist.get_world_size() - 1:
            raise Gone
        try:
            watch.flow(reduce=True, timeout=1.0)
        except RanksError as error:
            return str(error), error.ranks, watch.flow().event.backward
    return None
