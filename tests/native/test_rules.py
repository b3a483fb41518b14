"""Rewriting under the native recorder is rewriting under Python's, bit for bit, in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.probes import probe
from fxgrad.rewriting.apply import Pass
from tests.native import rewritten as zoo
from tests.native.rewritten import batch, differences, once, total

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]

EVERY = [
    zoo.Blocks, zoo.Functions, zoo.Swapped, zoo.Quiet, zoo.Deep, zoo.Late, zoo.Hidden, zoo.Again, zoo.Reentrant, zoo.Views,
    zoo.Inner, zoo.Raising, zoo.Parts,
]  # fmt: skip


def _noise(where: Any) -> Any:
    return rules.add_noise(0.1, where)


RULES: dict[str, Any] = {
    "by op": lambda: [rules.scale(0.5, rules.nodes(op=("relu", "relu_", "sort", "external", "Double"), optional=True))],
    "by glob": lambda: [rules.clip_by_norm(0.01, rules.nodes("*a*", optional=True)), rules.sign(rules.nodes("*relu#1", optional=True))],
    "by module": lambda: [rules.scale(2.0, rules.nodes(module_type=nn.ReLU, optional=True)),
                          rules.scale(3.0, rules.nodes("other", optional=True)),
                          rules.clip_by_value(1e-3, rules.nodes("same*", optional=True))],
    "random": lambda: [_noise(rules.nodes(op="relu", optional=True)), _noise(rules.nodes(module_type=nn.Linear, optional=True))],
    "everywhere": lambda: [rules.scale(1.1, rules.nodes())],
    "what modules return": lambda: [rules.scale(0.3, rules.outputs("*", optional=True)), rules.scale(2.0, rules.outputs(""))],
    "edges": lambda: [rules.scale(0.3, rules.edges(rules.nodes(op="relu"), optional=True)),
                      rules.scale(0.7, rules.edges(consumer="c", optional=True))],
    "through": lambda: [rules.guided_relu(), rules.scale(2.0, rules.nodes("a", optional=True))],
    "replaced": lambda: [rules.custom(lambda g: torch.ones_like(g) * 1e-3, rules.nodes("b", optional=True)),
                         rules.zero_out(rules.nodes(op="sigmoid", optional=True)),
                         rules.custom(lambda g: g.relu(), rules.parameters("*weight*"))],
    "a predicate": lambda: [rules.scale(0.1, rules.nodes(predicate=lambda site: site.shape[-1:] == (6,), optional=True))],
}  # fmt: skip


@pytest.mark.parametrize("chosen", RULES)
@pytest.mark.parametrize("kind", EVERY)
def test_training_is_the_same_bit_for_bit(kind: Any, chosen: str) -> None:
    found, native = differences(kind, RULES[chosen], once)
    assert found == []
    if kind in (zoo.Blocks, zoo.Functions, zoo.Parts, zoo.Again) and chosen != "a predicate":
        assert native.recorders == ["python", *["native"] * 5]


@pytest.mark.parametrize("chosen", RULES)
@pytest.mark.parametrize("kind", EVERY)
def test_a_watched_training_is_the_same_too_and_so_is_its_flow(kind: Any, chosen: str) -> None:
    found, native = differences(kind, RULES[chosen], once, watched=True)
    assert found == []
    if kind in (zoo.Blocks, zoo.Parts, zoo.Again) and chosen != "a predicate":
        assert native.recorders == ["python", *["native"] * 5]
        assert [flow.capture.recorder for flow in native.flows if flow is not None] == native.recorders
