from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import sqlite3
from pathlib import Path

import pytest

import fxgrad
from fxgrad.errors import NoFlowError, OptionError, RunFileError, SiteNotFoundError
from fxgrad.run_file import RunFile, tables
from fxgrad.run_file.tables import BLOCK
from fxgrad.schema import Finding, History
from tests import flows
from tests.run_file.making import at, step_of

MANY = 2 * BLOCK + 40  # two blocks of columns, and some rows


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run whose every third step has another shape, and whose last ones are still in rows."""
    path = tmp_path_factory.mktemp("long") / "run.fxgrad"
    written = [step_of(number, width=5 if number % 3 == 0 else 4) for number in range(MANY)]
    with RunFile.create(path) as file:
        for number, flow in enumerate(written):
            file.append(flow, notes={"loss": 1 / (1 + number)})
    return path, written


def test_every_step_is_read_as_it_was_written(long_run) -> None:
    path, written = long_run
    with fxgrad.open_run(path) as run:
        assert len(run) == MANY
        assert run.steps == tuple(range(MANY))
        for step in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, MANY - 1):
            assert run.flow(step) == written[step] == run[step]
        assert run[-2:] == tuple(written[-2:])
        assert list(itertools.islice(run, 5)) == written[:5]
        assert list(run)[-1] == written[-1]


@pytest.mark.parametrize("statistic", ["l2_norm", "rms", "numel", "max_abs"])
def test_a_series_in_a_file_is_that_of_the_history(long_run, statistic) -> None:
    path, written = long_run
    history = History(written)
    with fxgrad.open_run(path) as run:
        for key in ("/op1", "op2", "fc.weight", "tied.weight", "input:x"):
            assert run.series(key, statistic) == history.series(key, statistic)
        assert run.series("/op1").values[7] == written[7].site("/op1").l2_norm


def test_a_flow_takes_no_more_room_than_its_numbers(tmp_path) -> None:
    path, count = tmp_path / "run.fxgrad", 8 * BLOCK
    with RunFile.create(path) as file:
        for number in range(count):
            file.append(step_of(number, values=200))
    latest = BLOCK * 2 * 8192  # in rows
    assert path.stat().st_size < latest + count * 200 * 8  # a float64 each; their sizes pack to nothing


def test_notes_stand_beside_the_steps(long_run) -> None:
    with fxgrad.open_run(long_run[0]) as run:
        loss = run.notes["loss"]
    assert loss.steps == tuple(range(MANY))
    assert loss.values == tuple(1 / (1 + number) for number in range(MANY))


def test_structures_are_written_once(long_run) -> None:
    file = sqlite3.connect(long_run[0])
    assert file.execute("SELECT count(*) FROM structures").fetchone() == (2,)
    assert file.execute("SELECT count(*) FROM layouts").fetchone() == (1,)
    assert file.execute("SELECT count(*) FROM blocks").fetchone() == (2,)
    file.close()


def test_of_a_structure_that_is_much_like_another_only_the_difference_is_written(long_run) -> None:
    file = sqlite3.connect(long_run[0])
    (base, first), (other, second) = file.execute("SELECT base, length(flow) FROM structures ORDER BY id")
    file.close()
    assert base is None and other == 1
    assert second < first / 3


def test_what_takes_a_history_takes_a_run(long_run) -> None:
    path, written = long_run
    with fxgrad.open_run(path) as run:
        few = run[:3]
        assert fxgrad.diagnose(run).findings == fxgrad.diagnose(written).findings
        assert History(few).to_csv() == History(written[:3]).to_csv()
        assert str(run) == str(History(written))
        assert [flow.event.backward for flow in run.sampled(3)] == [0, (MANY - 1) // 2 + 1, MANY - 1]


def test_a_read_sees_the_file_as_it_is_at_its_beginning(tmp_path, monkeypatch) -> None:
    path = tmp_path / "run.fxgrad"
    with RunFile.create(path, keep=(1, 1000)) as file:
        for number in range(BLOCK - 1):
            file.append(step_of(number))
        with fxgrad.open_run(path) as run:
            loose = run._loose

            def meanwhile(*args):
                for number in range(BLOCK - 1, 2 * BLOCK):  # what is read moves into columns, and is thinned
                    file.append(step_of(number))
                return loose(*args)

            monkeypatch.setattr(type(run), "_loose", lambda _, *args: meanwhile(*args))
            found = run.series("/op1")
            assert found.steps == tuple(range(BLOCK - 1))
            assert found.values[-1] == step_of(BLOCK - 2).site("/op1").l2_norm


def test_nan_and_inf_survive(tmp_path) -> None:
    flow = flows.special()
    with RunFile.create(tmp_path / "run.fxgrad") as file:
        file.append(flow, notes={"loss": math.nan, "lr": math.inf})
        with fxgrad.open_run(file.path) as run:  # while it is written
            assert run.flow(0) == flow
            assert math.isnan(run.notes["loss"].values[0])
            assert run.notes["lr"].values == (math.inf,)


def test_findings_are_kept_whole(tmp_path) -> None:
    finding = Finding(
        "vanishing", "error", "it falls", "", node=flows.node("a/relu"), evidence={"ratio": math.inf, "steps": 2},
        path=("a/relu",), consequences=(Finding("frozen", "info", "", ""),), backward=3,
    )  # fmt: skip
    with RunFile.create(tmp_path / "run.fxgrad") as file:
        file.append(step_of(3), findings=[finding])
        file.found([dataclasses.replace(finding, rule="dead")], 0)
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        assert run.findings == (finding, dataclasses.replace(finding, rule="dead"))


def test_a_flow_that_comes_again_replaces_the_first(tmp_path) -> None:
    with RunFile.create(tmp_path / "run.fxgrad") as file:
        file.append(step_of(0))
        file.append(at(step_of(1), 0))
        file.append(at(step_of(2), 0, forward=1))
        with fxgrad.open_run(file.path) as run:
            assert list(run) == [at(step_of(1), 0), at(step_of(2), 0, forward=1)]
            assert run.steps == (0,)
            assert run.flow(0) == at(step_of(2), 0, forward=1)  # the latest forward call of the step


def test_a_run_that_is_taken_up_again_goes_on_behind_its_last_step(tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    with RunFile.create(path) as file:
        file.append(step_of(0))
        file.append(step_of(1))
    with RunFile.create(path) as file:
        assert file.first == 2
        assert file.append(step_of(0)) == 2
    with fxgrad.open_run(path) as run:
        assert run.steps == (0, 1, 2)
        assert run.flow(2) == at(step_of(0), 2, forward=0)
        assert [(session.first, session.model) for session in run.sessions] == [(0, "Net"), (2, "Net")]


def test_thinning_keeps_the_end_dense_and_what_lies_around_findings(tmp_path) -> None:
    path, count = tmp_path / "run.fxgrad", 6 * BLOCK
    with RunFile.create(path, keep=(BLOCK + 7, 50)) as file:
        for number in range(count):
            file.append(step_of(number), findings=[Finding("spike", "warning", "", "")] * (number == 33))
    with fxgrad.open_run(path) as run:
        limit = 4 * BLOCK  # whole blocks only
        sparse = sorted({*range(0, limit, 50), 32, 33})
        assert run.steps == (*sparse, *range(limit, count))
        assert all(run.flow(step) == step_of(step) for step in (0, 32, 33, 50, limit, count - 1))
        assert run.series("/op1").values[1] == step_of(32).site("/op1").l2_norm
        assert len(run.findings) == 1


def test_thinned_flows_lie_in_columns_again(tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    with RunFile.create(path, keep=(1, 2)) as file:
        for number in range(4 * BLOCK):
            file.append(step_of(number))
        rows = file._file.execute("SELECT count(*) FROM rows").fetchone()[0]
    assert rows < BLOCK
    with fxgrad.open_run(path) as run:
        assert run.flow(2) == step_of(2)
        assert run.series("/op1").values[1] == step_of(2).site("/op1").l2_norm


@pytest.mark.parametrize("keep", [0, -1, True, "all", (5,), (5, 0), (1, 2, 3), 2.5])
def test_keep_takes_numbers(keep, tmp_path) -> None:
    with pytest.raises(OptionError, match=r"keep=10_000"):
        RunFile.create(tmp_path / "run.fxgrad", keep=keep)
    assert not list(tmp_path.iterdir())


# ---- what can be wrong ------------------------------------------------------------------------------------------


def test_a_step_that_is_not_there(long_run) -> None:
    with fxgrad.open_run(long_run[0]) as run, pytest.raises(NoFlowError, match=f"nearest is {MANY - 1}"):
        run.flow(MANY + 5)


def test_a_value_that_is_not_there(long_run) -> None:
    with fxgrad.open_run(long_run[0]) as run:
        with pytest.raises(SiteNotFoundError, match="near names are"):
            run.series("/op11")
        with pytest.raises(OptionError, match="'rms'"):
            run.series("/op1", "norm")


@pytest.mark.parametrize("step", [2**63, -(10**25)])
def test_a_step_beyond_the_numbers_of_the_file(step, long_run) -> None:
    with fxgrad.open_run(long_run[0]) as run, pytest.raises(NoFlowError):
        run.flow(step)


def test_no_file(tmp_path) -> None:
    with pytest.raises(RunFileError, match="there is no such file"):
        fxgrad.open_run(tmp_path / "run.fxgrad")


@pytest.mark.parametrize("content", [b"", b"1", b"a word", b"no database at all, but long enough to be one" * 30])
def test_another_file_is_refused_and_left_alone(content, tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(RunFileError, match="no run file"):
        fxgrad.open_run(path)
    if content:
        with pytest.raises(RunFileError, match="no run file"):
            RunFile.create(path)
        assert path.read_bytes() == content


def test_another_database_is_refused_and_left_alone(tmp_path) -> None:
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE flows(id INTEGER)")
    other.close()
    content = path.read_bytes()
    for opened in (fxgrad.open_run, RunFile.create):
        with pytest.raises(RunFileError, match="another database"):
            opened(path)
    assert path.read_bytes() == content


def test_a_newer_version_is_refused(tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    RunFile.create(path).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version=99")
    newer.close()
    for opened in (fxgrad.open_run, RunFile.create):
        with pytest.raises(RunFileError, match=r"version 99, newer than 1.*Upgrade"):
            opened(path)


def test_a_file_that_was_cut_off_is_damaged(long_run, tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    content = long_run[0].read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(RunFileError, match="damaged"), fxgrad.open_run(path) as run:
        list(run)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("UPDATE rows SET numbers=x'00' WHERE id=1", "damaged"),
        ("UPDATE rows SET numbers=zeroblob(8) WHERE id=1", "numbers are missing"),
        ("UPDATE structures SET flow=x'1234'", "damaged"),
        ("DELETE FROM structures", "a part of it is not there"),
        ("DELETE FROM rows", "a part of it is not there"),
    ],
)
def test_a_damaged_part_is_told(change, what, tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    with RunFile.create(path) as file:
        file.append(step_of(0))
    file = sqlite3.connect(path, isolation_level=None)
    file.execute(change)
    file.close()
    with fxgrad.open_run(path) as run, pytest.raises(RunFileError, match=what):
        run.flow(0)


def test_two_writers(tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    with RunFile.create(path) as first:
        first.append(step_of(0))
        with pytest.raises(RunFileError, match="is being written by another process or watch"):
            RunFile.create(path)
        first.append(step_of(1))
    with RunFile.create(path), fxgrad.open_run(path) as run:
        assert run.steps == (0, 1)


def test_a_folder_that_cannot_be_written_can_be_read(long_run, tmp_path, monkeypatch) -> None:
    copy = shutil.copy(long_run[0], tmp_path / "copy.fxgrad")
    plain = tables._opened

    def opened(address: str, path: Path) -> sqlite3.Connection:
        if address.endswith("?mode=ro"):
            message = "unable to open database file"  # as SQLite says where it cannot make its -shm
            raise sqlite3.OperationalError(message)
        return plain(address, path)

    monkeypatch.setattr(tables, "_opened", opened)
    with fxgrad.open_run(copy) as run:
        assert run.flow(3) == long_run[1][3]


def test_a_folder_that_is_not_there(tmp_path) -> None:
    with pytest.raises(RunFileError, match="Make it first"):
        RunFile.create(tmp_path / "no" / "run.fxgrad")


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path) -> None:
    with RunFile.create(tmp_path / "run.fxgrad") as file:
        file.append(step_of(0))
        pages = file._file.execute("PRAGMA page_count").fetchone()[0]
        file._file.execute(f"PRAGMA max_page_count={pages}")  # what a full disk does
        with pytest.raises(RunFileError, match="Make room on the disk"):
            file.append(step_of(1, values=900))
        file._file.execute("PRAGMA max_page_count=100000")
        file.append(step_of(2))
        with fxgrad.open_run(file.path) as run:
            assert list(run) == [step_of(0), step_of(2)]
