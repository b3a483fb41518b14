"""The library, built once for all tests and for the test runs after this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fxgrad.native.build import impossible
from fxgrad.native.loader import imported, loader
from fxgrad.native.places import place
from fxgrad.native.starting import build, tail


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> Path:
    """A cache of extensions with the library in it."""
    reason = impossible()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(os.environ.get("FXGRAD_TEST_NATIVE") or pytestconfig.cache.mkdir("native"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        if not place().library.is_file():
            outcome = build()
            assert outcome.reason is None, "\n".join([str(outcome.reason), *tail(outcome.place)])
    return folder


@pytest.fixture(scope="session")
def native(cache: Path) -> Any:
    """The library as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
        return imported(place())


@pytest.fixture
def recorder(native: Any, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Any:
    """``fxgrad.watch`` uses the library from its first call on."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    monkeypatch.setenv("FXGRAD_NATIVE", "prebuilt")
    monkeypatch.setattr(loader, "module", native)
    monkeypatch.setattr(loader, "refused", False)
    return native
