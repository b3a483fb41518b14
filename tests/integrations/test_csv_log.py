"""A training run as a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fxgrad.errors import LogWarning, OptionError
from fxgrad.integrations import CsvLog
from tests.integrations.runs import Kept, Net, chain, differences, seed, train


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("recorder")
def test_50_steps_are_the_same_and_every_value_has_a_row(tmp_path: Path) -> None:
    seed()
    plain = train(Net())
    seed()
    assert differences(plain, train(Net(), log=CsvLog(tmp_path / "run.csv"))) == []
    rows, kept = read(tmp_path / "run.csv"), Kept()
    seed()
    train(Net(), log=kept)
    assert list(dict.fromkeys(row["step"] for row in rows)) == ["0", "10", "20", "30", "40", "49"]
    found = {(row["step"], row["key"]): row["l2_norm"] for row in rows if row["kind"] not in ("note", "finding")}
    wanted = {
        (str(entry.step), site.key): "" if site.statistics is None else str(site.l2_norm)
        for entry in kept.entries
        for site in entry.flow.sites
    }
    assert found == wanted
    notes = [float(row["note"]) for row in rows if row["kind"] == "note"]
    assert notes == [entry.notes["loss"] for entry in kept.entries]


def test_a_finding_is_a_row_the_first_time(tmp_path: Path) -> None:
    train(chain(), 25, CsvLog(tmp_path / "run.csv", of="parameters"))
    found = [row for row in read(tmp_path / "run.csv") if row["kind"] == "finding"]
    assert [row["step"] for row in found][:1] == ["0"]
    assert "vanishing" in found[0]["text"]
    assert len({row["text"].split(":")[0] for row in found}) == len(found)


def test_a_second_run_appends(tmp_path: Path) -> None:
    for _ in range(2):
        train(Net(), 3, CsvLog(tmp_path / "run.csv"))
    steps = [row["step"] for row in read(tmp_path / "run.csv") if row["kind"] == "note"]
    assert steps == ["0", "2", "0", "2"]


def test_another_table_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(OptionError, match="this file is another table, with the columns epoch, loss"):
        CsvLog(path)
    assert path.read_text() == "epoch,loss\n1,0.5\n"


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot be written: .*No such file.*Name another place"):
        CsvLog(tmp_path / "none" / "run.csv")
    with pytest.raises(OptionError, match="of must be 'values' or 'parameters'"):
        CsvLog(tmp_path / "run.csv", of="sites")  # type: ignore[arg-type]


def test_a_file_that_goes_away_ends_the_log_and_not_training(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    log = CsvLog(tmp_path / "there" / "run.csv")
    (tmp_path / "there" / "run.csv").unlink()
    (tmp_path / "there").rmdir()
    with pytest.warns(LogWarning, match="CsvLog failed and gets no more entries: FileNotFoundError"):
        train(Net(), 3, log)
