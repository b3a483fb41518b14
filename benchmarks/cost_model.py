"""The price of a configuration without a clock: kernels, bytes read, memory, host syncs more than the plain step.

The floor of the bytes is each measured gradient read once.  A host sync inside of the step is what a dispatch mode sees
(a scalar read) and what a function mode sees (``.cpu()``, ``.tolist()`` and their kin); counted on the CPU, where they
are the same calls that wait on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.counting import Counts, count, host_reads
from benchmarks.models import Built
from benchmarks.runners import Runner

SETTLED = 4  # steps until a watch has looked at the model, chosen its front end and made its buffers


@dataclass(frozen=True)
class Cost:
    """What a step asks for more than the plain one.

    Attributes:
        extra: the difference of the counts.
        step_reads: host reads in the step beyond the plain one's.
        flow_reads: host reads of one look at what the step told, after it; None where that is a part of the step.
        plain: the counts of the plain step.
    """

    extra: Counts
    step_reads: int
    flow_reads: int | None
    plain: Counts


def cost(make: Callable[[Built], Runner], built: Built, plain: Callable[[Built], Runner] = Runner) -> Cost:
    """The price of one settled step of ``make(built)``; ``built`` is used up."""
    base, base_reads = _counted(plain(built.twin()))
    runner = make(built)
    counts, reads = _counted(runner)
    runner.step()
    with host_reads() as looking:
        runner.read()
    separate = type(runner).read is not Runner.read
    runner.close()
    return Cost(counts - base, reads - base_reads, looking.number if separate else None, base)


def _counted(runner: Runner) -> tuple[Counts, int]:
    for _ in range(SETTLED):
        runner.step()
    counts = count(runner.step)
    with host_reads() as reads:
        runner.step()
    return counts, reads.number


def gradient_bytes(flow: Any) -> int:
    """The floor: the bytes of every measured gradient that needs a read of its own.

    A derived site costs nothing; a parameter costs its gradient.
    """
    sizes = {"float64": 8, "complex64": 8, "complex128": 16, "float16": 2, "bfloat16": 2}
    read = [site for site in flow.sites if site.measured and site.derived_from is None]
    records = [*read, *(record for record in flow.parameters if record.measured)]
    return sum(math.prod(record.shape) * sizes.get(record.dtype, 4) for record in records)
