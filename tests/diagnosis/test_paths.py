"""Vanishing and exploding, on chains whose levels are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import Link, Setting, chain, found, gradient, linears, parameter


def falling(decades: float, count: int = 8) -> GradientFlow:
    """Linear layers that lose or gain so many decades together, each as much."""
    return linears([10 ** (-decades * (count - 1 - n) / (count - 1)) for n in range(count)])


@pytest.mark.parametrize(("lost", "severity"), [(3.9, None), (4.1, "warning"), (5.9, "warning"), (6.1, "error")])
def test_vanishing_is_judged_by_the_decades_that_are_lost(lost: float, severity: str | None) -> None:
    findings = found(falling(lost), "vanishing")
    assert [f.severity for f in findings] == ([severity] if severity else [])


@pytest.mark.parametrize(("gained", "severity"), [(3.8, None), (4.0, "warning"), (4.9, "warning"), (5.1, "error")])
def test_exploding_is_judged_by_the_decades_that_are_gained(gained: float, severity: str | None) -> None:
    findings = found(falling(-gained), "exploding", Thresholds(exploding_chain=3.9))
    assert [f.severity for f in findings] == ([severity] if severity else [])


@pytest.mark.parametrize(("gained", "severity"), [(2.9, None), (3.1, "warning"), (5.1, "error")])
def test_one_node_may_gain_less_than_a_chain(gained: float, severity: str | None) -> None:
    findings = found(linears([10**gained, 1.0, 1.0]), "exploding")
    assert [f.severity for f in findings] == ([severity] if severity else [])


def test_the_evidence_is_that_of_the_whole_path() -> None:
    (finding,) = found(falling(7.0, count=8), "vanishing")
    assert finding.evidence["decades"] == pytest.approx(-7.0)
    assert finding.evidence["own_decades"] == pytest.approx(-1.0)
    assert finding.evidence["alone"] == 0.0
    assert finding.evidence["per_node"] == pytest.approx(0.1)
    assert finding.path == tuple(f"fc{n}" for n in reversed(range(8)))
    assert finding.affected == ("fc3.weight", "fc2.weight", "fc1.weight", "fc0.weight")


@pytest.mark.parametrize("rule", ["vanishing", "exploding"])
def test_one_node_that_does_it_is_blamed_alone(rule: str) -> None:
    step = 1e-5 if rule == "vanishing" else 1e5
    (finding,) = found(linears([step, step, 1.0, 1.0]), rule)
    assert finding.site == "fc2"  # what it sends back is what fc1 gets
    assert finding.evidence["alone"] == 1.0


def test_of_a_chain_the_guilty_kind_is_blamed() -> None:
    """Sigmoids take more in sum than the linear layers between them."""
    links, records, level = [], [], 1.0
    for n in reversed(range(8)):
        links.append(Link(f"act{n}", gradient(level), kind="Sigmoid"))
        level *= 0.2
        links.append(Link(f"fc{n}", gradient(level), parameters=(f"fc{n}.weight",)))
        records.append(parameter(f"fc{n}.weight", level))
        level *= 0.8
    (finding,) = found(chain(*reversed(links), parameters=records), "vanishing")
    assert finding.node is not None
    assert finding.node.module_type == "Sigmoid"


def test_a_converged_fit_does_not_vanish() -> None:
    assert found(linears([1e-20, 1e-20, 1e-20]), "vanishing") == ()


def test_a_loss_that_is_large_does_not_explode() -> None:
    assert found(linears([5e10, 5e10, 5e10]), "exploding") == ()


def test_depth_alone_may_gain_a_little() -> None:
    deep = [10 ** (0.04 * (99 - n)) for n in range(100)]
    assert found(linears(deep), "exploding") == ()
    assert found(linears(deep), "exploding", Thresholds(exploding_chain=3.0, depth_rate=0.03))
    steeper = [10 ** (0.05 * (99 - n)) for n in range(100)]
    assert found(linears(steeper), "exploding", Thresholds(exploding_chain=3.0))


def scaled(rms: float, **more: object) -> GradientFlow:
    """A learnable scale between two linear layers, which takes 6 decades."""
    links = [
        Link("fc0", gradient(1e-6), parameters=("fc0.weight",)),
        Link("/mul", gradient(1.0), parameters=("gamma",)),
        Link("fc1", gradient(1.0), parameters=("fc1.weight",)),
    ]
    gamma = parameter("gamma", 1.0, shape=(4,), rms=rms, **more)
    return chain(*links, parameters=[parameter("fc0.weight", 1e-6), gamma, parameter("fc1.weight", 1.0)])


def test_a_weight_that_is_small_on_purpose_is_excused() -> None:
    assert found(scaled(1e-6), "vanishing") == ()
    assert found(scaled(1e-6), "scale_break") == ()
    assert found(scaled(1e-6), "vanishing", Thresholds(throttle=1e-7))
    assert found(scaled(1.0), "vanishing")


def test_a_frozen_one_is_not() -> None:
    assert found(scaled(1e-6, requires_grad=False), "vanishing")


def test_a_recurrence_may_lose_more() -> None:
    levels = [10.0 ** (-5 * (7 - n) / 7) for n in range(8)]
    flow = linears(levels)
    shared = [replace(node, parameters=("cell.weight",)) if node.key.startswith("fc") else node for node in flow.nodes]
    sites = [replace(site, node=node) for site, node in zip(flow.sites, shared, strict=False)]
    unrolled = replace(flow, nodes=tuple(shared), sites=tuple(sites), parameters=(parameter("cell.weight", 1.0),))
    assert found(flow, "vanishing")
    assert found(unrolled, "vanishing") == ()
    steeper = [10.0 ** (-8 * (7 - n) / 7) for n in range(8)]
    lossy = replace(unrolled, sites=tuple(replace(s, statistics=gradient(g)) if g else s
                                          for s, g in zip(sites, (0.0, *steeper), strict=True)))  # fmt: skip
    assert [f.severity for f in found(lossy, "vanishing")] == ["info"]
    assert [f.severity for f in found(lossy, "vanishing", Thresholds(vanishing_recurrent=7.0))] == ["warning"]


def test_frozen_layers_before_do_not_count() -> None:
    """The path ends where the first trained parameter takes its gradient."""
    flow = linears([1e-9, 1.0, 1.0])
    frozen = replace(flow.parameters[0], statistics=None, requires_grad=False, reason="frozen")
    assert found(replace(flow, parameters=(frozen, *flow.parameters[1:])), "vanishing") == ()


def test_norms_are_enough() -> None:
    assert found(linears([1e-8, 1.0], setting=Setting("norm", "node", values=False)), "vanishing")
