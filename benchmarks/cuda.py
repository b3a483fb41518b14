"""What only a CUDA device can tell: synchronisations, kernels launched, graph capture."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fxgrad
from benchmarks.models import Case
from benchmarks.runners import Runner

_SETTLED = 5


def extras(plain: Runner, other: Runner) -> dict[str, Any]:
    """Host syncs and kernels of a settled step of each."""
    return {
        name: {"step_without_sync": _without_sync(runner), **_kernels(runner)}
        for name, runner in (("plain", plain), ("other", other))
    }


def _without_sync(runner: Runner) -> str:
    """``"yes"``, or what torch says about the first synchronisation of the step."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.step()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "yes"


def _kernels(runner: Runner) -> dict[str, int]:
    """Kernels and copies that one step puts on the device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as running:
        runner.step()
        torch.cuda.synchronize()
    names = [event.name for event in running.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    to_host = sum(name.startswith("Memcpy DtoH") for name in names)
    return {"kernels": len(names) - copies, "copies": copies, "copies_to_host": to_host}


def graph_capture(case: Case) -> dict[str, Any]:
    """Whether a watched step can be captured into a CUDA graph, replayed, and read with the right numbers."""
    built = case.make("cuda")
    plain = built.twin()
    watch = fxgrad.watch(built.model, statistics="norm")
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_SETTLED):
                built.model.zero_grad()
                built.loss(built.model(*built.args, **built.kwargs)).backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        built.model.zero_grad()
        with torch.cuda.graph(graph):
            built.loss(built.model(*built.args, **built.kwargs)).backward()
        for value in built.args:  # new numbers, which only a replay can have seen
            value.copy_(torch.randn_like(value))
        graph.replay()
        torch.cuda.synchronize()
        return {"captured": "yes", **_compare(watch.flow(), plain)}
    except Exception as error:  # noqa: BLE001  # the answer is what went wrong
        return {"captured": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        watch.remove()


def _compare(flow: Any, plain: Any) -> dict[str, Any]:
    """Norms of the parameters' gradients in the replayed flow to those of a plain step on the same input."""
    plain.loss(plain.model(*plain.args, **plain.kwargs)).backward()
    norms = {name: float(p.grad.float().norm()) for name, p in plain.model.named_parameters() if p.grad is not None}
    pairs = [(record.l2_norm, norms[record.name]) for record in flow.parameters if record.measured]
    worst = max(abs(ours - theirs) / max(theirs, 1e-30) for ours, theirs in pairs)
    return {"parameters": len(pairs), "worst_relative_difference": worst}
