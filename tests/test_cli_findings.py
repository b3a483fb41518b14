"""``fxgrad diagnose`` and ``fxgrad run --check``, with findings made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fxgrad
from fxgrad.cli import app
from fxgrad.command import findings as command
from fxgrad.schema import Diagnosis, GradientFlow
from tests import diagnoses, flows

RUN = ("run", "torch.nn:Linear", "in_features=4", "out_features=2", "--input", "8x4", "--quiet")
ROOT = Path(fxgrad.__file__).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one flow and one series."""
    monkeypatch.chdir(tmp_path)
    flows.chain(3).to_json("flow.json")
    fxgrad.save_series([flows.chain(3), flows.chain(3, 0.2)], "series.json")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What ``diagnose`` is asked about; it finds one of each severity."""
    seen: list[object] = []

    def diagnose(given: object) -> Diagnosis:
        seen.append(given)
        return diagnoses.every()

    monkeypatch.setattr(command, "diagnose", diagnose)
    return seen


def finding(monkeypatch: pytest.MonkeyPatch, *found: fxgrad.Finding) -> None:
    monkeypatch.setattr(command, "diagnose", lambda _: diagnoses.diagnosis(*found))


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def refused(*words: str) -> str:
    result = typed(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_a_flow_is_judged_alone_and_several_as_a_series(asked: list[object]) -> None:
    series = fxgrad.load_series("series.json")
    for words in (["flow.json"], ["series.json"], ["flow.json", "series.json"]):
        assert typed("diagnose", *words).exit_code == 1
    assert isinstance(asked[0], GradientFlow)
    assert asked == [flows.chain(3), series, (flows.chain(3), *series)]


def test_text(asked: list[object]) -> None:
    assert typed("diagnose", "flow.json").stdout == f"{diagnoses.every()}\n"


def test_json_and_sarif_are_nothing_but_that(asked: list[object]) -> None:
    result = typed("diagnose", "flow.json", "--format", "json", "--findings", "found.txt")
    assert json.loads(result.stdout)["format"] == "fxgrad-findings"
    assert result.stderr == "wrote found.txt\n"
    assert json.loads(typed("diagnose", "flow.json", "--format", "sarif").stdout)["version"] == "2.1.0"


def test_files_by_suffix(asked: list[object]) -> None:
    names = ["found.txt", "found.json", "found.sarif"]
    result = typed("diagnose", "flow.json", *(word for name in names for word in ("--findings", name)))
    assert result.stdout.endswith("wrote found.txt\nwrote found.json\nwrote found.sarif\n")
    assert Path("found.txt").read_text() == f"{diagnoses.every()}\n"
    assert json.loads(Path("found.json").read_text())["healthy"] is False
    assert len(json.loads(Path("found.sarif").read_text())["runs"][0]["results"]) == 3


def test_in_sarif_what_has_no_line_is_shown_where_the_model_ends(asked: list[object]) -> None:
    typed("diagnose", "flow.json", "--findings", "found.sarif")
    found = json.loads(Path("found.sarif").read_text())["runs"][0]["results"][1]
    assert found["ruleId"] == "loss_seed"
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///home/user/net.py"
    assert place["region"]["startLine"] == len("output")  # the line that tests.flows gives to the output


@pytest.mark.parametrize(
    ("found", "fail_on", "code"),
    [
        ([], [], 0),
        ([diagnoses.frozen()], [], 0),
        ([diagnoses.outside()], [], 1),
        ([diagnoses.dead()], [], 1),
        ([diagnoses.dead()], ["dead"], 1),
        ([diagnoses.dead()], ["spike", "dead"], 1),
        ([diagnoses.dead()], ["spike"], 2),
        ([diagnoses.dead()], ["zero"], 1),  # though the dead activation explains it
        ([diagnoses.frozen()], ["frozen"], 0),
        ([], ["dead"], 0),
    ],
)
def test_exit_codes(found, fail_on, code, monkeypatch: pytest.MonkeyPatch) -> None:
    finding(monkeypatch, *found)
    options = [word for rule in fail_on for word in ("--fail-on", rule)]
    assert typed("diagnose", "flow.json", *options).exit_code == code
    assert typed(*RUN, "--check", *options).exit_code == code


def test_a_rule_to_fail_on_that_was_not_checked_is_told(asked: list[object]) -> None:
    result = typed("diagnose", "flow.json", "--fail-on", "spike", "--fail-on", "exploding")
    assert result.exit_code == 2  # it has not passed
    assert result.stderr == "fxgrad: --fail-on spike: was not checked: needs several steps\n"


def test_nothing_found_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    finding(monkeypatch)
    total = len(fxgrad.schema.RULES)
    assert f"no findings; {total - 3} of {total} checks ran" in typed("diagnose", "flow.json").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnose"], "FLOW.JSON"),
        (["diagnose", "nowhere.json"], "nowhere.json cannot be read"),
        (["diagnose", "flow.json", "other.json"], "flows of different models (Net, Other)"),
        (["diagnose", "flow.json", "--format", "xml"], "xml"),
        (["diagnose", "flow.json", "--fail-on", "ded"], "--fail-on ded: there is no such check. Use one of dead"),
        (["diagnose", "flow.json", "--fail-on", "%%"], "nonfinite, vanishing, exploding"),
        (["diagnose", "flow.json", "--findings", "found.svg"], "--findings found.svg: no format goes by"),
        (["diagnose", "flow.json", "--findings", "no/found.txt"], "--findings no/found.txt: there is no folder no"),
        (["diagnose", "flow.json", "--findings", "./flow.json"], "--findings flow.json: this is the file of a flow"),
        ([*RUN, "-o", "new.json", "--findings", "new.json"], "--findings new.json: this is the file of a flow"),
        ([*RUN, "--fail-on", "nan"], "--fail-on nan: there is no such check"),
        ([*RUN, "--check", "--findings", "found.svg"], ".txt, .json, .sarif"),
        (["run", "no.such:Model", "--findings", "found.svg"], "--findings found.svg"),  # before the work
    ],
)
def test_misuse(words, said, asked: list[object]) -> None:
    text = Path("flow.json").read_text().replace('"model":"Net"', '"model":"Other"')
    Path("other.json").write_text(text)
    assert said in refused(*words)
    assert not Path("found.svg").exists()
    assert asked == []


def test_run_prints_the_answer_first_and_writes_the_flow_before_it_leaves(asked: list[object]) -> None:
    result = typed(*RUN[:-1], "--check", "-o", "new.json", "--findings", "found.sarif")
    assert result.exit_code == 1
    parts = [
        result.stdout.index(word)
        for word in ("Linear: 1 error, 1 warning", "1. ERROR dead", "l2_norm of the gradient", "wrote new.json")
    ]
    assert parts == sorted(parts)
    assert result.stdout.endswith("wrote found.sarif\n")
    assert asked == [fxgrad.load("new.json")]


@pytest.mark.parametrize("option", [("--findings", "found.txt"), ("--fail-on", "dead")])
def test_run_checks_where_findings_are_asked_for(option, asked: list[object]) -> None:
    assert typed(*RUN, *option).exit_code == 1


def test_run_without_check_is_content_once_the_flow_is_written(asked: list[object]) -> None:
    result = typed(*RUN[:-1], "-o", "new.json")
    assert result.exit_code == 0
    assert result.stdout.startswith("Linear: 1 error, 1 warning: dead at /op1, and 1 more\n1. ERROR dead at /op1")
    assert "try: Start the bias at 0." in result.stdout
    assert "units: 0, 1" not in result.stdout
    assert fxgrad.load("new.json")


def test_a_check_tells_findings_once_and_in_full(asked: list[object]) -> None:
    text = typed(*RUN[:-1], "--check").stdout
    assert text.count("ERROR dead") == 1
    assert "units: 0, 1" in text


def test_quiet_still_says_errors(asked: list[object]) -> None:
    lines = typed(*RUN[:-1], "-q").stdout.splitlines()
    assert [line.partition(" at ")[0] for line in lines] == ["ERROR dead"]


def process(*words: str, patch: str = "") -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own; ``patch`` is the diagnosis that it makes."""
    code = "import sys\nfrom fxgrad.cli import main\n"
    if patch:
        code += (
            f"from fxgrad.command import findings\nfrom tests import diagnoses\nfindings.diagnose = lambda _: {patch}\n"
        )
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("words", "patch", "code"),
    [
        (["diagnose", "flow.json"], "diagnoses.every()", 1),
        (["diagnose", "flow.json", "--fail-on", "spike"], "diagnoses.every()", 2),
        (["diagnose", "flow.json"], "diagnoses.diagnosis(diagnoses.frozen())", 0),
        (["diagnose", "flow.json", "--fail-on", "ded"], "", 2),
        (["diagnose", "nowhere.json"], "", 2),
    ],
)
def test_a_process_judges_without_torch(words, patch, code) -> None:
    done = process(*words, patch=patch)
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith("False\n")
    assert "Traceback" not in done.stderr


def test_the_rules_themselves_need_no_torch() -> None:
    done = process("diagnose", "series.json", "--findings", "found.sarif")
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == "False\n"
    assert f"of {len(fxgrad.schema.RULES)} checks ran" in done.stdout


def test_the_exit_code_of_run_as_a_process() -> None:
    assert process(*RUN, "--check", patch="diagnoses.every()").returncode == 1
    assert process(*RUN, patch="diagnoses.every()").returncode == 0
