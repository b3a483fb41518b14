"""Both recorders: the native one, and the one in Python."""

from __future__ import annotations

import pytest

from tests.native.conftest import cache, native
from tests.native.conftest import recorder as native_recorder

__all__ = ["cache", "native", "native_recorder"]


@pytest.fixture(params=["native", "python"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which recorder a test runs under, from the second step on."""
    if request.param == "native":
        request.getfixturevalue("native_recorder")
    else:
        monkeypatch.setenv("FXGRAD_NATIVE", "0")
    return str(request.param)
