"""One thread, one seed, one answer: what the tests compare bit for bit must not depend on what ran before."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("FXGRAD_NATIVE", "prebuilt")  # no test has the library built behind its back


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums over several threads may be added up in another order, and so end in other bits.

    With one thread every CPU kernel that the tests use is repeatable; ``use_deterministic_algorithms`` would only
    add its warnings.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _known_state() -> Iterator[None]:
    """Seed before each test, and give back the process-wide switches that a failed test may have left."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)


@pytest.fixture
def python_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how plain torch is made to do it: the native library is off, also where it is there."""
    monkeypatch.setenv("FXGRAD_NATIVE", "0")
