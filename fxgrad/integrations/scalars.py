"""An entry as numbers with names, for tools that draw curves."""

from __future__ import annotations

import math
import re

from fxgrad.frames import Of
from fxgrad.schema import LogEntry, NormWord

__all__ = ["scalars"]

_CALL, _OUTPUT, _OTHER = re.compile(r"#"), re.compile(r"\[['\"]?([^]'\"]*)['\"]?\]"), re.compile(r"[^-/\w.]")


def scalars(entry: LogEntry, of: Of = "values", norm: NormWord = "l2_norm") -> dict[str, float]:
    """``gradient/layer1/0/conv1`` and the norm of its gradient, and so on, in the hierarchy of the modules.

    What was not measured is left out, what has NaN or Inf is NaN.  ``note/...`` are the notes, ``findings/error`` and
    ``findings/warning`` counts.
    """
    found: dict[str, float] = {}
    measured = (
        [(site.id, site.statistics) for site in entry.flow.sites]
        if of == "values"
        else [(record.name, record.statistics) for record in entry.flow.parameters]
    )
    for name, statistics in measured:
        value = None if statistics is None else statistics.norm(norm)
        if statistics is not None and value is not None:
            # At full, norms are over the finite entries.
            found[_free(f"gradient/{_path(name)}", found)] = math.nan if statistics.nonfinite else float(value)
    found.update({f"note/{_path(name)}": value for name, value in entry.notes.items()})
    for severity in ("error", "warning"):
        count = sum(finding.severity == severity for finding in entry.diagnosis.findings)
        found[f"findings/{severity}"] = float(count)
    return found


def _path(name: str) -> str:
    """``layer1.0.relu#1`` as ``layer1/0/relu-call1``, of letters that every tool takes."""
    called = _OUTPUT.sub(r"-out\1", _CALL.sub("-call", name))
    return _OTHER.sub("-", called.replace(".", "/")).strip("/")


def _free(name: str, taken: dict[str, float]) -> str:
    """A name of its own, should two become the same."""
    while name in taken:
        name += "-"
    return name
