from __future__ import annotations

import dataclasses
import json

import pytest

from fxgrad.render.findings_json import FORMAT, VERSION, findings_json
from fxgrad.schema import RULES, Diagnosis, Finding
from tests import diagnoses, flows


def read(diagnosis):
    return json.loads(findings_json(diagnosis), parse_constant=pytest.fail)


def test_everything_of_a_finding_is_there() -> None:
    found = read(diagnoses.every())
    assert (found["format"], found["version"]) == (FORMAT, VERSION)
    assert found["healthy"] is False
    assert found["checked"] == [rule for rule in RULES if rule not in ("spike", "update_size", "underflow")]
    assert found["not_checked"][1] == {"rule": "update_size", "reason": "no optimizer was given", "give": "optimizer="}
    first = found["findings"][0]
    assert set(first) == {f.name for f in dataclasses.fields(Finding)}
    assert first["node"]["source"] == "/home/user/net.py:4"
    assert first["evidence"]["samples"] == 1024.0
    assert first["path"] == ["/op1", "/op0", "input:x"]
    assert first["consequences"][0]["consequences"][0]["parameter"] == "fc.weight"
    assert found["findings"][1]["evidence"] == {"nan": "NaN", "inf": "-Infinity"}
    assert found["findings"][1]["node"] is None


def test_nothing_found() -> None:
    found = read(Diagnosis(()))
    assert found["healthy"] is True
    assert found["findings"] == found["not_checked"] == []


@pytest.mark.parametrize("word", [*flows.NASTY, "\udc80"])
def test_any_name_survives(word) -> None:
    found = read(diagnoses.named(word))["findings"]
    assert found[0]["affected"] == [word]
    assert findings_json(diagnoses.named(word)).isascii()
