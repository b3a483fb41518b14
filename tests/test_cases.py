"""Public bug reports as small scripts (``tests/cases``): what fxgrad says of each, and that it changes nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxgrad
from tests.runs import assert_same_run, plain_run

NAMES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[0-9]*.py"))
CAPTURES = ("auto", "eager")
pytestmark = pytest.mark.filterwarnings("ignore")  # some reports are about the very things that torch warns of


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.cases.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_real(name: str) -> None:
    load(name).symptom()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_nothing(name: str, capture: str) -> None:
    case = load(name)
    model, inputs, loss = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, capture=capture) as watch:
        for step in range(3):  # the third one is symbolic where the model can be traced
            want = plain_run(model, inputs, None, loss, seed=step)
            assert_same_run(plain_run(watched, inputs, None, loss, seed=step), want)
        if hasattr(case, "alt_inputs"):
            want = plain_run(model, case.alt_inputs(), None, loss, seed=9)
            assert_same_run(plain_run(watched, case.alt_inputs(), None, loss, seed=9), want)
    assert len(watch.history) == 3 + hasattr(case, "alt_inputs")
    model.eval()
    watched.eval()
    assert_same_run(plain_run(watched, inputs), plain_run(model, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_one_shot_leaves_the_model_alone(name: str) -> None:
    case = load(name)
    model, inputs, loss = case.build()
    before = plain_run(model, inputs, None, loss)
    random_state = torch.get_rng_state()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    grads = {n: p.grad for n, p in model.named_parameters()}
    flow = fxgrad.gradient_flow(model, inputs, loss=loss)
    assert flow.sites
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(buffer, buffers[n]) for n, buffer in model.named_buffers())
    assert all(parameter.grad is grads[n] for n, parameter in model.named_parameters())
    assert before.error is None


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_are_named(name: str) -> None:
    case = load(name)
    model, inputs, loss = case.build()
    flow = fxgrad.gradient_flow(model, inputs, loss=loss)
    silent = [record.name for record in flow.parameters if not record.measured]
    assert silent == case.EXPECT.get("no_grad_params", [])
    zero = [record.name for record in flow.parameters if record.statistics and record.statistics.all_zero]
    assert zero == case.EXPECT.get("zero_grad_params", zero)


def flow_of(name: str) -> fxgrad.GradientFlow:
    model, inputs, loss = load(name).build()
    return fxgrad.gradient_flow(model, inputs, loss=loss)


def reason_of(flow: fxgrad.GradientFlow, site: str) -> str:
    return next(spot.reason for spot in flow.blind_spots if spot.id == site)


def test_a_sum_sends_the_same_gradient_to_both_branches() -> None:
    flow = flow_of("18_healthy_two_branches")
    total = flow.site("/add").l2_norm
    assert flow.site("b1.1").l2_norm == pytest.approx(total)
    assert flow.site("/mul").l2_norm == pytest.approx(total)


def test_functional_activations_are_sites() -> None:
    flow = flow_of("21_functional_relu_partly_dead")
    assert flow.site("/relu").measured
    assert flow.site("/clamp").measured


def test_before_an_in_place_relu_the_gradient_is_masked() -> None:
    flow = flow_of("23_inplace_relu_full_hook")
    names = [site.name for site in flow.sites]
    assert [name for name in names if name in ("conv1", "act1", "conv2", "act2")] == ["conv1", "act1", "conv2", "act2"]
    assert flow.site("conv1").statistics.zero_count > flow.site("act1").statistics.zero_count
    assert flow.site("conv1").l2_norm < flow.site("act1").l2_norm


def test_an_augmented_assignment_is_one_in_place_node() -> None:
    flow = flow_of("24_iadd_alias_changes_value")
    users = {edge.consumer.key for edge in flow.edges if edge.producer == "/add_"}
    assert users == {"/tanh", "/sigmoid"}  # the alias reads the changed value too


def test_around_an_in_place_product() -> None:
    flow = flow_of("27_hook_before_mul_inplace")
    assert flow.site("fc").l2_norm == pytest.approx(3 * flow.site("/mul_").l2_norm)


def test_what_a_detach_cuts_off_is_not_called_unreached() -> None:
    flow = flow_of("28_detach_in_the_middle")
    assert reason_of(flow, "frontend") == reason_of(flow, "/detach") == "detached"
    assert any("/detach" in spot.detail for spot in flow.blind_spots if spot.key == "frontend")


def test_a_no_grad_region_is_named() -> None:
    flow = flow_of("30_no_grad_block_lost_in_trace")
    assert reason_of(flow, "teacher") == "no_grad_region"


def test_frozen_is_not_detached() -> None:
    flow = flow_of("31_frozen_backbone")
    assert {spot.reason for spot in flow.blind_spots if spot.key.startswith("backbone")} == {"frozen"}


def test_a_reused_module_has_a_site_per_call() -> None:
    flow = flow_of("34_shared_relu_three_calls")
    calls = [site for site in flow.sites if site.module_path == "act"]
    assert [(site.name, site.call_index) for site in calls] == [("act", 0), ("act_1", 1), ("act_2", 2)]
    assert calls[0].statistics.all_zero
    assert not calls[1].statistics.all_zero


def test_a_loop_over_a_shape_is_recorded_as_long_as_it_ran() -> None:
    model, inputs, loss = load("37_range_over_shape").build()
    flow = fxgrad.gradient_flow(model, inputs, loss=loss)
    assert sum(site.key.startswith("cell") for site in flow.sites) == 4
    longer = fxgrad.gradient_flow(model, load("37_range_over_shape").alt_inputs(), loss=loss)
    assert sum(site.key.startswith("cell") for site in longer.sites) == 7


def test_a_checkpointed_block_is_recorded_once() -> None:
    flow = flow_of("40_checkpoint_dropout")
    block = [site.id for site in flow.sites if site.key.startswith("block")]
    assert block == ["block.0", "block.1", "block.2", "block.3"]
    assert all(flow.site(name).measured for name in block)


def test_tuple_elements_that_the_loss_ignores() -> None:
    flow = flow_of("45_lstm_tuple_outputs")
    assert flow.site("lstm[1][0]").measured
    assert reason_of(flow, "lstm[0]") == reason_of(flow, "lstm[1][1]") == "output_unused"


def test_dict_outputs() -> None:
    flow = flow_of("46_dict_output")
    assert flow.site("cls").measured
    assert reason_of(flow, "/mul") == "output_unused"


def test_complex_norms_are_of_the_modulus() -> None:
    model, inputs, loss = load("49_complex_healthy").build()
    flow = fxgrad.gradient_flow(model, inputs, loss=loss)
    assert {site.key for site in flow.sites if site.dtype == "complex64"} == {"/fft_rfft", "/mul"}
    loss(model(*inputs)).backward()
    want = model.filt.grad.abs().square().sum().sqrt().item()
    record = next(record for record in flow.parameters if record.name == "filt")
    assert record.l2_norm == pytest.approx(want, rel=1e-6)


def test_micro_batches_are_events_of_their_own() -> None:
    case = load("51_gradient_accumulation")
    model, inputs, loss = case.build()
    with fxgrad.watch(model) as watch:
        loss(model(*inputs)).backward()
        first = model.fc1.weight.grad.clone()
        loss(model(*case.alt_inputs())).backward()
        second = model.fc1.weight.grad - first
    norms = [next(p.l2_norm for p in flow.parameters if p.name == "fc1.weight") for flow in watch.history]
    assert norms == pytest.approx([first.norm().item(), second.norm().item()], rel=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_instrument_then_compile(backend: str) -> None:
    case = load("56_compiled_model_hooks")
    model, inputs, loss = case.build()
    want = plain_run(model, inputs, None, loss)
    torch._dynamo.reset()
    instrumented = fxgrad.instrument(model)
    compiled = torch.compile(instrumented, backend=backend)
    for _ in range(2):
        assert_same_run(plain_run(model, inputs, None, loss, call=compiled), want)
    flow = instrumented.flow()
    assert {site.id for site in flow.sites if site.measured} == {"fc1", "act", "fc2"}


def test_a_model_that_is_compiled_already() -> None:
    model, inputs, loss = load("56_compiled_model_hooks").build()
    compiled = torch.compile(model, backend="eager")
    with fxgrad.watch(compiled) as watch:
        loss(compiled(*inputs)).backward()
        assert {site.id for site in watch.flow().sites if site.measured} == {"fc1", "act", "fc2"}
    assert fxgrad.gradient_flow(compiled, inputs, loss=loss).site("act").measured  # by the original inside
