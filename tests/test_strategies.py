"""Random models are repeatable, cheap, varied, and their generated twins are right."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests import oracle, runs
from tests.programs import marked, plain
from tests.strategies import RandomCase, random_model, random_models

SEEDS = range(300)


@pytest.fixture(scope="module")
def some() -> list[RandomCase]:
    return [random_model(seed) for seed in SEEDS]


def step(case: RandomCase) -> runs.RunResult:
    model, args, kwargs = case.build()
    return runs.plain_run(model, args, kwargs, case.loss)


def test_a_seed_gives_the_same_model_again() -> None:
    for seed in range(20):
        before = torch.get_rng_state()
        one, two = random_model(seed), random_model(seed)
        assert one.source == two.source
        runs.assert_same_run(step(one), step(two))
        torch.set_rng_state(before)
        one.build()
        assert torch.equal(torch.get_rng_state(), before)


def test_there_is_something_of_everything(some: list[RandomCase]) -> None:
    features = Counter(word for case in some for word in case.features)
    wanted = (
        *("in-place", "alias", "view", "changed through a view", "fan-out", "reuse", "nested", "tuple", "detach"),
        *("no_grad", "dropout", "same object", "frozen", "checkpoint", "branch", "loop", "item", "set_item"),
        *("made_in_forward", "custom_function", "noise", "user_hook"),
    )
    assert [word for word in wanted if features[word] < 3] == []
    assert sum(case.static for case in some) > len(some) / 3
    assert sum(case.twin is not None for case in some) > len(some) / 2
    assert 0.1 < sum(case.training for case in some) / len(some) < 0.9


def test_most_steps_run_and_some_raise_what_autograd_raises(some: list[RandomCase]) -> None:
    errors = [result.error for result in map(step, some) if result.error is not None]
    assert 0 < len(errors) < len(some) / 8
    assert {kind for kind, _ in errors} == {"RuntimeError"}


def test_generated_twins_are_twins(some: list[RandomCase]) -> None:
    checked = 0
    for case in some[:60]:
        if case.twin is None or step(case).error is not None:
            continue
        model, args, kwargs = case.build()
        found = oracle.site_gradients(case.twin, model, args, case.loss, kwargs)
        honest = oracle.retained_gradients(case.twin, model, args, case.loss, kwargs)
        assert oracle.compare(oracle.norms(honest), found) == [], case
        checked += 1
    assert checked > 25


def test_making_one_is_cheap() -> None:
    start = time.perf_counter()
    for seed in range(1000, 1050):
        random_model(seed).build()
    assert (time.perf_counter() - start) / 50 < 0.02  # about 1.5 ms; the bound leaves room for a busy machine


def test_dynamic_steps_can_be_left_out() -> None:
    assert not any({"branch", "item", "checkpoint"} & random_model(seed, dynamic=False).features for seed in range(100))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(random_models())
def test_hypothesis_draws_models_that_are_repeatable(case: RandomCase) -> None:
    runs.assert_same_run(step(case), step(case))


def test_templates() -> None:
    template = "<add:<tanh:torch.tanh(v1)> + 1.0>"
    assert plain(template) == "torch.tanh(v1) + 1.0"
    assert marked(template) == 'at(s + "add", at(s + "tanh", torch.tanh(v1)) + 1.0)'
