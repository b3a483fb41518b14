from __future__ import annotations

import re

import pytest

from benchmarks import page, results
from benchmarks.goals import GOALS, Goal, judge, peak_ratio
from benchmarks.models import CASES
from benchmarks.ours import OURS
from benchmarks.peers import PEERS

SEEN = {
    "activations": 5, "parameters": 4, "told": "norm", "derived": 2, "edges": 0, "blind": {"integer": 1},
    "front_end": "symbolic", "more": {"sites": 6},
}  # fmt: skip
COST = {
    "kernels": 9, "bytes_read": 110, "allocations": 2, "outliving": 0, "left": 2, "left_bytes": 8, "step_reads": 0,
    "flow_reads": 1, "plain_kernels": 40, "plain_bytes_read": 999, "floor_bytes": 100,
}  # fmt: skip


def made(configuration: str = "norm", model: str = "mlp33", **more):
    return {
        "device": "cpu", "model": model, "configuration": configuration, "kind": "ours", "pairs": 200, "plain_ms": 2.0,
        "ms": 2.4, "ratio": 1.2, "interval_95": [1.1, 1.3], "seen": SEEN, "cost": COST,
        "memory": {"plain": {"first": 10240, "steady": 10240}, "other": {"first": 10240, "steady": 10240}},
    } | more  # fmt: skip


@pytest.mark.parametrize(("limit", "state"), [(1.3, "holds"), (1.2, "not shown"), (1.1, "not shown"), (1.09, "missed")])
def test_a_goal_holds_only_where_the_upper_bound_meets_it(limit: float, state: str) -> None:
    goal = Goal("x", limit, rows=(("cpu", "mlp33", "norm"),))
    assert judge(goal, {"rows": [made()]}).state == state


def test_few_pairs_judge_nothing() -> None:
    goal = Goal("x", 1.5, rows=(("cpu", "mlp33", "norm"),))
    assert judge(goal, {"rows": [made(pairs=19)]}).state == "too few pairs"


def test_the_worst_row_decides() -> None:
    goal = Goal("x", 1.5, rows=(("cpu", "mlp33", "norm"), ("cpu", "resnet18", "norm")))
    rows = [made(), made(model="resnet18", interval_95=[1.6, 1.7])]
    assert judge(goal, {"rows": rows}).state == "missed"
    assert judge(goal, {"rows": rows[:1]}).state == "not measured"


def test_a_skipped_row_is_not_measured_and_says_why() -> None:
    goal = Goal("x", 1.5, rows=(("cpu", "mlp33", "norm"),))
    verdict = judge(goal, {"rows": [made(skipped="no such option")]})
    assert (verdict.state, verdict.found) == ("not measured", "no such option")


def test_peak_memory_holds_the_whole_history() -> None:
    assert peak_ratio(made()) == pytest.approx(1.1)  # 128 events of 8 bytes on 10240
    goal = Goal("x", 1.01, kind="memory", rows=(("cpu", "mlp33", "norm"),))
    assert judge(goal, {"rows": [made()]}).state == "missed"


def test_every_row_of_a_goal_exists() -> None:
    names = {configuration.name for configuration in OURS}
    for goal in GOALS:
        for device, model, configuration in goal.rows:
            assert model in CASES[device]
            assert configuration in names


def test_names_are_unique() -> None:
    names = [configuration.name for configuration in (*OURS, *PEERS)]
    assert len(set(names)) == len(names)


def test_the_page_has_a_place_for_every_table() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for name in page.tables({"rows": [], "machines": []}):
        assert re.search(re.escape(f"<!-- {name} -->") + ".*?<!-- end -->", text, re.DOTALL), name


def test_tables_say_price_and_sight_and_what_was_skipped() -> None:
    rows = [
        made(),
        made("module_hooks", failed="RuntimeError: a | b"),
        made("norm_edge", skipped="not in this version"),
    ]
    found = page.tables({"rows": rows, "machines": []})
    assert "| 1.200 | 1.100-1.300 | 200 | 5 of 5: norm, 2 of them derived (symbolic) | 4 | 1 |" in found["clock cpu"]
    assert "failed: RuntimeError: a / b" in found["clock cpu"]
    assert "skipped: not in this version" in found["clock cpu"]
    assert "| 9 (plain: 40) | 110 | 1.100 | 2 | 0 | 8 | 0 | 1 | +10.0 % |" in found["cost model"]
    assert found["clock cuda"] == "Not measured.\n"
    for table in (found["clock cpu"], found["cost model"], found["goals"]):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_later_run_replaces_what_it_measured_and_keeps_the_rest() -> None:
    result = {"rows": [made("full", ratio=9.0), made()]}
    later = {name: value for name, value in made("full", ratio=2.0).items() if name not in ("cost", "memory")}
    results.put(result, later)
    assert [row["configuration"] for row in result["rows"]] == ["full", "norm"]
    assert result["rows"][0]["ratio"] == 2.0
    assert result["rows"][0]["cost"] == COST
    results.put(result, {name: later[name] for name in ("device", "model", "configuration")} | {"skipped": "gone"})
    assert "ratio" not in result["rows"][0]


def test_results_name_no_place_and_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "secret-host")
    found = results.machine("cpu")
    assert set(found) == {"processor", "cores", "versions"}
    assert re.fullmatch(r"[a-z0-9-]+\.json", results.file_of("cpu").name)
    for file in results.FOLDER.glob("*.json"):
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users|opt|mnt)/", file.read_text(encoding="utf-8"))
