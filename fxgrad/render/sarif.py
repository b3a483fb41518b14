"""Findings as SARIF 2.1.0 (OASIS), so that an editor or a CI shows each at its source line.

Each finding is a result.  What it explains is in its ``relatedLocations`` and ``properties``, and no result of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from fxgrad.plain import plain
from fxgrad.render.findings import at
from fxgrad.render.words import tool_version
from fxgrad.schema import RULES, Diagnosis, Finding, Node
from fxgrad.store import strict_json

__all__ = ["Origin", "to_sarif"]

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_OWN_RULE = "a check of the user's own"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where source lines are looked for.

    Attributes:
        root: the folder that locations are relative to; files outside of it are named by their whole path.
        parameters: ``file:line`` by the name of a parameter, for findings that blame one.
        model: ``file:line`` for findings that blame nothing inside of the model: GitHub takes no result without a line.
        category: what was judged, the model's name; uploads of several categories stand beside each other.
    """

    root: Path = field(default_factory=Path.cwd)
    parameters: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    category: str | None = None


def to_sarif(diagnosis: Diagnosis, origin: Origin | None = None) -> str:
    """SARIF text.  The fingerprint of a result is made of its check and place, so that it is the same in every run."""
    origin = origin or Origin()
    rules = _rules(diagnosis)
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    driver: dict[str, Any] = {"name": "fxgrad", "rules": rules}
    if tool_version() is not None:
        driver["version"] = tool_version()
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {_ROOT: {"uri": _folder_uri(origin.root.absolute())}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolConfigurationNotifications": _skipped(diagnosis, index)}],
        "results": [_result(finding, index, origin) for finding in diagnosis.findings],
    }
    if origin.category:
        run["automationDetails"] = {"id": f"fxgrad/{origin.category}/"}
    return strict_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _rules(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Every public check, found or not, and the user's own that are found.  No helpUri: the pages come with fxgrad."""
    all_findings = [one for finding in diagnosis.findings for one in (finding, *finding.explained)]
    used = [one.rule for one in all_findings] + [one.rule for one in diagnosis.not_checked]
    return [
        {
            "id": rule,
            "shortDescription": {"text": RULES.get(rule, _OWN_RULE)},
            "fullDescription": {"text": f"{RULES.get(rule, _OWN_RULE)}."},
            "help": {"text": f"Run fxgrad explain {rule}." if rule in RULES else f"{_OWN_RULE}."},
            "defaultConfiguration": {"level": "warning"},
        }
        for rule in dict.fromkeys([*RULES, *diagnosis.rules, *used])
    ]


def _skipped(diagnosis: Diagnosis, index: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "level": "note",
            "message": {"text": f"{one.rule} was not checked: {one.reason}"},
            "associatedRule": {"id": one.rule, "index": index[one.rule]},
        }
        for one in diagnosis.not_checked
    ]


def _result(finding: Finding, index: Mapping[str, int], origin: Origin) -> dict[str, Any]:
    own = _own_source(finding, origin)
    place = own or _physical(origin.model, origin.root)
    borrowed = f" (Shown at this line for want of one of its own: {finding.place}.)" if place and not own else ""
    location = _location(finding, place)
    found: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index[finding.rule],
        "level": _LEVELS[finding.severity],
        "message": {"text": _words(finding) + borrowed},
        "locations": [location] if location else [],
        "partialFingerprints": {"fxgradRuleAndPlace/v1": _fingerprint(finding)},
        "properties": _properties(finding),
    }
    related = list(_related(finding, origin))
    return found | ({"relatedLocations": related} if related else {})


def _words(finding: Finding) -> str:
    if not finding.suggestion:
        return finding.message
    return f"{finding.message.rstrip('.')}. Try: {finding.suggestion}"


def _fingerprint(finding: Finding) -> str:
    text = f"{finding.rule}\0{finding.place}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _properties(finding: Finding) -> dict[str, Any]:
    facts = ("confidence", "evidence", "parameter", "affected", "units", "path", "backward")
    found = {name: plain(getattr(finding, name)) for name in facts}
    found["place"] = finding.place
    found["consequences"] = [
        {"rule": one.rule, "severity": one.severity, "place": one.place, "message": one.message}
        for one in finding.explained
    ]
    return {name: value for name, value in found.items() if value not in (None, [], {})}


def _related(finding: Finding, origin: Origin) -> Iterator[dict[str, Any]]:
    """The source lines of what the finding explains."""
    for number, one in enumerate(finding.explained):
        place = _own_source(one, origin)
        if place:
            text = f"{one.rule} {at(one)}: {one.message}"
            yield {"id": number, "message": {"text": text}, **_location(one, place)}


# ---- locations -----------------------------------------------------------------------------------------------------


def _own_source(finding: Finding, origin: Origin) -> dict[str, Any] | None:
    """Of the node that is blamed, or of the one that uses the parameter that is."""
    source = finding.source or origin.parameters.get(finding.parameter or "")
    return _physical(source, origin.root)


def _location(finding: Finding, physical: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"physicalLocation": physical} if physical else {}
    logical = _logical(finding.node)
    if finding.node is None and finding.parameter:
        logical = [{"fullyQualifiedName": finding.parameter, "kind": "parameter"}]
    return found | ({"logicalLocations": logical} if logical else {})


def _logical(node: Node | None) -> list[dict[str, Any]]:
    """The module and the node, by the words of ``docs/concepts.md``."""
    if node is None:
        return []
    key = {"fullyQualifiedName": node.key, "name": node.name, "kind": "node"}
    module = {"fullyQualifiedName": node.module_path, "name": node.module_type, "kind": "module"}
    return [key, module] if node.module_path else [key]


def _physical(source: str | None, root: Path) -> dict[str, Any] | None:
    """The location of ``file:line``; None where that is no line of a file (``<stdin>:1``)."""
    file, _, line = (source or "").rpartition(":")
    if not file or file.startswith("<") or not line.isascii() or not line.isdigit() or int(line) < 1:
        return None
    return {"artifactLocation": _artifact(file, root), "region": {"startLine": int(line)}}


def _artifact(file: str, root: Path) -> dict[str, str]:
    if _DRIVE.match(file):  # written on Windows, perhaps not read there
        whole: PurePath = PureWindowsPath(file)
        bases: list[PurePath] = [PureWindowsPath(root)]
    else:
        root = root.absolute()
        whole, bases = Path(os.path.normpath(root / file)), [root, root.resolve()]
    for base in bases:
        if whole.is_relative_to(base):
            return {"uri": _quoted(whole.relative_to(base).as_posix()), "uriBaseId": _ROOT}
    return {"uri": _file_uri(whole)}


def _folder_uri(path: Path) -> str:
    uri = _file_uri(path)
    return uri if uri.endswith("/") else f"{uri}/"


def _file_uri(path: PurePath) -> str:
    return f"file:///{_quoted(path.as_posix().lstrip('/'), ':')}"


def _quoted(path: str, also: str = "") -> str:
    """Percent-encoded; a file name that is no valid text (a lone surrogate in Python) by its bytes."""
    try:
        return quote(os.fsencode(path), safe=f"/{also}")
    except UnicodeEncodeError:
        return quote(path.encode("utf-8", "surrogatepass"), safe=f"/{also}")
