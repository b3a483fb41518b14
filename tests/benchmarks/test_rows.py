from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.hooks import Anomaly, ModuleHooks, RetainGrad, TensorHooks
from benchmarks.memory import peak
from benchmarks.models import CASES, Case
from benchmarks.ours import OURS, Paused, Watched
from benchmarks.pairs import Effort
from benchmarks.peers import PEERS
from benchmarks.rows import PARTS, Wanted, row
from benchmarks.runners import Configuration, Runner, SkippedError
from tests.benchmarks.steps import residual

CASE = Case("residual", "for tests", residual)
WANTED = Wanted("cpu", PARTS, Effort(pairs=4, least=2, seconds=0, warm_up=4))


def test_a_row_of_ours_tells_ratio_sites_cost_and_memory() -> None:
    norm = next(c for c in OURS if c.name == "norm")
    found = row(CASE, norm, WANTED)
    assert "failed" not in found
    assert found["pairs"] >= 2
    assert found["seen"]["activations"] == found["seen"]["more"]["sites"] - sum(found["seen"]["blind"].values())
    assert found["seen"]["parameters"] == 4
    assert (found["cost"]["step_reads"], found["cost"]["flow_reads"]) == (0, 1)
    assert found["memory"]["other"]["first"] >= found["memory"]["plain"]["first"] > 0


def test_an_option_of_another_version_skips_the_row_and_says_so() -> None:
    made = Configuration("x", "x", partial(Watched, sites="nowhere"), "ours")
    assert "sites='nowhere'" in row(CASE, made, WANTED)["skipped"]
    made = Configuration("x", "x", partial(Watched, no_such_option=1), "ours")
    assert "no_such_option" in row(CASE, made, WANTED)["skipped"]


def test_a_model_that_is_not_installed_skips_the_row() -> None:
    def build():
        raise ImportError("no such model")  # noqa: EM101, TRY003

    assert "no such model" in row(replace(CASE, build=build), OURS[0], WANTED)["skipped"]


def test_what_fails_is_told_without_places_on_this_machine() -> None:
    class Broken(Runner):
        def attach(self):
            raise OSError("cannot open /somewhere/deep/inside/file.so")  # noqa: EM101, TRY003

    found = row(CASE, Configuration("x", "x", Broken, "peer"), WANTED)
    assert found["failed"] == "OSError: cannot open file.so"


def test_hooks_see_what_they_claim() -> None:
    for make in (TensorHooks, RetainGrad):
        runner = make(residual())
        runner.step()
        assert set(runner.norms) == {"first", "second", "relu"}
        assert all(norm > 0 for norm in runner.norms.values())
        runner.close()


def test_module_hooks_crash_on_an_in_place_activation_and_anomaly_mode_does_not() -> None:
    with pytest.raises(RuntimeError, match="modified inplace"):
        ModuleHooks(residual()).step()
    Anomaly(residual()).step()


def test_peers_that_are_not_installed_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.__import__", _nothing, raising=False)
    apart = [c for c in PEERS if c.apart]
    assert len(apart) == 6
    for configuration in apart:
        with pytest.raises(SkippedError, match="not installed"):
            configuration.make(residual()).step()


def _nothing(name: str):
    raise ImportError(name)


def test_all_runners_train_as_the_plain_one_does() -> None:
    built = residual()
    runners = [make(built.twin()) for make in (Runner, TensorHooks, RetainGrad, Anomaly)]
    runners += [partial(Watched, statistics="full")(built.twin()), partial(Paused, statistics="norm")(built.twin())]
    before = runners[0].built.model.first.weight.clone()
    for runner in runners[:-1]:
        for _ in range(5):
            runner.step()
    for _ in range(2):  # it has taken three to begin with
        runners[-1].step()
    assert not torch.equal(before, runners[0].built.model.first.weight)
    for runner in runners[1:]:
        assert torch.equal(runner.built.model.first.weight, runners[0].built.model.first.weight)
        runner.close()


def test_peak_memory_is_the_same_at_every_run_and_finds_kept_gradients() -> None:
    plain, again = (peak(Runner, residual(), "cpu") for _ in range(2))
    assert plain == again
    kept = peak(RetainGrad, residual(), "cpu")
    assert plain.steady < kept.steady < 2 * plain.steady


def test_cases_are_equal_at_every_making() -> None:
    one, two = (CASES["cpu"]["mlp33"].make("cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert torch.equal(one.args[0], two.args[0])
