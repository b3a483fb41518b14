"""Splits what a watched step costs into its parts, and sets the floor beside it.

Run ``python -m benchmarks.where_time_goes resnet18 --threads 1``.  Each part is a difference of two medians, measured
in turn with the plain step; one after another, a piece of fxgrad does nothing:

* *graph*: the forward runs under observation, but no hook is put anywhere;
* *registration*: hooks are put on values (forward only), but return at once;
* *dispatch*: autograd calls those hooks;
* *record*: the hooks do all they do.  The reductions themselves are timed apart, on tensors of the same sizes, and what
  remains of *record* is Python;
* *floor*: those reductions, each gradient once, alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.models import CASES, Built, Case
from benchmarks.ours import Watched
from benchmarks.pairs import Effort, alternate, cpu_clock, median_ratio
from benchmarks.runners import Runner
from fxgrad.record.recorder import Recorder


class _NoHandle:
    """Stands for the handle of a hook that was not put on."""

    def remove(self) -> None:
        """Nothing to take off."""


def _put_no_hook(*_: Any) -> _NoHandle:
    return _NoHandle()


def _observe_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Pieces of fxgrad that do nothing inside of the block."""
    with ExitStack() as stack:
        if "hooks" in names:
            stack.enter_context(mock.patch.object(Tensor, "register_hook", _put_no_hook))
        if "record" in names:
            stack.enter_context(mock.patch.object(Recorder, "observe", _observe_nothing))
        yield


def _extra_ms(case: Case, effort: Effort, level: str, without: tuple[str, ...], *, backward: bool) -> float:
    """Milliseconds that a watched step takes more than a plain one."""

    def stepper(runner: Runner) -> Callable[[], None]:
        def step() -> None:
            loss = runner.forward()
            if backward:
                runner.backward(loss)

        return step

    built = case.make("cpu")
    watched = Watched(built.twin(), statistics=level)
    for _ in range(4):
        watched.step()
    with _without(*without):  # the plain step uses none of what is switched off
        watched.watch.pause()  # takes the hooks off the parameters: they are put on again, or not, in the next step
        watched.watch.resume()
        pairs = alternate(stepper(Runner(built)), stepper(watched), cpu_clock, effort)
    watched.close()
    differences = [1e3 * (other - plain) for plain, other in zip(pairs.plain, pairs.other, strict=True)]
    return median_ratio([1.0] * len(differences), differences)[0]


def _floor_ms(built: Built, effort: Effort) -> tuple[float, int]:
    """Milliseconds of one norm of each measured gradient that needs a read, and how many there are."""
    watched = Watched(built, statistics="norm")
    watched.step()
    flow = watched.watch.flow()
    watched.close()
    read = [site for site in flow.sites if site.measured and site.derived_from is None]
    shapes = [record.shape for record in (*read, *(record for record in flow.parameters if record.measured))]
    tensors = [torch.ones(shape) for shape in shapes]
    slots = torch.empty(len(shapes)).unbind()

    def reduce() -> None:
        for tensor, slot in zip(tensors, slots, strict=True):
            torch.linalg.vector_norm(tensor, out=slot)

    pairs = alternate(lambda: None, reduce, cpu_clock, effort)
    return 1e3 * float(torch.tensor(pairs.other).quantile(0.5)), len(shapes)


def split(case: Case, effort: Effort, level: str = "norm") -> dict[str, Any]:
    """Milliseconds of each part, for one model."""
    built = case.make("cpu")
    plain = Runner(built)
    taken = alternate(plain.step, plain.step, cpu_clock, effort)
    graph = _extra_ms(case, effort, level, ("hooks", "record"), backward=True)
    graph_forward = _extra_ms(case, effort, level, ("hooks", "record"), backward=False)
    hooked_forward = _extra_ms(case, effort, level, ("record",), backward=False)
    hooked = _extra_ms(case, effort, level, ("record",), backward=True)
    whole = _extra_ms(case, effort, level, (), backward=True)
    floor, reads = _floor_ms(case.make("cpu"), effort)
    registration = hooked_forward - graph_forward
    parts = {
        "graph": graph, "registration": registration, "dispatch": hooked - graph - registration,
        "record": whole - hooked, "whole": whole, "floor": floor,
    }  # fmt: skip
    words: dict[str, Any] = {name: round(value, 3) for name, value in parts.items()}
    plain_ms = 1e3 * float(torch.tensor(taken.plain).quantile(0.5))
    return words | {
        "model": case.name, "level": level, "plain_ms": round(plain_ms, 3), "reads": reads,
        "floor_ratio": round(1 + floor / plain_ms, 4), "threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    """Print the split of the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", choices=list(CASES["cpu"]))
    parser.add_argument("--level", default="norm", choices=["norm", "full"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each of the seven measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        effort = Effort(seconds=arguments.seconds)
        print(json.dumps(split(CASES["cpu"][name], effort, arguments.level)))


if __name__ == "__main__":
    main()
