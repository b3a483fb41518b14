"""How the tests of fidelity watch: in one place, so that all of them run with whatever observes."""

from __future__ import annotations

from typing import Any

WATCH: dict[str, Any] = {}
