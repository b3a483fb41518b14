"""Random rules on random models equal a reference that rewrites segment by segment."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError
from fxgrad.rules import edges, nodes, parameters
from tests import models
from tests.oracle import At, as_double, run_twin
from tests.rewriting.segments import Work, rewritten_gradients
from tests.runs import fresh, plain_run
from tests.strategies import random_model, random_models

#: A rule, and what it is to do, written anew.  All are continuous, so that round-off stays round-off.
PAIRS: tuple[tuple[Callable[[Any], rules.Rule], Callable[[Tensor], Tensor]], ...] = (
    (lambda at: rules.scale(-0.5, at), lambda g: g / -2),
    (lambda at: rules.clip_by_value(0.01, at), lambda g: torch.minimum(torch.maximum(g, g * 0 - 0.01), g * 0 + 0.01)),
    (lambda at: rules.clip_by_norm(0.1, at), lambda g: g if g.norm() <= 0.1 else g * (0.1 / g.norm())),
    (lambda at: rules.zero_out(at), lambda g: g * 0),  # noqa: PLW0108
    (lambda at: rules.guided_relu(at), lambda g: g.relu()),  # noqa: PLW0108
    (lambda at: rules.custom(torch.tanh, at), lambda g: 2 * torch.sigmoid(2 * g) - 1),
    (lambda at: rules.custom(lambda _: None, at), lambda g: g),
    (lambda at: rules.where(lambda g: g > 0, lambda g: 3 * g, None, at), lambda g: g + 2 * g.relu()),
    (lambda at: rules.scale(2.0, at, rules.given(lambda g: g.numel() > 6)), lambda g: g + g if g.numel() > 6 else g),
)


def choose(rng: random.Random, sites: list[str]) -> tuple[list[rules.Rule], dict[str, Work]]:
    """Some rules at some sites, and the same as work by site."""
    made: list[rules.Rule] = []
    work: dict[str, Work] = {}
    for _ in range(rng.randint(1, 4)):
        rule, step = rng.choice(PAIRS)
        chosen = frozenset(rng.sample(sites, rng.randint(1, min(len(sites), 3))))
        made.append(rule(nodes(predicate=lambda site, chosen=chosen: site.id in chosen)))
        for site in chosen:
            work.setdefault(site, []).append(step)
    return made, work


def check(case: Any, rng: random.Random, capture: str) -> None:
    """Rewrite the model of a case at random, and compare."""
    model, args, _ = case.build()
    model, args = as_double(model), as_double(args)
    if ".float()" in getattr(case, "source", "") or plain_run(model, args, None, case.loss).error is not None:
        return  # in float64 that is another model, or none
    flow = fxgrad.gradient_flow(model, fresh(args), loss=case.loss)
    sites = [site.id for site in flow.sites if site.measured and "complex" not in site.dtype]
    if not sites:
        return
    made, work = choose(rng, sites)
    want, want_inputs = rewritten_gradients(case.twin, model, args, case.loss, work)
    with fxgrad.rewrite(model, made, capture=capture):  # type: ignore[arg-type]
        for _ in range(3):
            given_ = fresh(args)
            model.zero_grad()
            torch.manual_seed(0)
            case.loss(model(*given_)).backward()
            found = {name: p.grad for name, p in model.named_parameters()}
            _compare(found, want)
            _compare(dict(enumerate(x.grad for x in given_)), dict(enumerate(want_inputs)))
            if model.training:  # buffers have moved on
                return


def _compare(found: dict[Any, Tensor | None], want: dict[Any, Tensor | None]) -> None:
    for name, gradient in want.items():
        if gradient is None:
            assert found[name] is None or not found[name].any(), name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-10, msg=str(name))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_models(), st.randoms(use_true_random=False), st.sampled_from(["auto", "eager"]))
def test_random_rules_on_random_models(case: Any, rng: random.Random, capture: str) -> None:
    assume(case.twin is not None)
    check(case, rng, capture)


@pytest.mark.parametrize("seed", range(25))
def test_random_rules_on_numbered_models(seed: int) -> None:
    case = random_model(seed)
    if case.twin is None:
        pytest.skip("has no twin")
    check(case, random.Random(seed), ("auto", "eager")[seed % 2])  # noqa: S311


@pytest.mark.parametrize("case", models.cases(models.TWINS))
def test_random_rules_on_the_zoo(case: Any) -> None:
    model, _, kwargs = case.build()
    if kwargs or any(p.is_complex() for p in model.parameters()):
        pytest.skip("keyword arguments or complex numbers")
    check(case, random.Random(case.id), "auto")  # noqa: S311


@pytest.mark.parametrize("per", ["step", "backward", "arrival"])
@pytest.mark.parametrize("seed", range(8))
def test_random_rules_at_parameters(seed: int, per: Any) -> None:
    rng = random.Random(seed)  # noqa: S311
    case = random_model(seed, dynamic=False)
    model, args, _ = case.build()
    torch.manual_seed(0)
    case.loss(model(*args)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    made = []
    for _ in range(3):
        rule, step = rng.choice(PAIRS[:-1])
        chosen = rng.sample(sorted(found), min(2, len(found)))
        made.append(rule(parameters(predicate=lambda name, _, chosen=chosen: name in chosen, per=per)))
        found |= {name: step(found[name]) for name in chosen}
    model, args, _ = case.build()
    torch.manual_seed(0)
    with fxgrad.rewrite(model, made) as rewrite:
        case.loss(model(*args)).backward()
        rewrite.apply()
    for name, parameter in model.named_parameters():
        if name in found:
            torch.testing.assert_close(parameter.grad, found[name], msg=name)
        else:
            assert parameter.grad is None


# ---- edges -----------------------------------------------------------------------------------------------------------


def check_parts(case: Any, capture: str) -> int:
    """What the consumers of a value send back adds up to its gradient; how many values were looked at."""
    model, args, _ = case.build()
    model, args = as_double(model), as_double(args)
    if case.twin is None or ".float()" in case.source or plain_run(model, args, None, case.loss).error is not None:
        return 0
    flow = fxgrad.gradient_flow(model, fresh(args), loss=case.loss)
    at = At()
    run_twin(case.twin, model, at, args, {}, 0)
    same = {*at.origin, *at.origin.values()}  # of these tensors the consumers of all names count
    several = {s.module_path for s in flow.sites if s.call_index}
    looked = 0
    for site in flow.sites:
        if site.id in same | several:
            continue
        uses = [edge for edge in flow.edges if edge.producer + edge.output_position == site.id]
        if (
            not uses
            or not site.measured
            or site.key.startswith("input:")
            or "output" in {edge.consumer.key for edge in uses}
        ):
            continue
        parts: list[Tensor] = []
        total: list[Tensor] = []
        made = [
            rules.custom(parts.append, edges(re.compile(re.escape(site.id)))),  # type: ignore[arg-type]
            rules.custom(total.append, nodes(re.compile(re.escape(site.id)), predicate=lambda s, i=site.id: s.id == i)),  # type: ignore[arg-type, misc]
        ]
        try:
            with fxgrad.rewrite(model, made, capture=capture) as rewrite:  # type: ignore[arg-type]
                torch.manual_seed(0)
                case.loss(model(*fresh(args))).backward()
        except RuleError as error:
            assert "places, not from" in str(error)  # noqa: PT017
            continue
        if rewrite.report().not_rewritten:  # a consumer without a gradient, or one in a checkpoint
            continue
        torch.testing.assert_close(sum(parts[1:], parts[0]), total[0], msg=site.id)
        looked += 1
    return looked


def test_the_parts_add_up_on_random_models() -> None:
    assert sum(check_parts(random_model(seed), ("auto", "eager")[seed % 2]) for seed in range(24)) > 25


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(4))
def test_the_parts_add_up_on_many_random_models(block: int) -> None:
    for seed in range(2000 + 50 * block, 2050 + 50 * block):
        check_parts(random_model(seed), ("auto", "eager")[seed % 2])


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(10))
def test_many_random_models(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        case = random_model(seed)
        if case.twin is not None:
            check(case, random.Random(seed), ("auto", "eager")[seed % 2])  # noqa: S311
