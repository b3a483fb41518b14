"""What the tests of recorders share."""

from __future__ import annotations

from typing import Any

import pytest

from fxgrad.record import parked
from fxgrad.record.parked import Parked
from tests.record.waiting import Rooms


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, python_recorder: None) -> Rooms:
    """Gradients on the CPU wait as if it were an accelerator."""
    made = Rooms()
    begin, put = Parked.__init__, Parked.put

    def beginning(self: Parked, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    def putting(self: Parked, *args: Any) -> Any:
        reading = put(self, *args)
        memory = [one.alias.untyped_storage() for group in self._groups.values() for one in group]
        made.most = max(made.most, sum({m.data_ptr(): m.nbytes() for m in memory}.values()))
        return reading

    monkeypatch.setattr(Parked, "__init__", beginning)
    monkeypatch.setattr(Parked, "put", putting)
    monkeypatch.setattr(parked, "parks", lambda _: True)
    return made
