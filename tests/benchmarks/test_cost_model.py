"""The budget: what a watched step may ask for more than a plain one, exactly, without a clock.

A change that costs more fails here; one that costs less is to renew the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import fxgrad
from benchmarks.cost_model import Cost, cost, gradient_bytes
from benchmarks.counting import Counts, count
from benchmarks.models import CASES, Built
from benchmarks.ours import Paused, Watched
from benchmarks.runners import Runner
from tests.benchmarks.steps import residual

# Operators of torch are counted; the native library's are none.
pytestmark = pytest.mark.usefixtures("python_recorder")

#: Kernels of a step that belong to no gradient: the finished slots of sites and of parameters are copied once each.
COPIES = 2
#: Kernels for the twelve scalars of a batch of gradients in plain torch, at most.
FULL_KERNELS = 53


def perceptron() -> Built:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(8, 8), nn.ReLU())])
    return Built(model, (torch.randn(4, 8),), {}, lambda output: output.square().mean())


def encoder() -> Built:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Built(model, (torch.randn(2, 5, 16),), {}, lambda output: output.square().mean())


def resnet18() -> Built:
    built = CASES["cpu"]["resnet18"].make("cpu")
    built.args = (torch.randn(2, 3, 32, 32),)
    return built


MODELS: dict[str, Callable[[], Built]] = {
    "residual": residual, "perceptron": perceptron, "encoder": encoder,
}  # fmt: skip


@dataclass
class Priced:
    """A configuration's cost, and the flow of one of its steps."""

    cost: Cost
    flow: fxgrad.GradientFlow

    @property
    def reads(self) -> int:
        """Gradients that need a probe of their own."""
        sites = [site for site in self.flow.sites if site.measured and site.derived_from is None]
        return len(sites) + sum(record.measured for record in self.flow.parameters)


@pytest.fixture(params=list(MODELS))
def built(request: pytest.FixtureRequest) -> Built:
    return MODELS[request.param]()


def priced(built: Built, **options) -> Priced:
    runner = Watched(built.twin(), **options)
    for _ in range(4):
        runner.step()
    flow = runner.watch.flow()
    runner.close()
    return Priced(cost(partial(Watched, **options), built), flow)


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_norm_is_one_kernel_a_gradient(built: Built, capture: str) -> None:
    found = priced(built, statistics="norm", capture=capture)
    assert found.reads > 4
    assert found.cost.extra.kernels == found.reads + COPIES


def test_norm_reads_each_gradient_once_and_little_else(built: Built) -> None:
    found = priced(built, statistics="norm")
    extra = found.cost.extra
    assert extra.bytes_read == gradient_bytes(found.flow) + extra.left_bytes


def test_the_budget_of_norm_on_resnet18() -> None:
    found = priced(resnet18(), statistics="norm")
    extra = found.cost.extra
    assert len(found.flow.sites) == 70
    copies = COPIES + 1  # the large gradients of parameters have their sums of squares in slots of their own
    assert extra.kernels == found.reads + copies
    assert extra.bytes_read == gradient_bytes(found.flow) + extra.left_bytes
    assert extra.outliving == extra.left == extra.allocations == copies
    assert (found.cost.step_reads, found.cost.flow_reads) == (0, 1)


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_no_allocation_outlives_its_hook_and_a_step_leaves_its_slots_only(built: Built, statistics: str) -> None:
    """What outlives is made when the backward pass has ended, and is all that is left after the step."""
    found = priced(built, statistics=statistics)
    assert found.cost.extra.outliving == found.cost.extra.left
    if statistics == "norm":
        assert found.cost.extra.left == COPIES
    else:  # small gradients are reduced together, into one result, which the count misses where the kernel is compiled
        assert found.cost.extra.left <= 1
    entries = 1 if statistics == "norm" else 12 * 2  # float32, or twelve of float64
    most = 4 * entries * (len(found.flow.sites) + len(found.flow.parameters) + 2 * 64)
    assert found.cost.extra.left_bytes <= most


def test_norm_allocates_for_the_finished_slots_only(built: Built) -> None:
    assert priced(built, statistics="norm").cost.extra.allocations == COPIES


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_a_step_waits_for_nothing_and_a_read_is_one_copy(built: Built, statistics: str) -> None:
    found = priced(built, statistics=statistics).cost
    assert (found.step_reads, found.extra.syncs) == (0, 0)
    assert found.flow_reads == 1


def test_full_stages_small_gradients_and_reduces_them_at_once() -> None:
    found = priced(residual(), statistics="full")
    assert found.cost.extra.kernels <= found.reads + FULL_KERNELS


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_a_paused_step_is_the_plain_step(built: Built, statistics: str) -> None:
    assert cost(partial(Paused, statistics=statistics), built).extra == Counts()


def test_a_step_between_observed_ones_is_the_plain_step() -> None:
    plain, watched = Runner(residual()), Watched(residual(), statistics="norm", every=3)
    for runner in (plain, watched):
        for _ in range(4):
            runner.step()
    expected = count(plain.step)
    assert count(watched.step) - expected == Counts()
