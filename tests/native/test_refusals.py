"""When the Python recorder does it instead, and why; an error of ours never reaches the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.courses import known, runs
from tests.native.parity import acted
from tests.native.test_courses import Net, batch, train

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]


# ---- which recorder ------------------------------------------------------------------------------------------------


def test_a_model_that_goes_new_ways_again_and_again_is_left_to_python() -> None:
    model, reasons = Net(), []
    with fxgrad.watch(model) as watch:
        for step in range(60):
            model.order = torch.randint(0, 4, (step % 7 + 3,), generator=torch.Generator().manual_seed(step)).tolist()
            train(model, batch(step))
            reasons.append(watch.flow().capture.reason)
    assert reasons[-1] in (
        "no call went the way that those under the Python recorder went",
        "the model takes a new course in most calls",
        "the model took more than 64 courses",
    )


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with fxgrad.watch(model, native=False) as watch:
        train(model, batch(0))
        train(model, batch(1))
        assert (watch.flow().capture.recorder, watch.flow().capture.reason) == ("python", "native=False")
    monkeypatch.setenv("FXGRAD_NATIVE", "0")
    with fxgrad.watch(model) as watch:
        train(model, batch(0))
        train(model, batch(1))
        assert watch.flow().capture.reason == "no native recorder: FXGRAD_NATIVE=0"


# ---- errors of ours ------------------------------------------------------------------------------------------------


def _break(*_: Any, **__: Any) -> Any:
    message = "forced"
    raise ValueError(message)


@pytest.mark.parametrize(("place", "at"), [
    ("Observer._add", 0), ("Finder.find", 0), ("Observer.kind_of", 0), ("Learning.start", 0), ("Following.begin", 1),
    ("Observer._set_levels", 1), ("Observer._arrived", 1), ("by_operator", 2), ("Finder.find", 2),
])  # fmt: skip
@pytest.mark.parametrize("sites", ["node", "edge"])
def test_an_error_of_ours_never_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, place: str, at: int, sites: Any
) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    owner, _, name = place.rpartition(".")
    with fxgrad.watch(model, sites=sites) as watch:
        for step in range(5):
            if step == at:
                home = known if not owner or hasattr(known, owner) else runs
                monkeypatch.setattr(getattr(home, owner) if owner else home, name, _break)
            model.order = plain.order = [0, 1, 3] if step == 2 else [0, 1, 2, 3]
            torch.manual_seed(step)
            got = train(model, batch(step))
            torch.manual_seed(step)
            assert torch.equal(got, train(plain, batch(step)))
        flow = watch.flow()
    assert flow.capture.recorder == "python"
    assert flow.capture.reason == "the native observer failed: ValueError: forced"
    assert all(site.measured for site in flow.sites if site.id != "input:x")


def test_lists_of_values_and_many_without_a_gradient() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.parts = 2

        def forward(self, x: Tensor) -> dict[str, Any]:
            with torch.no_grad():
                boxes = [part.abs().sum(-1).sqrt() for part in x.chunk(self.parts)]
            kept = [torch.where(box > 1)[0] for box in boxes]
            out = self.fc(x)
            rows = [out[: len(index)] * box.mean() for index, box in zip(kept, boxes, strict=True)]
            return {"out": torch.cat([*rows, out.relu()]), "boxes": boxes, "kept": kept}

    def act(model: Any, step: int) -> Tensor:
        model.parts = (2, 2, 4, 4, 4)[step]
        model.zero_grad()
        loss: Tensor = model(batch(step))["out"].square().mean()
        loss.backward()
        return loss.detach()

    found, native = acted(Lists, act)
    assert found == []
    assert native.recorders[1:3] == ["native", "native"]


def test_an_error_of_ours_in_a_backward_hook_is_the_reason_of_the_site(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed, and the user's backward goes on."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self.fc(x)).abs()  # a complex gradient, which is left to Python

    from fxgrad.probes.forward_record import ForwardRecord

    model = Complex()
    with fxgrad.watch(model) as watch:
        for step in range(3):
            if step == 2:
                monkeypatch.setattr(ForwardRecord, "native_takes", _break)
            train(model, batch(step))
        monkeypatch.undo()
        flow = watch.flow()
    assert flow.capture.recorder == "native"
    assert capfd.readouterr() == ("", "")
    (site,) = [site for site in flow.sites if "fft" in site.id]
    assert site.statistics is None
    (told,) = [spot.detail for spot in flow.blind_spots if spot.id == site.id]
    assert "no statistic could be computed of it (ValueError: forced)" in told
