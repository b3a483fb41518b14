"""The native recorder sees the operators of its own call in its own thread, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from tests.native.parity import flow_differences

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Tanh())


def step(model: nn.Module, number: int) -> Tensor:
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def run(*jobs: Any) -> None:
    """All at once, in threads of their own; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(job: Any) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def known(steps: int) -> Any:
    model = make()
    with fxgrad.watch(model, native=False) as watch:
        for number in range(steps):
            step(model, number)
        return watch.flow()


def test_two_threads_with_a_model_each() -> None:
    flows: dict[int, Any] = {}
    models = [make(), make()]

    def job(place: int) -> None:
        with fxgrad.watch(models[place]) as watch:
            for number in range(20):
                step(models[place], number)
            flows[place] = watch.flow()

    run(lambda: job(0), lambda: job(1))
    want = known(20)
    for flow in flows.values():
        assert flow.capture.recorder == "native"
        assert list(flow_differences(flow, want)) == []


def test_one_model_in_two_threads() -> None:
    model = make()
    x = torch.randn(4, 6)
    plain = make()(x)
    with fxgrad.watch(model) as watch:
        step(model, 0)

        def job() -> None:
            for _ in range(20):
                out = model(x)
                assert torch.equal(out, plain)
                out.sum().backward()

        run(job, job)
        flows = watch.history
    ids = [site.id for site in flows[0].sites]
    assert len(flows) >= 21
    assert all([site.id for site in flow.sites] == ids for flow in flows)


def test_what_a_data_thread_runs_is_not_seen() -> None:
    model, stop = make(), threading.Event()
    drawn: list[Tensor] = []

    def load() -> None:
        generator = torch.Generator().manual_seed(7)
        while not stop.is_set():
            drawn.append(torch.randn(3, generator=generator).requires_grad_().exp().detach())

    thread = threading.Thread(target=load)
    thread.start()
    try:
        with fxgrad.watch(model) as watch:
            for number in range(20):
                step(model, number)
            flow = watch.flow()
    finally:
        stop.set()
        thread.join()
    assert flow.capture.recorder == "native"
    assert list(flow_differences(flow, known(20))) == []
    generator = torch.Generator().manual_seed(7)
    assert all(torch.equal(got, torch.randn(3, generator=generator).exp()) for got in drawn)


def test_the_stream_of_random_numbers_is_not_touched() -> None:
    model = make()
    with fxgrad.watch(model) as watch:
        for number in range(3):
            torch.manual_seed(5)
            before = torch.get_rng_state()
            step(model, number)
            assert torch.equal(torch.get_rng_state(), before)
        assert watch.flow().capture.recorder == "native"


def test_nothing_is_registered_for_the_process_or_left_in_the_thread() -> None:
    model = make()
    assert not torch._C._autograd._profiler_enabled()  # a callback of the process would be seen there
    seen: list[str] = []

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def other() -> None:
                seen.append(str(torch.ones(2).requires_grad_().exp().sum().item()))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x * 2

    model.append(Probe())
    with fxgrad.watch(model) as watch:
        for number in range(3):
            step(model, number)
        flow = watch.flow()
        step(make(), 0)  # after the call, nothing is seen any more
    assert len(seen) == 3
    assert flow.capture.recorder == "native"
    assert not any("exp" in site.id for site in flow.sites)


def test_two_backward_passes_at_once_through_one_call() -> None:
    """Each is an event of its own, whole; events that have ended meanwhile are not looked at any more."""
    model = make()
    with fxgrad.watch(model) as watch:
        for number in range(3):
            step(model, number)
        want = watch.flow().sites
    model = make()
    with fxgrad.watch(model) as watch:
        for number in range(2):
            step(model, number)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
        loss = model(x).square().mean()

        def backwards() -> None:
            for _ in range(40):
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

        run(*[backwards] * 3)
        flows = [flow for flow in watch.history if flow.event.forward == 2]
    assert len(flows) == 120
    assert {flow.capture.recorder for flow in flows} == {"native"}
    norms = {tuple(site.statistics and site.statistics.l2_norm for site in flow.sites) for flow in flows}
    assert norms == {tuple(site.statistics and site.statistics.l2_norm for site in want)}
