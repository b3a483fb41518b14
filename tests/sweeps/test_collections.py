"""Stock models.  A sample runs always; ``scripts/test -m sweep`` runs all of them (about 15 minutes on 2 cores)."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings

import fxgrad
from tests import oracle, strategies
from tests.runs import assert_same_run, plain_run
from tests.sweeps.check import check
from tests.sweeps.collections import TIMM, Built, timm_case, torchvision_case, torchvision_names, transformers_cases

pytest.importorskip("torchvision")
SAMPLE = (
    "resnet18", "mobilenet_v2", "densenet121", "googlenet", "swin_t", "fcn_resnet50", "fasterrcnn_resnet50_fpn",
    "r3d_18", "raft_small", "quantized_resnet18", "shufflenet_v2_x0_5", "squeezenet1_0",
)  # fmt: skip
TIMM_SAMPLE = ("vit_tiny_patch16_224", "convnext_atto", "resnet10t", "ghostnet_050", "levit_128s")
QUIET = pytest.mark.filterwarnings("ignore")  # what the collections' own code makes torch warn of


@QUIET
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_torchvision(name: str) -> None:
    check(name, torchvision_case(name))


@QUIET
@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(torchvision_names()) - set(SAMPLE)))
def test_all_of_torchvision(name: str) -> None:
    check(name, torchvision_case(name))


@QUIET
@pytest.mark.parametrize("name", TIMM_SAMPLE)
def test_a_sample_of_timm(name: str) -> None:
    pytest.importorskip("timm")
    check(name, timm_case(name))


@QUIET
@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(TIMM) - set(TIMM_SAMPLE)))
def test_timm_families(name: str) -> None:
    pytest.importorskip("timm")
    check(name, timm_case(name))


def same_when_instrumented(built: Built) -> None:
    """The graph computes what the model computes, and says what the Python recorder says."""
    model, args, kwargs, loss = built
    traced = copy.deepcopy(model)
    module = fxgrad.instrument(traced)
    with fxgrad.watch(model) as watch:
        for step in range(3):
            want = plain_run(model, args, kwargs, loss, seed=step)
            assert_same_run(plain_run(traced, args, kwargs, loss, seed=step, call=module), want)
        seen, graph = watch.flow(), module.flow()
    # A hook of its own on the same tensor may read it in another way, and a float32 sum has some 1e-5 of error.
    norms = pytest.approx({site.id: site.l2_norm for site in seen if site.measured}, rel=1e-3)
    assert {site.id: site.l2_norm for site in graph if site.measured} == norms
    assert [site.id for site in graph] == [site.id for site in seen]
    assert graph.blind_spots == seen.blind_spots
    assert graph.calls == seen.calls


@QUIET
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_a_sample_of_timm_instrumented(name: str) -> None:
    pytest.importorskip("timm")
    same_when_instrumented(timm_case(name))


@QUIET
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0"])
def test_a_sample_of_torchvision_instrumented(name: str) -> None:
    same_when_instrumented(torchvision_case(name))


@QUIET
@pytest.mark.parametrize("name", [
    "bert", "clip", "distilbert", "gpt2", "llama", "mamba", "mistral", "mixtral", "opt", "roberta", "t5", "vit",
])  # fmt: skip
def test_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    check(name, transformers_cases()[name]())


def test_there_are_enough_families() -> None:
    assert len(TIMM) >= 30


@QUIET
@given(case=strategies.random_models())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_models_that_hypothesis_builds(case: strategies.RandomCase) -> None:
    same(case)


def same(case: strategies.RandomCase) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched):
        for step in range(3):
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)


def same_on_random_models(first: int, last: int) -> None:
    for seed in range(first, last):
        same(strategies.random_model(seed))


@QUIET
@pytest.mark.parametrize("part", range(4))
def test_random_models(part: int) -> None:
    same_on_random_models(50 * part, 50 * (part + 1))


@QUIET
@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_many_random_models(part: int) -> None:
    same_on_random_models(1000 + 100 * part, 1000 + 100 * (part + 1))


@QUIET
@pytest.mark.parametrize("first", [0, pytest.param(5000, marks=pytest.mark.sweep)])
def test_sites_of_random_models_equal_the_oracle(first: int) -> None:
    compared = 0
    for seed in range(first, first + (60 if first == 0 else 400)):
        case = strategies.random_model(seed)
        model, args, kwargs = case.build()
        if case.twin is None or plain_run(model, args, kwargs, case.loss).error is not None:
            continue
        watched, _, _ = case.build()
        with fxgrad.watch(watched) as watch:
            plain_run(watched, args, kwargs, case.loss)
            flow = watch.flow()
        want = oracle.site_gradients(case.twin, case.build()[0], args, case.loss, kwargs)
        unmeasurable = [spot.id for spot in flow.blind_spots if spot.reason == "changed_through_view"]
        assert oracle.compare({site.id: site.l2_norm for site in flow.sites}, want, unmeasurable=unmeasurable) == [], (
            case
        )
        compared += 1
    assert compared > 30
