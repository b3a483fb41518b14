"""Edge sites on stock models: how many of the parts are measured.  All of it runs with ``-m sweep``."""

from __future__ import annotations

import copy
from collections import Counter

import pytest

import fxgrad
from tests.runs import assert_same_run, plain_run
from tests.sweeps.collections import TIMM, Built, timm_case, torchvision_case

torchvision = pytest.importorskip("torchvision")
CLASSIFIERS = torchvision.models.list_models(module=torchvision.models)
# A use that sends nothing back, and one that the op does not make, are no parts of the gradient.
NO_PART = ("detached", "no_grad_region", "merged_use", "not_reached", "output_unused")
QUIET = pytest.mark.filterwarnings("ignore")


def share(flow: fxgrad.GradientFlow) -> tuple[int, int]:
    """How many parts of the gradients of values with several uses were measured, of how many."""
    uses = Counter((edge.producer, edge.output_position) for edge in flow.edges)
    alive = {site.id for site in flow if site.measured}
    silent = {(s.id, s.consumer) for s in flow.blind_spots if s.consumer is not None and s.reason in NO_PART}
    parts = [
        edge
        for edge in flow.edges
        if uses[edge.producer, edge.output_position] > 1
        and edge.producer + edge.output_position in alive
        and (edge.producer + edge.output_position, edge.consumer) not in silent
    ]
    return sum(edge.measured for edge in parts), len(parts)


def check(built: Built) -> None:
    model, args, kwargs, loss = built
    want = plain_run(copy.deepcopy(model), args, kwargs, loss)
    with fxgrad.watch(model, sites="edge", capture="eager") as watch:
        assert_same_run(plain_run(model, args, kwargs, loss), want)
        measured, parts = share(watch.flow())
    assert measured >= 0.99 * parts


@QUIET
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v3_small"])
def test_a_sample_of_torchvision(name: str) -> None:
    check(torchvision_case(name))


@QUIET
@pytest.mark.sweep
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_of_torchvision(name: str) -> None:
    check(torchvision_case(name))


@QUIET
@pytest.mark.sweep
@pytest.mark.parametrize("name", TIMM)
def test_timm_families(name: str) -> None:
    pytest.importorskip("timm")
    check(timm_case(name))
