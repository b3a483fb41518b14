from __future__ import annotations

import pytest
import torch

from benchmarks.pairs import Effort, Pairs, alternate, median_ratio, summary


def test_a_constant_ratio_has_no_uncertainty() -> None:
    plain = [1.0, 2.0, 3.0, 4.0]
    assert median_ratio(plain, [1.5 * value for value in plain]) == (1.5, 1.5, 1.5)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    inside = 0
    for _ in range(100):
        plain = (1 + 0.1 * torch.randn(60, generator=generator)).exp()
        other = 1.1 * (1 + 0.1 * torch.randn(60, generator=generator)).exp()
        _, low, high = median_ratio(plain.tolist(), other.tolist(), samples=400)
        inside += low <= 1.1 <= high
    assert 88 <= inside <= 100


def test_the_estimate_is_the_median_of_the_ratios_of_pairs() -> None:
    ratio, low, high = median_ratio([1, 10, 100], [2, 30, 100])
    assert ratio == 2
    assert low <= ratio <= high


@pytest.mark.parametrize(("plain", "other"), [([], []), ([1.0], [1.0, 2.0])])
def test_only_pairs_have_a_ratio(plain: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs are wanted"):
        median_ratio(plain, other)


def test_sides_take_turns_and_go_first_in_turn() -> None:
    calls: list[str] = []

    def clock(step, steps: int) -> float:
        for _ in range(steps):
            step()
        return float(steps)

    effort = Effort(pairs=2, least=2, seconds=100, warm_up=1)
    pairs = alternate(lambda: calls.append("p"), lambda: calls.append("o"), clock, effort, steps=2)
    assert "".join(calls) == "ppoo" + "oopp" + "ppoo"
    assert (pairs.plain, pairs.other) == ([1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 3), (100.0, 7)])
def test_effort_bounds_the_pairs(seconds: float, expected: int) -> None:
    effort = Effort(pairs=7, least=3, seconds=seconds, warm_up=0)
    assert len(alternate(lambda: None, lambda: None, lambda *_: 1.0, effort).plain) == expected


def test_a_summary_is_in_milliseconds() -> None:
    found = summary(Pairs([0.001, 0.002, 0.003], [0.002, 0.004, 0.006]))
    assert found == {"pairs": 3, "plain_ms": 2.0, "ms": 4.0, "ratio": 2.0, "interval_95": [2.0, 2.0]}
